"""The first and last thing that every child of a zygote does. Standard library and own layer only.

Note [Thread pool after a fork]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A fork leaves torch's pthreadpool without its threads, and torch replaces it on the next use: it takes the old pool away
first, and makes the new one afterwards. A second thread that looks in between finds none and ends the process
("Invalid thread pool!" and SIGABRT, in an autograd thread). Every native thread looks when it starts. So each child
replaces the pool while it has one thread, by setting the number of threads to what it is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from typing import NoReturn

from torch_ext.world import _os
from torch_ext.world.channel import Channel, ChannelClosedError

__all__ = ["child_main", "end_fork", "exit_code_of", "redirect", "replace_thread_pool"]

# Larger exit codes do not fit into what Python takes them for.
_LONG = 1 << 63


def child_main(order_channel: Channel, parent: int) -> NoReturn:
    """Wait for one order, obey it, end. Never returns to the caller, such as a zygote's loop.

    Args:
        order_channel: where the order arrives; closed when it has.
        parent: pid of the process whose end is this one's end too.
    """
    code = 1
    try:
        _os.die_with_parent(parent)
        # A signal that this process sends to its group, as os.kill(0, ...) does, must not reach the user's shell.
        _os.lead_process_group()
        replace_thread_pool()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            order, descriptors = order_channel.receive()
        except ChannelClosedError:
            os._exit(0)  # the zygote ended before it needed this child
        order_channel.close()
        module, _, function = order.target.partition(":")
        code = getattr(importlib.import_module(module), function)(order.payload, descriptors) or 0
    except SystemExit as stop:
        code = exit_code_of(stop)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _os.flush_output()
        os._exit(code & 0xFF)
    raise AssertionError("unreachable")


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code that Python ends with by ``error``.

    >>> [exit_code_of(error) for error in (None, SystemExit(), SystemExit(3), SystemExit("why"), ValueError())]
    [0, 0, 3, 1, 1]
    >>> [exit_code_of(SystemExit(code)) for code in (-1, 256, 1 << 80)]
    [255, 0, 255]
    """
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    if isinstance(error.code, int):
        return error.code & 0xFF if abs(error.code) < _LONG else 0xFF
    return 0 if error.code is None else 1


def end_fork(error: BaseException | None, trace: str = "") -> NoReturn:
    """End a process that somebody else's code has forked and that ran to its end, as Python would: what follows is its
    parent's alone.

    Args:
        error: what it ended by.
        trace: is shown in place of the error's own.
    """
    with contextlib.suppress(Exception):  # its stderr may be closed; the exit code tells it all the same
        _say_why(error, trace)
    _os.flush_output()
    os._exit(exit_code_of(error))


def _say_why(error: BaseException | None, trace: str) -> None:
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None and trace:
        sys.stderr.write(trace)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)


def redirect(stdout: int, stderr: int) -> None:
    """Have all that this process prints go to copies of these descriptors, each line at once: whoever dies has printed
    what it had to say.
    """
    for number, name, to in ((1, "stdout", stdout), (2, "stderr", stderr)):
        os.dup2(to, number)
        # What stood here (pytest's capture, a StringIO) writes into this process's copy of it, which nobody reads.
        stream = open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def replace_thread_pool() -> None:
    """Have torch, if it is loaded, replace a pool of threads that this process has inherited and that has none.

    See Note [Thread pool after a fork].
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())
