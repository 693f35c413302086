"""Threads that run while others look at their frames."""

import gc
import linecache
import subprocess
import sys
import threading
import time
import weakref

import pytest

from torch_ext.world import frames, threads

pytestmark = pytest.mark.promise


def await_lock(thread):
    """Wait until ``thread`` waits for a lock."""
    while next(task for task in threads._threads(0) if task.tid == thread.native_id).doing != "lock":
        time.sleep(0.01)


class _Kept:
    """An object in a variable of a test."""


def observe_while_it_waits(function, *events):
    """Call ``function`` in a thread. While it waits for a lock, observe it from another, as a rank's listener does;
    then set ``events``.
    """
    body, looks = threading.Thread(target=function), threading.Thread(target=threads.observe)
    body.start()
    await_lock(body)
    looks.start()
    looks.join()
    for event in events:
        event.set()
    body.join()


def test_observation_keeps_no_object_of_the_test_alive():
    looked, over = threading.Event(), threading.Event()
    kept, alive = [], []

    def test_body():
        local = _Kept()
        kept.append(weakref.ref(local))
        looked.wait()
        del local
        alive.append(kept[0]())
        over.wait()

    gc.disable()
    try:
        observe_while_it_waits(test_body, looked, over)
        assert alive == [None] and kept[0]() is None
    finally:
        gc.enable()


def variables_of_caller():
    return sys._getframe(1).f_locals


@pytest.mark.parametrize("read", ["locals()", "variables_of_caller()"])
def test_observation_empties_no_dictionary_that_the_test_has(read, monkeypatch):
    names = {"over": threading.Event(), "variables_of_caller": variables_of_caller, "seen": []}
    source = f"def test_body():\n own = over\n found = {read}\n own.wait()\n seen.append((own, found['own']))\n"
    exec(compile(source, "test_a.py", "exec"), names)
    lines = len(source), None, source.splitlines(keepends=True), "test_a.py"
    monkeypatch.setitem(linecache.cache, "test_a.py", lines)
    observe_while_it_waits(names["test_body"], names["over"])
    assert names["seen"] == [(names["over"], names["over"])]


def test_observation_adds_nothing_to_the_local_variables_that_a_function_has_read():
    over = threading.Event()
    seen = []

    def test_body():
        own = over
        before = locals()
        number = 1
        own.wait()
        seen.append((sorted(before), number))

    observe_while_it_waits(test_body, over)
    assert seen == [(["over", "own", "seen"], 1)]


# A thread calls functions of different sizes, and each garbage collection lets it go on.
_CHANGING = r"""
import gc, random, threading, time
from torch_ext.world import threads

names = {"random": random}
for size in range(30):
    body = "".join(f"    v{each} = [depth]\n" for each in range(size))
    exec(f"def f{size}(depth):\n{body}    if depth: random.choice(all)(depth - 1)\n", names)
names["all"] = [names[f"f{size}"] for size in range(30)]

def run():
    while True:
        random.choice(names["all"])(random.randrange(40))

threading.Thread(target=run, daemon=True).start()
gc.callbacks.append(lambda phase, info: time.sleep(0))
gc.set_threshold(1)
for look in range(150):
    threads.observe()
assert gc.isenabled()
"""


def test_threads_are_observed_while_they_run_and_garbage_is_collected():
    """Before Python 3.12 a collection in the midst of it ends the process by SIGSEGV, in less than a second."""
    ran = subprocess.run([sys.executable, "-c", _CHANGING], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_frame_of_another_thread_is_read(enabled, monkeypatch):
    """Also if the test has replaced the functions of the collector."""
    during, is_enabled, enable = [], gc.isenabled, gc.enable

    class Frame:
        f_code = (lambda group: None).__code__

        def __getattr__(self, name):
            during.append((name, is_enabled()))
            return {"group": 5} if name == "f_locals" else None

    if not enabled:
        gc.disable()
    try:
        for name in ("enable", "disable", "isenabled"):
            monkeypatch.setattr(gc, name, None)
        assert len(frames.stack_of(Frame())) == 1
        assert frames.variables(Frame(), ("group", "timeout")) == {"group": 5}
        with pytest.raises(AttributeError):
            frames.stack_of(object())
        assert is_enabled() == enabled
    finally:
        enable()
    assert during == [("f_back", False), ("f_locals", False)]
