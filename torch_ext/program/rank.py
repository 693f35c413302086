"""Prepares a rank for its program and finishes it; serves the ranks' store; reports a job that used no device.

Loads torch only if the program has.

Note [A rank is an ordinary process]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A program may check that it runs in the main process before it starts workers, which find it through
``sys.modules["__main__"]``. So a rank, a child of multiprocessing, looks like the process of ``python train.py``: with
its ``__main__`` and ``sys.path[0]``, as a main process without a parent. The rank resets what Python has cached from
the zygote's environment, which may belong to another terminal.

Note [Silent fakes]
~~~~~~~~~~~~~~~~~~~
A program that chooses its device from a fixed list of vendors finds no GPU and computes on the host; a program that
makes a process group only on a GPU makes none. In both cases N ranks train separately, and all exit with code 0. So a
job that passed on ``sim`` reports the devices and groups that its ranks have not used.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing.context
import multiprocessing.process
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch_ext.program.autoload import WORKER
from torch_ext.program.dry import snapshot_of
from torch_ext.program.main_module import Program, finalize, run_main
from torch_ext.program.timeline import events_of, replicas_of
from torch_ext.world import debugger, operations, wording
from torch_ext.world import rank as world_rank
from torch_ext.world._os import monotonic
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.child import end_fork, exit_code_of
from torch_ext.world.protocol import RankStatus, Receipt
from torch_ext.world.threads import LISTENER
from torch_ext.world.wording import add_note, ranks_phrase

STORE_HOST = "127.0.0.1"
_STORE_ANSWER_S = 2.0


# Files of the frames that run the program.
_CALLERS = ("/torch_ext/program/main_module.py", "<frozen runpy>", "/runpy.py")


def run(program: Program) -> None:
    """Run ``program`` in this rank, submit the rank's receipt with :class:`Facts`, and exit with the program's code."""
    own, pid = world_rank.this_rank(), os.getpid()
    number = os.environ["RANK"]
    os.environ[WORKER] = str(pid)
    _become_main_process()
    races = _prepare(program)
    error: BaseException | None = None
    measures = _Measures(program)
    try:
        measures.start(own.rank)
        run_main(program)
    except BaseException as raised:
        error = raised
        if exit_code_of(error):
            debugger.examine(error)
    if os.getpid() != pid:
        end_fork(error)  # a child that the program has forked
    error = _with_races(races, program.races, error)
    if not exit_code_of(error):
        try:
            measures.end(own.rank, number)
        except Exception as raised:
            error = raised
    code = exit_code_of(error)
    facts = Facts(code, _groups_made(), _uses_of_device(), measures.timeline, measures.memory)
    if error is None or not code:
        with contextlib.suppress(OSError):  # the program has closed our descriptors, as a daemon does
            own.submit(Receipt(RankStatus.PASSED, monotonic(), facts=facts))
        finalize(LISTENER)
        sys.exit(0)
    _print_error(error)
    try:
        own.submit(replace(world_rank.failure(error), facts=facts))
    except OSError:
        if not isinstance(error, SystemExit):
            print(wording.read_error(error)[1], end="", file=sys.stderr, flush=True)
    with contextlib.suppress(BaseException):  # after a failure, submit() has not called them
        atexit._run_exitfuncs()
    finalize(LISTENER)
    sys.exit(code)


class _Measures:
    """The virtual time, the hashes of replicas and the dry run of a rank, if its program asks for them."""

    timeline: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    _clock: Any = None
    _dry: Any = None

    def __init__(self, program: Program) -> None:
        self._program = program

    def start(self, place: int) -> None:
        """Start to write. ``place``: among the ranks that run, which a dry run may choose."""
        if self._program.check_replicas:
            importlib.import_module("torch_ext.replicas").Recorder(replicas_of(self._program.events, place))
        if self._program.assumed is not None:
            self._dry = importlib.import_module("torch_ext.sim.dry").Program(self._program.assumed)
        if self._program.clock:
            self._clock = importlib.import_module("torch_ext.sim.clock").Program(self._program.clock)

    def end(self, place: int, rank: str) -> None:
        """Write the rest of the rank's files; ``place`` as in :meth:`start`."""
        if self._clock is not None:
            self.timeline = self._clock.end(int(rank), events_of(self._program.events, place))
        if self._dry is not None:
            self.memory = self._dry.end(snapshot_of(rank), is_timed=self._clock is not None)


def _become_main_process() -> None:
    """See Note [A rank is an ordinary process]."""
    process: Any = multiprocessing.process
    own = process.current_process()
    own._identity, own._name, own._parent_name = (), "MainProcess", None
    process._parent_process = None
    context: Any = multiprocessing.context
    context._default_context._actual_context = None  # let the program choose its start method
    process.ORIGINAL_DIR = os.getcwd()
    tempfile.tempdir = None
    time.tzset()


def _prepare(program: Program) -> Any:
    """Set up the device for the program; return ``torch.sim.races`` if the check for races is on."""
    if not program.simulated:
        return None
    from torch_ext.sim import races

    if program.cuda_as_sim:
        from torch_ext.cuda_as_sim import visible

        visible.record()
    races.stop()  # the import has begun a check of this process
    if program.races == "off":
        return None
    races.start()
    return races


def _with_races(races: Any, mode: str, error: BaseException | None) -> BaseException | None:
    """Return ``error``, or the error for the program's races if it found any; may print the races instead."""
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


def _print_error(error: BaseException) -> None:
    """Print Python's output for the error without the traceback, which the report shows."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr, flush=True)
    elif not getattr(sys.excepthook, "__module__", "").startswith(("sys", "torch.")):
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException:  # Python, too, only prints it
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()


def serve_store(port: int, descriptors: Sequence[int]) -> int:
    """Serve the ranks' rendezvous store until the supervisor closes the channel. Descriptors: channel, socket.

    The store has a separate process, like torchrun's agent, so that it outlives the rank that ends first.
    """
    from torch.distributed import TCPStore

    channel = Channel.from_descriptor(descriptors[0])
    options: Any = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=_STORE_ANSWER_S)}
    store = TCPStore(STORE_HOST, port, master_listen_fd=descriptors[1], **options)
    before = store.num_keys()
    with contextlib.suppress(ChannelClosedError):
        while True:
            channel.receive()
            channel.send(store.num_keys() - before)
    os._exit(0)  # the store's thread may still be answering a rank that is gone


# Use of the device and of peers by a rank.


@dataclass(frozen=True)
class Facts:
    """A rank's report at the end of its program, in its receipt."""

    exit_code: int  # of the program
    groups: int  # number of process groups that the rank made
    uses: int  # number of uses of a simulated device, see :func:`_uses_of_device`
    timeline: dict[str, Any] | None = None  # of virtual time, see :mod:`torch_ext.program.timeline`
    memory: dict[str, Any] | None = None  # of a dry run, see :mod:`torch_ext.program.dry`


def _groups_made() -> int:
    """Return the number of process groups that this process has made since it loaded the simulator."""
    collectives = sys.modules.get("torch_ext.sim._collectives")
    return collectives.groups_made() if collectives is not None else 0


def _uses_of_device() -> int:
    """Return the number of uses of a simulated device by this process: allocations, and collectives of tensors. Without
    any, the number of objects that it moved between ranks.
    """
    sim: Any = sys.modules.get("torch_ext.sim._module")
    if sim is None:
        return 0
    uses = int(sys.modules["torch_ext.sim._native"].operations_launched_on_devices())
    if sim.is_initialized():
        stats = (sim.memory_stats(index) for index in range(sim.device_count()))
        uses += sum(int(each.get("allocation.all.allocated", 0)) for each in stats)
    if uses:
        return uses
    moved: int = sys.modules["torch_ext.sim._collectives"].objects_moved()
    entries = operations.record().get("entries", []) if moved else []
    types = {kind for entry in entries for side in ("input_dtypes", "output_dtypes") for kind in entry.get(side, [])}
    return moved if types <= {"Byte", "Long"} else 0  # the pickled bytes, and their lengths


def find_unused(facts: Sequence[Facts | None], *, met: bool = False, cuda_as_sim: bool = False) -> list[str]:
    """Return sentences about devices and groups that ranks have not used; empty for a single rank.

    ``facts`` has one per rank; None, from a rank that ended without a report, counts as use. ``met``: the ranks used
    the job's store, as RPC does without a group. ``cuda_as_sim``: leave out the hint at that option.

    >>> find_unused([Facts(0, 1, 9), Facts(0, 1, 0)])[0]
    'rank 1 used no simulated device and computed on the host. If the program chooses a device by \
the name "cuda", run it with --cuda-as-sim.'
    """
    reported = {rank: each for rank, each in enumerate(facts) if each is not None}
    if len(facts) < 2:
        return []
    sentences = []
    alone = [rank for rank, each in reported.items() if not each.groups]
    if len(alone) == len(facts) and not met:
        sentences.append(f"none of the {len(facts)} ranks made a process group: each ran by itself.")
    elif alone and not met:
        sentences.append(f"{ranks_phrase(alone)} made no process group, and so took no part in the job.")
    host = [rank for rank, each in reported.items() if not each.uses]
    if host:
        hint = "" if cuda_as_sim else ' If the program chooses a device by the name "cuda", run it with --cuda-as-sim.'
        sentences.append(f"{ranks_phrase(host)} used no simulated device and computed on the host.{hint}")
    return sentences


def report_at_end(owner: int, *, cuda_as_sim: bool) -> None:
    """In process ``owner`` (a pid), report a device or groups that this torchrun worker left unused; see Note [Silent
    fakes]. With ``TORCH_EXT_SIM_STRICT=1``, then exit 1.
    """
    if os.getpid() != owner:
        return
    reported = Facts(0, _groups_made(), _uses_of_device())
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    strict = os.environ.get("TORCH_EXT_SIM_STRICT") == "1"
    facts = [reported if number == rank else None for number in range(size)]
    unused = find_unused(facts, cuda_as_sim=cuda_as_sim)
    for sentence in unused:
        print(f"torch_ext: {'error' if strict else 'warning'}: {sentence}", file=sys.stderr, flush=True)
    if unused and strict:
        sys.stdout.flush()
        os._exit(1)  # the only way for an exit function to change the exit code
