"""Is it safe to fork this process? Runs in zygotes and in processes about to become one; imports the standard library
only.

Note [Fork safety]
~~~~~~~~~~~~~~~~~~
A child of ``fork`` keeps one thread, so whatever another thread was part of is broken in it: a pool of OpenMP or
autograd threads that no longer exists is waited for for ever, a lock held at that moment stays locked, and a device
driver refuses every call. The remedy is not to have such state: a zygote imports and runs nothing else. What a test
module does when it is imported is not ours, so each fork is preceded by this check, and where it fails a fresh
interpreter serves instead.

OpenBLAS is the exception: numpy starts its threads when it is imported, and its own fork handlers end them before every
    fork
and start them again on use. A trial fork therefore tells its threads from everybody else's.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from torch_ext.world import _os

__all__ = ["reason_not_to_fork"]

# Descriptors that only an initialised driver holds.
_DRIVER_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/davinci", "/dev/accel")


def reason_not_to_fork() -> str:
    """Return why children of this process would be broken, or an empty string if it may fork.

    See Note [Fork safety].
    """
    if not _os.CAN_FORK:
        return "this operating system cannot fork a process that has loaded torch"
    if _os.tasks() > 1:
        _trial_fork()
    if _os.tasks() > 1:
        return f"it runs other threads: {_describe_threads()}"
    driver = _open_driver()
    return f"a device driver is initialised in it ({driver} is open)" if driver else ""


def _trial_fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _describe_threads() -> str:
    python = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    named = [f"Python thread {thread.name!r}" for thread in python]
    native = _os.tasks() - 1 - len(python)
    if native > 0:
        named.append(f"{native} native thread{'s' if native > 1 else ''} (a pool of OpenMP, autograd or a library)")
    return ", ".join(named)


def _open_driver() -> str:
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith(_DRIVER_FILES):
            return target
    return ""
