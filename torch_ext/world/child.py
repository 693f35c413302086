"""Children of a zygote: forks where forking is safe, else fresh interpreters that load what the zygote has loaded.
Standard library and own layer only.

Fresh interpreters also start on request: forked ranks share one hash seed, and so never differ in the order of a set.
Variables that a test module sets or removes during its import change in each process that runs its tests.

Note [Thread pool after a fork]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A fork leaves torch's pthreadpool without its threads. On the next use, torch removes the old pool before it makes a new
one, and a native thread that starts in between finds none and ends the process ("Invalid thread pool!" and SIGABRT, in
an autograd thread). So each child replaces the pool while it has one thread, by setting the number of threads.

Note [Fork safety]
~~~~~~~~~~~~~~~~~~
A child of ``fork`` keeps one thread. It would wait forever for an OpenMP or autograd pool without threads, or for a
lock that another thread held, and a device driver would refuse every call. So a zygote imports modules and runs nothing
else. A test module may still do anything during its import: if a check before each fork fails, the child is a fresh
interpreter.

Note [Trial fork]
~~~~~~~~~~~~~~~~~
OpenBLAS is the exception: importing numpy starts its threads, whose fork handlers end them before every fork until the
next use. So if there are threads, fork one child that ends at once, and see which threads survive. Without the trial,
every program that has imported numpy would get fresh interpreters, which are slower.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import linecache
import multiprocessing.spawn
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from torch_ext.world import _os
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.protocol import Preparation

# Exit codes from here on overflow in Python.
_LONG = 1 << 63
# True in a fresh interpreter that a zygote has started.
is_of_zygote = False
# The environment of a run whose first zygote is a fork of another command's, in that zygote and its forks.
environment_of_run: dict[str, str] = {}


def child_main(order_channel: Channel, parent: int) -> NoReturn:
    """Wait for one order on ``order_channel``, execute it, exit. Dies with ``parent``."""
    code = 1
    try:
        _os.die_with_parent(parent)
        # os.kill(0, ...) in a test must not reach the user's shell.
        _os.lead_process_group()
        replace_thread_pool()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            order, descriptors = order_channel.receive()
        except ChannelClosedError:
            os._exit(0)  # the zygote has ended
        order_channel.close()
        code = pkgutil.resolve_name(order.target)(order.payload, descriptors) or 0
    except SystemExit as stop:
        code = exit_code_of(stop)
    except ChannelClosedError as error:  # the test closed the harness's descriptor: our frames do not help its author
        print(error, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _os.flush_output()
        os._exit(code & 0xFF)
    raise AssertionError("unreachable")


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a Python process that ends by ``error``.

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
    """End a process that a test has forked, as Python would, without running the rest of the harness's code. ``error``
    ended it, if any; ``trace`` replaces its traceback.
    """
    with contextlib.suppress(Exception):  # its stderr may be closed
        if isinstance(error, SystemExit):
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif error is not None and trace:
            sys.stderr.write(trace)
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
    _os.flush_output()
    os._exit(exit_code_of(error))


def redirect(stdout: int, stderr: int) -> None:
    """Redirect stdout and stderr to copies of these descriptors. Flushed after each line, since a process may die."""
    for number, name, to in ((1, "stdout", stdout), (2, "stderr", stderr)):
        os.dup2(to, number)
        # The former stream (pytest's capture, a StringIO) writes into this process's copy, which has no reader.
        stream = open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def replace_thread_pool() -> None:
    """Replace torch's inherited thread pool, which has no threads. See Note [Thread pool after a fork]."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())


# Modules that torch imports at the first comparison of two tensors and for the first optimizer, and the words in a test
# file that predict these uses. Each import takes as long as a short test, and every fresh rank would repeat it; loaded
# without need, the modules make every fork a tenth slower. Neither starts a thread.
_FIRST_USES = {
    "torch.distributed.tensor": re.compile(r"assertEqual|assertNotEqual|assert_close"),
    "torch._dynamo": re.compile(
        r"testing\._internal|optim|fsdp|fully_shard|replicate|parallel|DDP|DTensor|distribute_|device_mesh|checkpoint"
        r"|compile|dynamo|autograd",
        re.IGNORECASE,
    ),
}
# Its ``TestCase.run`` resets a setting of ``torch._dynamo`` before each test, in the process of the test's class.
_TEST_CASE = "torch.testing._internal.common_utils"

# The garbage collector's thresholds: collect new containers rarely, old ones never.
_SELDOM = (200_000, 1000, 1000)


def load(preparation: Preparation) -> None:
    """Load everything that ``preparation`` names into this process. Propagates any error of an import."""
    sys.path[:] = preparation.path
    with rarely_collected(), track_environment():
        for name in preparation.modules:
            importlib.import_module(name)
            compute_on_one_thread()
        if preparation.main_name:
            multiprocessing.spawn.prepare({"init_main_from_name": preparation.main_name})
        if preparation.main_path:
            multiprocessing.spawn.prepare({"init_main_from_path": preparation.main_path})


def first_uses(*files: str) -> tuple[str, ...]:
    """Return the modules that each rank would probably import at first use, by the text of these test files."""
    text = "".join(line for file in files for line in linecache.getlines(file))
    return tuple(name for name, words in _FIRST_USES.items() if words.search(text))


def load_first_uses(*files: str) -> None:
    """Import the modules of :func:`first_uses` in a zygote that has loaded torch and these files; torch._dynamo also if
    torch's test class has been imported.
    """
    with rarely_collected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a test's filters may turn warnings into errors, which would abort the import
        of_tests = ("torch._dynamo",) if _TEST_CASE in sys.modules else ()
        for name in (*of_tests, *first_uses(*files)) if "torch" in sys.modules else ():
            with contextlib.suppress(Exception):  # a rank that needs the module reports why it cannot be imported
                importlib.import_module(name)


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Context: collect garbage rarely: the search takes a fifth of the time to load torch, and an import makes almost
    none. Keeps thresholds that a module sets inside the context, and a collector that it disables.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        if gc.get_threshold() == _SELDOM:
            gc.set_threshold(*before)


def compute_on_one_thread() -> None:
    """Keep the import of a test module from starting a thread pool. See Note [Fork safety]."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def preparation_of_this_process(modules: tuple[str, ...]) -> Preparation:
    """Return a preparation that resolves ``modules`` and ``__main__`` to the same files as here."""
    found = multiprocessing.spawn.get_preparation_data("rank") if "__main__" in modules else {}
    return Preparation(
        path=tuple(entry or os.getcwd() for entry in sys.path),
        modules=tuple(name for name in modules if name != "__main__"),
        main_name=found.get("init_main_from_name", ""),
        main_path=found.get("init_main_from_path", ""),
    )


_changed: dict[str, str | None] = {}


@contextlib.contextmanager
def track_environment() -> Iterator[None]:
    """Context: remember the variables that change inside it; forget earlier changes."""
    before = dict(os.environ)
    yield
    names = {*before, *os.environ}
    _changed.clear()
    _changed.update({name: os.environ.get(name) for name in names if os.environ.get(name) != before.get(name)})


def enter(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process with ``environment`` and the tracked changes."""
    os.environ.clear()
    os.environ.update(environment)
    for name, value in _changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# The checkout may not be installed: a fresh interpreter must find this package before its search path arrives.
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def interpreter(module: str, *arguments: int) -> list[str]:
    """Return the command of a fresh interpreter, with the flags of this one, that calls ``main`` of ``module``."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    program = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from {module} import main; main()"
    return [sys.executable, *flags, "-c", program, *map(str, arguments)]


def start_interpreter(channel: int, environment: Mapping[str, str]) -> int:
    """Start a fresh interpreter that receives its preparation on descriptor ``channel``; return its pid."""
    os.set_inheritable(channel, True)
    try:
        command = interpreter(__name__, channel, _os.getpid())
        return os.posix_spawn(sys.executable, command, dict(environment))
    finally:
        os.set_inheritable(channel, False)


def main() -> NoReturn:
    """Program of the fresh interpreter: load the preparation, the first message, then continue as an ordinary child."""
    global is_of_zygote
    is_of_zygote = True
    parent, descriptor = int(sys.argv.pop()), int(sys.argv.pop())
    channel = Channel.from_descriptor(descriptor)
    os.set_inheritable(descriptor, False)
    preparation, _ = channel.receive()
    load(preparation)
    child_main(channel, parent)


# Descriptors that only an initialized driver holds.
_DRIVER_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/davinci", "/dev/accel")


def reason_not_to_fork(harmless: Collection[int] = ()) -> str:
    """Return why children of this process would be broken; empty if it may fork. See Note [Fork safety]. ``harmless``:
    the numbers of threads that children can do without.
    """
    known = {*harmless, _os.getpid()}  # the main thread has the number of the process
    if _os.threads_of() - known:
        _trial_fork()
    if _os.threads_of() - known:
        return f"it runs other threads: {_describe_threads()}"
    if driver := _open_driver():
        return f"a device driver is initialized in it ({driver} is open)"
    used = _device_in_use()
    return f"it has used a device, {used}, which its children then cannot use" if used else ""


def _trial_fork() -> None:
    pid = _os.fork()
    if pid == 0:
        os._exit(0)
    _os.waitpid(pid, 0)


def _describe_threads() -> str:
    python = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    named = [f"Python thread {thread.name!r}" for thread in python]
    native = len(_os.threads_of()) - 1 - len(python)
    if native > 0:
        named.append(f"{native} native thread{'s' if native > 1 else ''} (a pool of OpenMP, autograd or a library)")
    return ", ".join(named)


def has_driver() -> bool:
    """Whether this machine has a device whose driver torch may use."""
    return any(glob.glob(f"{path}*") for path in _DRIVER_FILES)


def _open_driver() -> str:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{number}")).startswith(_DRIVER_FILES):
                return target
    return ""


def _device_in_use() -> str:
    """Return the type of an accelerator that this process has initialized; empty if there is none."""
    torch: Any = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # torch is not loaded, or only a part of its accelerator is: a use fails
        device = torch.accelerator.current_accelerator()
        if device is not None and torch.get_device_module(device).is_initialized():
            return str(device)
    return ""
