"""The loop of a zygote: a process that has imported what its children need, has run nothing, and starts them on
request.

Runs in zygotes; imports the standard library and its own layer only (torch and the test module are loaded by whoever
starts the loop, before it starts).

See Note [Zygote protocol] in ``protocol.py``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import linecache
import os
import selectors
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch_ext.world import _os
from torch_ext.world.culprit import find_culprit
from torch_ext.world.guard import reason_not_to_fork
from torch_ext.world.interpreter import Preparation, start_interpreter
from torch_ext.world.protocol import AddClient, Ended, LeftBehind, Send, Start, Started
from torch_ext.world.wire import Channel, ChannelClosedError, channel_pair, close_all

__all__ = ["Zygote", "child_main"]

# Variables that native libraries, or torch's modules, read once when they are loaded: a forked child cannot be given
# other values.
_READ_AT_LOAD = (
    "AOT_", "ASAN_", "ATEN_CPU_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_", "LSAN_", "MALLOC_", "MKL_",
    "MKLDNN_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONHASHSEED", "PYTHONMALLOC", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TORCH_COMPILE_", "TORCH_CPP_LOG_", "TORCH_LOGS", "TORCH_TRACE", "TSAN_", "UBSAN_",
)  # fmt: skip
# Of these, set by the world itself for its zygotes and put back in every rank; and read whenever it is needed.
_READ_LATER = frozenset({"OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"})

# Forking costs about a third less once the heap lies in huge pages, but gathering it costs as much as some fifteen
# worlds.
_COLLAPSE_AFTER_FORKS = 8

# Torch's manager of shared memory ends by itself two seconds after its last client, and only then removes its socket.
_SHM_MANAGER = "torch_shm_manager"
_SHM_MANAGER_S = 4.0


# Modules in whose frames torch formats stacks while nothing is wrong: every seeding on a build that knows CUDA does so,
# and would read these files in every rank, which takes longer than forking it.
_SOURCES = (
    "multiprocessing.process", "torch._compile", "torch._dynamo.eval_frame", "torch.cuda", "torch.cuda.random",
    "torch.distributed.c10d_logger", "torch.distributed.distributed_c10d", "torch.random",
    "torch.testing._internal.common_utils", "unittest.case",
)  # fmt: skip


def _read_sources() -> None:
    wanted = [name for name in sys.modules if name in _SOURCES or name.startswith("torch_ext.")]
    files = {getattr(sys.modules[name], "__file__", None) or "" for name in wanted}
    files |= {frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)}
    for file in files:
        linecache.getlines(file)


@dataclass
class _Brood:
    channel: Channel
    indices: dict[int, int] = field(default_factory=dict)  # pid -> index, children not yet reaped

    def tell(self, message: Any) -> None:
        with contextlib.suppress(ChannelClosedError, OSError):
            self.channel.send(message)


@dataclass
class _Child:
    pid: int
    order_channel: Channel
    exit_watch: int


class Zygote:
    """Serves clients until the first one is gone. See Note [Zygote protocol].

    Args:
        command: the first client's channel.
        description: what this process is, for messages ("the zygote of test.distributed.fsdp.test_fsdp_input").
        preparation: what a child with an interpreter of its own loads to be like one that was forked.
        scratch: a folder of the first client's that is removed when the zygote ends, since the client may have been
            killed.
    """

    def __init__(self, command: Channel, description: str, preparation: Preparation, scratch: str = "") -> None:
        self._command = command
        self._description = description
        self._preparation = preparation
        self._scratch = scratch
        self._selector = selectors.DefaultSelector()
        self._broods: dict[int, _Brood] = {}  # by descriptor of the brood's channel
        self._owners: dict[int, _Brood] = {}  # by pid
        self._spares: list[_Child] = []
        self._forks = 0
        self._environment = _os.environment_at_start()
        self._strangers: dict[int, LeftBehind] = {}  # by pid
        self._managers: set[int] = set()  # strangers that end by themselves
        self._culprit: str | None = None  # None: not looked for yet

    def serve(self) -> NoReturn:
        """Serve until the first client is gone, then end every child and this process."""
        _os.adopt_orphans()
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # the terminal sends it to all; the supervisor ends the run in order
        _read_sources()
        gc.collect()
        gc.freeze()
        self._watch(self._command, self._on_command)
        while not self._command.closed:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) == key:  # an earlier event of this round may have closed it
                    key.data()
        self._end()

    def _watch(self, fileobj: Any, callback: Callable[[Any], None]) -> None:
        self._selector.register(fileobj, selectors.EVENT_READ, lambda: callback(fileobj))

    # Requests

    def _on_command(self, channel: Channel) -> None:
        try:
            message, descriptors = channel.receive()
        except ChannelClosedError:
            self._selector.unregister(channel)
            channel.close()
            return
        if isinstance(message, Start):
            self._start(message, descriptors)
        elif isinstance(message, AddClient):
            self._watch(Channel.from_descriptor(descriptors[0]), self._on_command)
        else:
            close_all(descriptors)
            raise AssertionError(f"a zygote does not understand {type(message).__name__}")

    def _start(self, request: Start, descriptors: list[int]) -> None:
        brood = _Brood(Channel.from_descriptor(descriptors[0]))
        why = "" if request.interpreter else self._why_interpreter(request.environment)
        inherited = iter(descriptors[1:])
        for index, order in enumerate(request.orders):
            own = [next(inherited) for _ in range(order.descriptors)]
            child = (
                self._execute(request.environment) if request.interpreter or why else self._take_spare() or self._fork()
            )
            with contextlib.suppress(ChannelClosedError):  # it died at once; its ending tells
                child.order_channel.send(order, own)
            child.order_channel.close()
            close_all(own)
            brood.indices[child.pid] = index
            self._owners[child.pid] = brood
        self._broods[brood.channel.fileno()] = brood
        self._watch(brood.channel, self._on_brood)
        brood.tell(Started(tuple(brood.indices), why))
        if not why and not request.interpreter:
            self._prepare_next(request.spares)

    def _why_interpreter(self, environment: dict[str, str]) -> str:
        reason = reason_not_to_fork()
        if reason:
            return f"{self._description} cannot fork: {reason}{self._blame()}"
        changed = [
            name for name in sorted(environment.keys() | self._environment.keys()) if self._differs(name, environment)
        ]
        if changed:
            return f"{', '.join(changed)} changed, which torch or a library reads only when it is loaded"
        return ""

    def _blame(self) -> str:
        """Name the module-level code that started threads, if they are what keeps this process from forking."""
        if self._culprit is None:
            self._culprit = find_culprit(self._preparation, self._environment) if _os.tasks() > 1 else ""
        return f", started by {self._culprit}" if self._culprit else ""

    def _differs(self, name: str, environment: dict[str, str]) -> bool:
        if not name.startswith(_READ_AT_LOAD) or name in _READ_LATER:
            return False
        # What a module set while it was imported holds here too, and whoever reads it later in a fork reads the same.
        return environment.get(name) not in (self._environment.get(name), os.environ.get(name))

    # Children

    def _fork(self) -> _Child:
        ours, theirs = channel_pair()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._forget()
            ours.close()
            child_main(theirs, zygote)
        theirs.close()
        self._forks += 1
        return self._adopt(pid, ours)

    def _forget(self) -> None:
        """In a child: close what is the zygote's alone, so that no child keeps a channel open that its holder has
        closed.
        """
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel):
                key.fileobj.close()
            else:
                os.close(key.fd)
        for spare in self._spares:
            spare.order_channel.close()
        self._selector.close()

    def _execute(self, environment: dict[str, str]) -> _Child:
        ours, theirs = channel_pair()
        pid = start_interpreter(theirs.fileno(), environment)
        theirs.close()
        with contextlib.suppress(ChannelClosedError):  # it died at once; its ending tells
            ours.send(self._preparation)
        return self._adopt(pid, ours)

    def _adopt(self, pid: int, order_channel: Channel) -> _Child:
        child = _Child(pid, order_channel, _os.watch_exit(pid))
        self._watch(child.exit_watch, lambda watch: self._on_exit(pid, watch))
        return child

    def _take_spare(self) -> _Child | None:
        return self._spares.pop(0) if self._spares else None

    def _prepare_next(self, spares: int) -> None:
        if self._forks >= _COLLAPSE_AFTER_FORKS:
            _os.collapse_memory()
            self._forks = -sys.maxsize
        while len(self._spares) < spares:
            self._spares.append(self._fork())

    # Events

    def _on_brood(self, channel: Channel) -> None:
        brood = self._broods[channel.fileno()]
        try:
            message, _ = channel.receive()
        except ChannelClosedError:
            self._abandon(brood)
            return
        if isinstance(message, Send):
            for pid, index in brood.indices.items():
                if index == message.index:
                    _os.end_process(pid, message.number)

    def _abandon(self, brood: _Brood) -> None:
        del self._broods[brood.channel.fileno()]
        self._selector.unregister(brood.channel)
        brood.channel.close()
        for pid in brood.indices:
            _os.end_process(pid)

    def _on_exit(self, pid: int, watch: int) -> None:
        self._selector.unregister(watch)
        os.close(watch)
        _, status = os.waitpid(pid, 0)
        now = time.monotonic()
        brood = self._owners.pop(pid, None)
        if brood is None:
            self._spares = [spare for spare in self._spares if spare.pid != pid]
            return
        index = brood.indices.pop(pid)
        self._note_strangers(index)
        left_behind = () if brood.indices else self._end_strangers()
        brood.tell(Ended(index, os.waitstatus_to_exitcode(status), now, left_behind))

    def _note_strangers(self, index: int) -> None:
        """Blame the orphans that became children of this process since the last look on the child that ended last."""
        known = self._owners.keys() | {spare.pid for spare in self._spares} | self._strangers.keys() | self._managers
        for pid in _os.children_of(os.getpid()):
            if pid not in known:
                self._strangers[pid] = LeftBehind(index, pid, _os.command_line(pid))

    def _end_strangers(self) -> tuple[LeftBehind, ...]:
        found: list[LeftBehind] = []
        self._managers = {pid for pid in self._managers if not os.waitpid(pid, os.WNOHANG)[0]}
        while self._strangers:
            pid, stranger = self._strangers.popitem()
            if _os.program(stranger.command) == _SHM_MANAGER:
                self._managers.add(pid)
                continue
            alive = bool(_os.command_line(pid))  # a zombie has none: it ended by itself
            _os.end_process(pid)
            os.waitpid(pid, 0)
            self._note_strangers(stranger.index)  # its own children are orphans now
            if alive:
                found.append(stranger)
        return tuple(found)

    def _end(self) -> NoReturn:
        for pid in [*self._owners, *(spare.pid for spare in self._spares)]:
            _os.end_process(pid)
        patience_end = time.monotonic() + _SHM_MANAGER_S
        with contextlib.suppress(ChildProcessError):
            while True:
                patient = time.monotonic() < patience_end
                for pid in _os.children_of(os.getpid()):
                    if not (patient and _os.program(_os.command_line(pid)) == _SHM_MANAGER):
                        _os.end_process(pid)
                if not os.waitpid(-1, os.WNOHANG if patient else 0)[0]:
                    time.sleep(0.005)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        os._exit(0)


def child_main(order_channel: Channel, parent: int) -> NoReturn:
    """The first and last thing a child does: wait for one order, obey it, end. Never returns into the zygote's loop."""
    code = 1
    try:
        _os.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        order, descriptors = order_channel.receive()
        order_channel.close()
        module, _, function = order.target.partition(":")
        code = getattr(importlib.import_module(module), function)(order.payload, descriptors) or 0
    except ChannelClosedError:
        code = 0  # the zygote ended before it needed this child
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code & 0xFF)
    raise AssertionError("unreachable")
