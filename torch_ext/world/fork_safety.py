"""Whether it is safe to fork this process. Runs in zygotes and in processes about to become one; imports the standard
library and its own layer only.

Note [Fork safety]
~~~~~~~~~~~~~~~~~~
A child of ``fork`` keeps one thread, and whatever another thread was part of is broken in it: it waits forever for an
OpenMP or autograd pool that no longer exists, a lock that was held at that moment stays locked, and a device driver
refuses every call. So a zygote imports modules and runs nothing else. But a test module may do anything when it is
imported, so each fork is preceded by this check, and where it fails the child gets a fresh interpreter.

Note [Trial fork]
~~~~~~~~~~~~~~~~~
OpenBLAS is the exception: importing numpy starts its threads, and its own fork handlers end them before every fork and
start them again on use. Their number alone cannot be told from that of other threads. So where there are threads, one
child is forked that ends at once; threads that survive it belong to somebody else. Without the trial
(``TORCH_EXT_TRIAL_FORK=0``), every program that has imported numpy gets ranks with fresh interpreters, unless
``OPENBLAS_NUM_THREADS=1`` is set: slower, never wrong.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from torch_ext.world import _os, settings

__all__ = ["reason_not_to_fork"]

# Descriptors that only an initialized driver holds.
_DRIVER_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/davinci", "/dev/accel")


def reason_not_to_fork() -> str:
    """Return why children of this process would be broken, or an empty string if it may fork.

    See Note [Fork safety].
    """
    if not _os.CAN_FORK:
        return "this operating system cannot fork a process that has loaded torch"
    if _os.tasks() > 1 and settings.trial_fork():
        _trial_fork()
    if _os.tasks() > 1:
        return f"it runs other threads: {_describe_threads()}"
    driver = _open_driver()
    if driver:
        return f"a device driver is initialized in it ({driver} is open)"
    used = _device_in_use()
    return f"it has used a device, {used}, which its children then cannot use" if used else ""


def _trial_fork() -> None:
    """See Note [Trial fork]."""
    pid = _os.fork()
    if pid == 0:
        os._exit(0)
    _os.waitpid(pid, 0)


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


def _device_in_use() -> str:
    """Return the type of the accelerator if this process has initialized it, such as one that holds no driver open."""
    torch = sys.modules.get("torch")
    accelerator = getattr(torch, "accelerator", None)
    try:
        device = None if accelerator is None else accelerator.current_accelerator()
        if torch is None or device is None:
            return ""
        is_initialized = getattr(torch.get_device_module(device), "is_initialized", None)
        return str(device) if is_initialized is not None and is_initialized() else ""
    except Exception:  # an accelerator that is registered in part; whoever uses it is told
        return ""
