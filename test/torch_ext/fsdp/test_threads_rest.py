"""Memory is read when no other thread of the process can still free some."""

import hashlib
import threading

from torch_ext.testing._internal._fsdp.cases import _wait_until_threads_rest


def test_a_thread_that_computes_is_waited_for():
    done, begun = [], threading.Event()

    def compute():
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # without the GIL
        done.append(True)

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    _wait_until_threads_rest(60)
    assert done
    thread.join()


def test_a_thread_that_never_rests_is_waited_for_until_the_limit():
    ends = threading.Event()

    def never_rest():
        while not ends.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)

    thread = threading.Thread(target=never_rest)
    thread.start()
    _wait_until_threads_rest(0.05)
    ends.set()
    thread.join()
