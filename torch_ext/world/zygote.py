"""The loop of a zygote: a process that has imported its children's modules, has run nothing else, and starts children
on request. See Note [Zygote protocol]. Imports the standard library and its layer only; ``provider`` loads the rest.

Note [Variables read at load]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Native libraries and some of torch's modules read variables when they load, and a forked child cannot get other values.
So a request whose environment differs in such a variable gets fresh interpreters, and a message reports the reason.
Variables whose prefix is missing here have no effect in forked ranks, only with ``--start-method interpreter``; a
needless prefix only costs time.

Note [Leftovers]
~~~~~~~~~~~~~~~~
A zygote is the subreaper of its descendants: a process whose parent has ended becomes its child. Its owner is the child
of the zygote that started it, which its process group shows, since every child of a zygote leads its own. A process
that has left the group still has ``TORCH_EXT_OWNER`` in its environment; a process with neither is charged to the child
that ended last. Processes with a live owner stay: those of a class until the class ends, and those of the file's import
until the zygote ends. Helpers that end by themselves are no leftovers.
"""

from __future__ import annotations

import gc
import linecache
import os
import pkgutil
import shutil
import signal
import sys
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch_ext.world import _os, child, threads
from torch_ext.world.channel import Callbacks, Channel, ChannelClosedError, channel_pair, close_all
from torch_ext.world.child import child_main, reason_not_to_fork, start_interpreter
from torch_ext.world.exits import disown_exit_functions
from torch_ext.world.protocol import (
    OWNER_VARIABLE,
    AddClient,
    Call,
    Copy,
    CopyOrder,
    Ended,
    LeftBehind,
    Order,
    Preparation,
    Process,
    QueryProcesses,
    Signal,
    Start,
    Started,
)

# Targets of a zygote's copy and of a rank.
_SERVE, _RANK = "torch_ext.world.provider:serve_as_copy", "torch_ext.world.rank:main"

# See Note [Variables read at load].
_READ_AT_LOAD = (
    "AOT_", "ASAN_", "ATEN_CPU_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_", "LSAN_", "MALLOC_", "MKL_",
    "MKLDNN_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONHASHSEED", "PYTHONMALLOC", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TORCH_COMPILE_", "TORCH_CPP_LOG_", "TORCH_LOGS", "TORCH_TRACE", "TSAN_", "UBSAN_",
)  # fmt: skip
# Exceptions: the world sets the first for its zygotes and restores it in every rank; torch reads the second on use.
_READ_LATER = frozenset({"OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"})

# Torch formats a stack each time it seeds the generators, and reads the files of these modules for that, which takes
# longer than a fork. A zygote reads them once for all ranks.
_SOURCES = (
    "multiprocessing.process", "torch._compile", "torch._dynamo.eval_frame", "torch.cuda", "torch.cuda.random",
    "torch.distributed.c10d_logger", "torch.distributed.distributed_c10d", "torch.random",
    "torch.testing._internal.common_utils", "unittest.case",
)  # fmt: skip


def read_when_loaded(variable: str) -> bool:
    """Whether libraries read ``variable`` when they load. See Note [Variables read at load]."""
    return variable.startswith(_READ_AT_LOAD) and variable not in _READ_LATER


def _read_sources() -> None:
    wanted = [name for name in sys.modules if name in _SOURCES or name.startswith("torch_ext.")]
    files = {getattr(sys.modules[name], "__file__", None) or "" for name in wanted}
    files |= {frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)}
    for file in files:
        linecache.getlines(file)


# Command lines of processes that clean up and end when their clients are gone.
_END_BY_THEMSELVES = ("torch_shm_manager", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Torch's shared memory manager ends two seconds after its last client, and only then removes its socket.
_CLEANUP_S = 4.0


def ends_by_itself(command: str) -> bool:
    """Whether a process with this command line ends after its last client.

    >>> ends_by_itself("/usr/bin/python3 -c from multiprocessing.resource_tracker import main;main(7)")
    True
    """
    return any(name in command for name in _END_BY_THEMSELVES)


class Leftovers:
    """The processes that this zygote has adopted. See Note [Leftovers]."""

    def __init__(self) -> None:
        self._helpers: set[int] = set()  # adopted, and known to end by themselves
        self._of_import: frozenset[Process] = frozenset()

    def keep_import_processes(self) -> None:
        """Count the processes that run now as started by the import of the test's file."""
        self._of_import = frozenset(_os.identify(_os.descendants_of(_os.getpid())))

    def end_leftovers(self, indices: dict[int, int], living: Collection[int], last: int) -> tuple[LeftBehind, ...]:
        """Kill the processes that ended children have left behind; return those that were still running. ``indices``:
        the index of each ended child of the group, by pid; ``living``: the pids of running children; ``last``: the
        index of the child that ended last.
        """
        found: list[LeftBehind] = []
        self._helpers = {pid for pid in self._helpers if not _os.waitpid(pid, os.WNOHANG)[0]}
        kept = {each.pid for each in self._of_import if _os.start_of(each.pid) == each.start}
        # This process adopts the children of a killed process.
        while adopted := {
            pid: owner
            for pid in _os.children_of(_os.getpid())
            if not {pid} & {*living, *kept, *self._helpers} and (owner := _owner(pid)) not in living
        }:
            for pid, owner in adopted.items():
                command = _os.command_line(pid)
                if ends_by_itself(command):
                    self._helpers.add(pid)
                    continue
                ended = not command or _os.is_ending(pid)  # a zombie has no command line
                _os.end_process(pid)
                _os.waitpid(pid, 0)
                if not ended:
                    found.append(LeftBehind(indices.get(owner, last), command))
        return tuple(found)


def _owner(pid: int) -> int:
    marked = _os.environment_of(pid).get(OWNER_VARIABLE, "")
    return int(marked) if marked.isdigit() else int(_os.field_of(pid, 2) or 0)  # the process group


def end_everything() -> None:
    """Kill and reap every child of this process; allow helpers that end by themselves :data:`_CLEANUP_S` seconds."""
    deadline_s = _os.monotonic() + _CLEANUP_S
    while True:
        before_deadline = _os.monotonic() < deadline_s
        for pid in _os.children_of(_os.getpid()):
            if not (before_deadline and ends_by_itself(_os.command_line(pid))):
                _os.end_process(pid)
        try:
            if not _os.waitpid(-1, os.WNOHANG if before_deadline else 0)[0]:
                _os.sleep(0.005)
        except ChildProcessError:
            return


@dataclass
class _ChildGroup:
    channel: Channel
    indices: dict[int, int] = field(default_factory=dict)  # pid -> index, children not yet reaped
    members: dict[int, int] = field(default_factory=dict)  # pid -> index, all of them
    ranks: bool = False


class _Child(NamedTuple):
    pid: int
    order_channel: Channel


@dataclass(eq=False)
class Zygote:
    """Serves clients until the first one is gone. See Note [Zygote protocol]."""

    command: Channel  # the first client's channel
    description: str  # for messages ("the zygote of test.distributed.fsdp.test_fsdp_input")
    preparation: Preparation  # gives a fresh interpreter the modules of a forked child
    scratch: str = ""  # a folder that the zygote removes at its end, since the first client may be dead then
    original: int = 0  # pid of the zygote that this zygote copies
    others: tuple[Process, ...] = ()  # the original's or the program's processes; see Note [Who else may act]

    def __post_init__(self) -> None:
        self._callbacks = Callbacks()
        self._owners: dict[int, _ChildGroup] = {}  # by pid
        self._spares: list[_Child] = []
        self._in_transit: list[int] = []  # descriptors of the current request, for children yet to be forked
        # At the start of the program
        self._environment = dict(child.environment_of_run or _os.environment_of(os.getpid()) or os.environ)
        self._leftovers = Leftovers()
        self._on_child: Any = signal.SIG_DFL  # the loaded module's handler of SIGCHLD

    def serve(self) -> NoReturn:
        """Serve until the first client is gone, then end every child and this process."""
        _os.adopt_orphans()
        self._leftovers.keep_import_processes()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the supervisor ends the run
        self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the module's must not reap our children
        _read_sources()
        threads.prepare()
        disown_exit_functions()
        gc.collect()
        gc.freeze()
        self._callbacks.watch(self.command, lambda: self._on_command(self.command))
        while not self.command.closed:
            self._callbacks.call()
        end_everything()
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(0)

    def _receive(self, channel: Channel) -> tuple[Any, list[int]] | None:
        """Return a message and its descriptors; None if there is none yet, or the channel is now closed."""
        if not channel.poll():
            return None
        try:
            return channel.receive()
        except ChannelClosedError:
            self._close(channel)
            return None

    def _close(self, channel: Channel) -> None:
        self._callbacks.unwatch(channel)
        channel.close()

    # Requests

    def _on_command(self, channel: Channel) -> None:
        received = self._receive(channel)
        if received is None:
            return
        message, descriptors = received
        if isinstance(message, Start):
            self._start(message, descriptors)
        elif isinstance(message, Copy):
            self._copy(descriptors)
        elif isinstance(message, Call):
            self._call(message, Channel.from_descriptor(descriptors[0]))
        elif isinstance(message, AddClient):
            client = Channel.from_descriptor(descriptors[0])
            self._callbacks.watch(client, lambda: self._on_command(client))
        elif isinstance(message, QueryProcesses):
            answer = Channel.from_descriptor(descriptors[0])
            answer.try_send(self._processes_besides(message.ranks))
            answer.close()
        else:
            close_all(descriptors)
            channel.refuse(f"a {type(message).__name__}, which a zygote does not understand,")
            self._close(channel)

    def _copy(self, descriptors: list[int]) -> None:
        others = (*self.others, *_os.identify(self._adopted()))
        order = Order(_SERVE, CopyOrder(self.description, self.preparation, _os.getpid(), others), 2)
        self._start(Start((order,), self._environment), descriptors)

    def _call(self, request: Call, answer: Channel) -> None:
        answer.try_send(pkgutil.resolve_name(request.target)(request.payload))
        answer.close()
        close_all([spare.order_channel for spare in self._spares])  # they lack what the call did, and end by this
        self._spares.clear()
        self._leftovers.keep_import_processes()

    def _start(self, request: Start, descriptors: list[int]) -> None:
        is_world = any(order.target == _RANK for order in request.orders)
        group = _ChildGroup(Channel.from_descriptor(descriptors[0]), ranks=is_world)
        self._callbacks.watch(group.channel, lambda: self._on_group(group))
        self._in_transit = descriptors[1:]
        why = "" if request.interpreter else self._why_interpreter(request.environment)
        for index, order in enumerate(request.orders):
            if request.interpreter or why:
                child = self._execute(request.environment)
            else:
                child = self._spares.pop(0) if self._spares else self._fork()
            own, self._in_transit = self._in_transit[: order.descriptors], self._in_transit[order.descriptors :]
            child.order_channel.try_send(order, own)  # if the child died at once, Ended reports it
            child.order_channel.close()
            close_all(own)
            group.indices[child.pid] = group.members[child.pid] = index
            self._owners[child.pid] = group
        group.channel.try_send(Started(tuple(group.indices), why))
        if not why and not request.interpreter:
            while len(self._spares) < request.spares:
                self._spares.append(self._fork())

    def _why_interpreter(self, environment: dict[str, str]) -> str:
        if reason := reason_not_to_fork():
            return f"{self.description} cannot fork: {reason}"
        different = [
            name
            for name in environment.keys() | self._environment.keys()
            # If a module has set the variable during its import, every fork has that value as well.
            if environment.get(name) not in (self._environment.get(name), os.environ.get(name))
        ]
        changed = ", ".join(sorted(filter(read_when_loaded, different)))  # see Note [Variables read at load]
        return f"{changed} changed, which torch or a library reads only when it is loaded" if changed else ""

    # See Note [Who else may act].

    def _processes_besides(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        worlds = {pid for pid, group in self._owners.items() if group.ranks}
        found = [
            *_os.descriptions(child for pid in worlds for child in _os.children_of(pid)),
            *_os.descriptions(worlds.difference(ranks)),
            *_os.descriptions(self._adopted()),
            *_os.still_running(self.others),
            *(f"{word} of the zygote" for word in threads.observe().may_act),
        ]
        if self.original and len(_os.threads_of(self.original)) > 1:
            found.append(f"a thread of process {self.original}, which has imported the file of the test")
        if not _os.lists_children():
            found.append("a process that this kernel does not show")
        return tuple(found)

    def _adopted(self) -> set[int]:
        return set(_os.children_of(os.getpid())).difference(self._owners, [spare.pid for spare in self._spares])

    # Children

    def _fork(self) -> _Child:
        local, remote = channel_pair()
        _os.flush_output()
        zygote = _os.getpid()
        pid = _os.fork()
        if pid == 0:
            self._forget()
            local.close()
            signal.signal(signal.SIGCHLD, self._on_child or signal.SIG_DFL)
            child_main(remote, zygote)
        remote.close()
        return self._adopt(pid, local)

    def _forget(self) -> None:
        """In a child: close the descriptors of the zygote and of other children, so that each closes with its owner."""
        close_all(self._in_transit)
        close_all((*self._callbacks.files, *(spare.order_channel for spare in self._spares)))
        self._callbacks.close()

    def _execute(self, environment: dict[str, str]) -> _Child:
        local, remote = channel_pair()
        pid = start_interpreter(remote.fileno(), environment)
        remote.close()
        local.try_send(self.preparation)  # if the child died at once, Ended reports it
        return self._adopt(pid, local)

    def _adopt(self, pid: int, order_channel: Channel) -> _Child:
        watch = _os.watch_exit(pid)
        self._callbacks.watch(watch, lambda: self._on_exit(pid, watch))
        return _Child(pid, order_channel)

    # Events

    def _on_group(self, group: _ChildGroup) -> None:
        received = self._receive(group.channel)
        message = received[0] if received is not None else None
        for pid, index in group.indices.items():
            if group.channel.closed:  # the client abandons the group
                _os.end_process(pid)
            elif isinstance(message, Signal) and index == message.index:
                _os.end_process(pid, message.number)

    def _on_exit(self, pid: int, watch: int) -> None:
        self._callbacks.unwatch(watch)
        os.close(watch)
        _, status = _os.waitpid(pid, 0)
        now = _os.monotonic()
        group = self._owners.pop(pid, None)
        if group is None:
            self._spares = [spare for spare in self._spares if spare.pid != pid]
            return
        index = group.indices.pop(pid)
        left_behind: tuple[LeftBehind, ...] = ()
        if not group.indices:  # until then a peer may still use another's leftovers
            living = {*self._owners, *(spare.pid for spare in self._spares)}
            left_behind = self._leftovers.end_leftovers(group.members, living, index)
        group.channel.try_send(Ended(index, os.waitstatus_to_exitcode(status), now, left_behind))
