"""What a child of a zygote is made from: by a fork where that is safe, else by a fresh interpreter that loads what the
zygote has loaded. Standard library and own layer only.

A fresh interpreter also serves where a library reads a variable only when it loads, and on request: forked ranks share
one hash seed, so that they never differ in the order of a set. A test module may set or remove variables as it is
imported; each process that runs its tests gets them as well, on top of the environment of the moment.

Note [Thread pool after a fork]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A fork leaves torch's pthreadpool without its threads, and torch replaces it on the next use: it takes the old pool away
first, and makes the new one afterwards. A second thread that looks in between finds none and ends the process
("Invalid thread pool!" and SIGABRT, in an autograd thread). Every native thread looks when it starts. So each child
replaces the pool while it has one thread, by setting the number of threads to what it is.

Note [Fork safety]), where a variable is read only when a library loads, and on
request: forked ranks share one hash seed, so they never differ in the order of a set.

Whether it is safe to fork this process. Runs in zygotes and in processes about to become one; imports the standard
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

import contextlib
import gc
import importlib
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from torch_ext.world import _os, settings
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.protocol import Preparation

__all__ = [
    "PACKAGE_ROOT",
    "child_main",
    "compute_on_one_thread",
    "end_fork",
    "enter",
    "exit_code_of",
    "load",
    "load_first_uses",
    "main",
    "noted",
    "preparation_of_this_process",
    "reason_not_to_fork",
    "redirect",
    "replace_thread_pool",
    "start_interpreter",
    "uncollected",
]

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


# Torch imports these itself: the first for the first comparison of two tensors, the second for the first optimizer.
# Each takes about as long as a short test, and in a fresh rank each use is the first. Neither starts a thread.
_FIRST_USES = ("torch.distributed.tensor", "torch._dynamo")

# The collector's thresholds: one look for every so many new containers, and never at all that lives.
_SELDOM = (200_000, 1000, 1000)


def load(preparation: Preparation) -> None:
    """Load everything that ``preparation`` names into this process. Raises whatever an import raises."""
    sys.path[:] = preparation.path
    with uncollected(), noted():
        for name in preparation.modules:
            importlib.import_module(name)
            compute_on_one_thread()
        if preparation.main_name:
            multiprocessing.spawn.prepare({"init_main_from_name": preparation.main_name})
        if preparation.main_path:
            multiprocessing.spawn.prepare({"init_main_from_path": preparation.main_path})


def load_first_uses() -> None:
    """In a zygote that has loaded torch: import the parts of it that ranks would each import at first use."""
    with uncollected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filters of a test that make errors of warnings would break off the import
        for name in _FIRST_USES if "torch" in sys.modules else ():
            with contextlib.suppress(Exception):  # a rank that needs the module reports why it cannot be imported
                importlib.import_module(name)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within, hardly look for garbage: next to nothing that an import makes is any, and looking for it takes a fifth of
    the time to load torch. A module that sets thresholds of its own, or turns the collector off, has its way.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        if gc.get_threshold() == _SELDOM:
            gc.set_threshold(*before)


def compute_on_one_thread() -> None:
    """Keep what a test module computes while it is imported from starting a thread pool. See Note [Fork safety]."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def preparation_of_this_process(modules: tuple[str, ...]) -> Preparation:
    """Return what makes a fresh interpreter resolve ``modules`` and ``__main__`` to the files that they are here."""
    found = multiprocessing.spawn.get_preparation_data("rank") if "__main__" in modules else {}
    return Preparation(
        path=tuple(entry or os.getcwd() for entry in sys.path),
        modules=tuple(name for name in modules if name != "__main__"),
        main_name=found.get("init_main_from_name", ""),
        main_path=found.get("init_main_from_path", ""),
    )


_changed: dict[str, str | None] = {}


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Remember what changes within, and nothing from before."""
    before = dict(os.environ)
    yield
    names = {*before, *os.environ}
    _changed.clear()
    _changed.update({name: os.environ.get(name) for name in names if os.environ.get(name) != before.get(name)})


def enter(environment: Mapping[str, str]) -> None:
    """Make ``environment`` that of this process, with what the import changed."""
    os.environ.clear()
    os.environ.update(environment)
    for name, value in _changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# The checkout may not be installed: a fresh interpreter must find this very package before it is told its path.
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_PROGRAM = (
    f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); "
    "from torch_ext.world.child import main; main(int(sys.argv.pop()), int(sys.argv.pop()))"
)


def start_interpreter(channel: int, environment: Mapping[str, str]) -> int:
    """Start a fresh interpreter that inherits descriptor ``channel`` and waits on it for its preparation; return its
    pid.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    arguments = [sys.executable, *flags, "-c", _PROGRAM, str(channel), str(_os.getpid())]
    os.set_inheritable(channel, True)
    try:
        return os.posix_spawn(sys.executable, arguments, dict(environment))
    finally:
        os.set_inheritable(channel, False)


def main(parent: int, descriptor: int) -> NoReturn:
    """Program of the fresh interpreter: load the preparation that arrives first, then be an ordinary child."""
    channel = Channel.from_descriptor(descriptor)
    os.set_inheritable(descriptor, False)
    preparation, _ = channel.receive()
    load(preparation)
    child_main(channel, parent)


# Descriptors that only an initialized driver holds.
_DRIVER_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/davinci", "/dev/accel")


def reason_not_to_fork() -> str:
    """Return why children of this process would be broken, or an empty string if it may fork.

    See Note [Fork safety].
    """
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
