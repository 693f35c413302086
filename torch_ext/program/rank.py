"""What a rank does before its program and after it, and the store that the ranks meet at. Loads no torch itself.

Note [A rank is an ordinary process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank is a child that multiprocessing would know as its own. A program must not see that: it asks whether it runs in
the main process before it starts workers, and those find it through ``sys.modules["__main__"]``. So the rank becomes
what ``python train.py`` makes: its ``__main__``, its ``sys.path[0]``, a main process without a parent. It forgets what
Python keeps of the environment that the zygote was started in, which may be that of another terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.context
import multiprocessing.process
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch_ext.program import usage
from torch_ext.program.autoload import mark_worker
from torch_ext.program.main_module import Program, finalize, run_main
from torch_ext.program.usage import Facts
from torch_ext.world import operations, wording
from torch_ext.world import rank as world_rank
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.child import end_fork, exit_code_of
from torch_ext.world.protocol import Receipt, Said
from torch_ext.world.threads import LISTENER
from torch_ext.world.wording import add_note

__all__ = ["STORE_HOST", "run", "serve_store"]

STORE_HOST = "127.0.0.1"
_STORE_ANSWER_S = 2.0

wording.hide(r"/torch_ext/program/rank\.py")
# Wait for their caller.
operations.look_through(*(f"/torch_ext/sim/{name}.py" for name in ("_collectives", "_gloo_halves", "races/_threads")))

# What runs the program.
_CALLERS = ("/torch_ext/program/main_module.py", "<frozen runpy>", "/runpy.py")


def run(program: Program, variables: Mapping[str, str], facts: Connection) -> None:
    """Run ``program`` in this rank and hand in its receipt. ``facts`` gets one :class:`Facts` before.

    Raises:
        SystemExit: with the program's exit code.
    """
    own = world_rank.this_rank()
    pid, line = os.getpid(), os.fstat(facts.fileno())
    os.environ.update(variables)
    mark_worker()
    _become_main_process()
    races = _prepare(program)
    error = _raised_by(program)
    if os.getpid() != pid:
        end_fork(error)  # it is no rank
    error = _with_races(races, program.races, error)
    code = exit_code_of(error)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(facts.fileno()), line):  # and not a file of the program's own by now
            facts.send(Facts(code, usage.groups_made(), usage.uses_of_device()))
            facts.close()
    if not code:
        with contextlib.suppress(OSError):  # the program has closed what it did not know; it may have become a daemon
            own.hand_in(Receipt(Said.PASSED, time.monotonic()))
        finalize(LISTENER)
        sys.exit(0)
    _tell(error)
    try:
        own.hand_in(world_rank.failure(error) if error is not None else Receipt(Said.FAILED, time.monotonic()))
    except OSError:
        if error is not None and not isinstance(error, SystemExit):
            print(wording.read_error(error)[1], end="", file=sys.stderr, flush=True)
    _call_exit_functions()
    finalize(LISTENER)
    sys.exit(code)


def _become_main_process() -> None:
    """See Note [A rank is an ordinary process]."""
    process: Any = multiprocessing.process
    own = process.current_process()
    own._identity, own._name, own._parent_name = (), "MainProcess", None
    process._parent_process = None
    context: Any = multiprocessing.context
    context._default_context._actual_context = None  # a program may choose its start method once
    process.ORIGINAL_DIR = os.getcwd()
    tempfile.tempdir = None
    time.tzset()


def _prepare(program: Program) -> Any:
    """Set up the device as the program is to find it; return ``torch.sim.races`` if races are looked for."""
    if not program.simulated:
        return None
    from torch_ext.sim import races

    if program.cuda_as_sim:
        from torch_ext.cuda_as_sim import loader, runtime, spawned, visible  # noqa: F401  # replaces Tensor.cuda

        visible.record()
        root = os.getcwd() if program.is_module else os.path.dirname(os.path.realpath(program.target))
        spawned.install([root], (loader.HELPERS, *program.packages))
    races.stop()  # a check of the process that has begun with the import
    if program.races == "off":
        return None
    races.start()
    return races


def _raised_by(program: Program) -> BaseException | None:
    try:
        run_main(program)
    except BaseException as error:
        return error
    return None


def _with_races(races: Any, mode: str, error: BaseException | None) -> BaseException | None:
    """Return what the program ended by, now that its races are known."""
    found = [_cut(race) for race in races.stop()] if races is not None else []
    if not found:
        return error
    if exit_code_of(error) and error is not None:
        add_note(error, races.render(found))
    elif mode == "error":
        raised: BaseException = races.RaceError(found)
        return raised
    else:
        print(races.render(found), file=sys.stderr, flush=True)
    return error


def _cut(race: Any) -> Any:
    """Return ``race`` without the frames that called the program."""

    def of_program(stack: Any) -> Any:
        outer = (number for number, frame in enumerate(stack or ()) if frame.file.endswith(_CALLERS))
        return stack and stack[: next(outer, len(stack))]

    earlier, later = (
        replace(access, stack=of_program(access.stack), lane_stack=of_program(access.lane_stack))
        for access in (race.earlier, race.later)
    )
    places = {"allocated": of_program(race.allocated), "freed": of_program(race.freed)}
    return replace(race, earlier=earlier, later=later, **places)


def _tell(error: BaseException | None) -> None:
    """Print what Python would print of the error besides the traceback, which the report shows."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr, flush=True)
    elif error is not None and not getattr(sys.excepthook, "__module__", "").startswith(("sys", "torch.")):
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException:  # Python itself goes on, too
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()


def _call_exit_functions() -> None:
    """Call the program's ``atexit`` functions. For a program that passed, its receipt has called them already."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()


def serve_store(port: int, descriptors: Sequence[int]) -> int:
    """Serve the store that the ranks meet at, until the supervisor closes the channel. Descriptors: it, and the socket.

    The store has a process of its own, as torchrun's agent has, and outlives the rank that ends first.
    """
    from torch.distributed import TCPStore

    channel = Channel.from_descriptor(descriptors[0])
    store = TCPStore(
        STORE_HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_ANSWER_S),
        master_listen_fd=descriptors[1],
    )
    before = store.num_keys()
    with contextlib.suppress(ChannelClosedError):
        while True:
            channel.receive()
            channel.send(store.num_keys() - before)
    os._exit(0)  # the store's thread may be in the middle of an answer that nobody waits for
