"""The supervisor's side of the tree of zygotes: starts the root, loads modules, starts children. Imports no torch.

Supervisor -> root zygote -> module zygote -> children (class processes and ranks). Every call that needs a zygote
raises :class:`ZygoteDiedError` if the zygote is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ext.world import _os, wording
from torch_ext.world.channel import (
    WRITE_TO_OWN,
    Channel,
    ChannelBrokenError,
    ChannelClosedError,
    channel_pair,
    close_all,
    readable,
)
from torch_ext.world.child import interpreter
from torch_ext.world.files import read_stacks
from torch_ext.world.protocol import (
    STACK_SIGNAL,
    AddClient,
    Call,
    Copy,
    Ended,
    ModuleOrder,
    NotLoaded,
    Order,
    Preparation,
    RootOrder,
    Signal,
    Start,
    Started,
    WarmOrder,
)

# Set in every zygote: otherwise importing numpy starts threads, and asking torch for a GPU starts a driver, and neither
# survives a fork. Children get the user's values back. See Note [Fork safety].
ZYGOTE_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


# Seconds of silence after which to check whether a signal has stopped a zygote.
_SILENCE_S = 2.0
# Seconds for the whole tree to end, including leftovers that end by themselves.
_END_S = 20.0


class LoadError(RuntimeError):
    """A module could not be imported; the message is its traceback."""


class LeftWhileLoadingError(LoadError):
    """A module skipped itself or ended the program during its import. The message explains that to users."""


class HungImportError(LoadError):
    """An import was killed at its time limit; the message shows its stack."""


class ZygoteDiedError(RuntimeError):
    """A zygote has ended by itself or was killed."""


class Child:
    """A process that a zygote starts for the supervisor, with the channel that reports its start and end. The
    constructor waits for the start, except of a :class:`Copy`.

    The descriptors of the process are the other end of ``channel``, then ``more``, then a pipe for its stacks.
    """

    def __init__(self, zygote: ZygoteClient, request: Start | Copy, more: Sequence[int] = ()) -> None:
        self.pid = 0
        self.ended: Ended | None = None
        self._zygote_pid = zygote.pid
        self.channel, remote = channel_pair()
        self._stacks, stacks_writer = os.pipe()
        try:
            self._group = _connect(zygote.channel, request, [remote.fileno(), *more, stacks_writer])
            if isinstance(request, Start):
                self.wait_started()
        except BaseException:
            close_all([self.channel, self._stacks])
            raise
        finally:
            close_all([remote, stacks_writer])

    def wait_started(self) -> None:
        """Wait until the zygote has started the child; kill the zygote if a signal has stopped it."""
        stopped = False
        while not self._group.poll(_SILENCE_S):
            if self._zygote_pid and _os.is_stopped(self._zygote_pid):
                stopped = True
                _os.end_process(self._zygote_pid)
        try:
            self.receive_one()
        except ZygoteDiedError:
            if stopped:
                raise ZygoteDiedError("the zygote was stopped by a signal (SIGSTOP), and so was ended,") from None
            raise

    def fileno(self) -> int:
        return self._group.fileno()

    def receive_one(self) -> None:
        """Receive one pending message of the zygote about this child, if any."""
        if not self._group.poll():
            return
        try:
            message, _ = self._group.receive()
        except ChannelClosedError as error:
            raise ZygoteDiedError("the zygote was killed") from error
        if isinstance(message, Started):
            self.pid = message.pids[0]
        elif isinstance(message, Ended):
            self.ended = message

    def send_signal(self, number: int) -> None:
        self._group.try_send(Signal(0, number))

    def stacks(self) -> str:
        """Have the process write the stacks of its threads, and return them without hidden frames."""
        self.send_signal(STACK_SIGNAL)
        return wording.trim_stacks(read_stacks({0: self._stacks})[0])

    def close(self) -> None:
        """Abandon the child; the zygote kills it if it still runs. Idempotent."""
        close_all([self._group, self.channel, self._stacks])
        self._stacks = -1


def _connect(zygote: Channel, message: Any, descriptors: Sequence[int] = ()) -> Channel:
    try:
        return zygote.connect(message, descriptors)
    except ChannelClosedError as error:
        raise ZygoteDiedError("the zygote is gone") from error


@dataclass(eq=False)
class ZygoteClient:
    """A command channel to a zygote that has loaded a test module, for starting children. ``process`` is the zygote as
    a child of another zygote, if this process has requested it.
    """

    channel: Channel
    pid: int = 0
    process: Child | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable once ``wait_loaded()`` of a new zygote returns or raises at once."""
        return self.channel.fileno()

    def close(self) -> None:
        """End the zygote, if this process has requested it, with all its children."""
        self.channel.close()
        if self.process is not None:
            self.process.close()

    def kill(self) -> None:
        """Kill an unresponsive zygote. The kernel kills its children along with it."""
        if self.pid:
            _os.end_process(self.pid)

    def start(self, target: str, payload: Any, environment: Mapping[str, str], more: Sequence[int] = ()) -> Child:
        """Start a child that runs ``target(payload, descriptors)``; see :class:`Child` for the descriptors."""
        return Child(self, Start((Order(target, payload, 2 + len(more)),), dict(environment)), more)

    def call(self, target: str, payload: Any) -> Any:
        """Return the value of ``target(payload)``, called in the zygote itself; its later children have the effects."""
        with contextlib.closing(_connect(self.channel, Call(target, payload))) as answer:
            try:
                return answer.receive()[0]
            except ChannelClosedError as error:
                raise ZygoteDiedError(f"the process that called {target.rpartition(':')[2]}() ended,") from error

    def add_client(self) -> int:
        """Return the descriptor of a new command channel to this zygote, for a process that starts ranks itself."""
        return _connect(self.channel, AddClient()).detach()


class ModuleZygote(ZygoteClient):
    """A zygote that loads one test module, in the background until :meth:`wait_loaded`."""

    process: Child

    def __init__(self, root: RootZygote, order: ModuleOrder) -> None:
        self.order = order
        self.imported: tuple[str, ...] | None = None  # files of the project; None while it loads
        # The root's own environment: a different one could prevent a fork. The order carries the module's environment.
        process = root.start("torch_ext.world.provider:load_module", order, os.environ)
        super().__init__(process.channel, process.pid, process)
        self._hung: HungImportError | None = None

    def poll(self) -> bool:
        """Whether :meth:`wait_loaded` returns or raises at once."""
        return self.imported is not None or self._hung is not None or self.channel.poll()

    def end_hung(self, limit_s: float) -> None:
        """Kill an import that hangs at its limit of ``limit_s`` seconds; :meth:`wait_loaded` then raises."""
        text = f"the import of {self.order.name} took longer than its limit of {limit_s:g} s, and was ended"
        if _os.is_stopped(self.pid):
            text += ": it had been stopped by a signal (SIGSTOP)"
        elif stacks := self.process.stacks().rstrip():
            text = f"{stacks}\n\n{text}; its stacks are above"
        self.kill()
        self._hung = HungImportError(text)

    def wait_loaded(self) -> None:
        """Wait until the module is imported. Raises LoadError if the import has failed, or was ended."""
        if self.imported is not None:
            return
        if self._hung is not None:
            raise self._hung
        try:
            message, _ = self.channel.receive()
        except ChannelBrokenError as error:
            raise LoadError(f"The import of {self.order.name} {error}. {WRITE_TO_OWN}") from error
        except ChannelClosedError as error:
            raise ZygoteDiedError(f"the process died while importing {self.order.name}") from error
        if isinstance(message, NotLoaded):
            raise LeftWhileLoadingError(message.left) if message.left else LoadError(message.trace)
        self.imported = message.imported


class ZygoteCopy(ZygoteClient):
    """A zygote with the modules of ``original``, which ends with it at the latest. Starts in the background until
    :meth:`wait_loaded`: if the original cannot fork, the copy loads everything again.
    """

    process: Child

    def __init__(self, original: ZygoteClient) -> None:
        process = Child(original, Copy())
        super().__init__(process.channel, process=process)

    def wait_loaded(self) -> None:
        """Wait until the copy serves."""
        try:
            self.channel.receive()
        except ChannelClosedError as error:
            raise ZygoteDiedError("the copy of a zygote ended before it could serve,") from error
        self.process.wait_started()
        self.pid = self.process.pid


class RootZygote(ZygoteClient):
    """The process that loads torch once for a whole run: it imports the modules of ``preparation`` and, when this
    process is gone, even if killed, removes the folder ``scratch``. Its environment is ``environment`` plus
    :data:`ZYGOTE_ENVIRONMENT`. It is a fork of ``warm`` if that is given, else a fresh interpreter.
    """

    def __init__(
        self,
        preparation: Preparation,
        scratch: str,
        environment: Mapping[str, str],
        warm: ZygoteClient | None = None,
    ) -> None:
        _os.require_supported()
        self._ready = False
        order, environment = RootOrder(preparation, scratch), {**environment, **ZYGOTE_ENVIRONMENT}
        if warm is not None:
            own = WarmOrder(environment, os.getcwd(), _os.umask())
            process = warm.start("torch_ext.world.provider:serve_run", own, environment, [2])
            super().__init__(process.channel, process.pid, process)
            # With its own end of the group channel, it outlives this process until it has removed the folder.
            self.channel.send(order, [process.fileno()])
            return
        local, remote = channel_pair()
        command = interpreter("torch_ext.world.provider", remote.fileno())
        self._program = subprocess.Popen(command, pass_fds=[remote.fileno()], stdin=subprocess.DEVNULL, env=environment)
        remote.close()
        super().__init__(local, self._program.pid)
        local.send(order)

    @property
    def has_ended(self) -> bool:
        return self._exit_code() is not None

    def _exit_code(self) -> int | None:
        if self.process is None:
            return self._program.poll()
        try:
            self.process.receive_one()
        except ZygoteDiedError:  # the kernel has killed the children of the warm zygote
            return -signal.SIGKILL
        return None if self.process.ended is None else self.process.ended.exit_code

    def _ends_within(self, limit_s: float) -> bool:
        if self.process is not None:
            return readable(self.process.fileno(), limit_s)
        watch = _os.watch_exit(self.pid)
        try:
            return readable(watch, limit_s)
        finally:
            os.close(watch)

    def wait_ready(self) -> None:
        """Wait until the modules are imported. Raises LoadError if an import fails."""
        if self._ready:
            return
        try:
            message, _ = self.channel.receive()
        except ChannelClosedError as error:
            self._ends_within(_END_S)
            text = f"the root zygote ended with code {self._exit_code()} while it loaded torch"
            raise ZygoteDiedError(text) from error
        if isinstance(message, NotLoaded):
            raise LoadError(message.trace)
        self._ready = True

    def close(self) -> None:
        """End the tree and wait for its end; kill the processes that do not end by themselves."""
        self.channel.close()
        if not self._ready:  # the root has started no process yet
            self._kill()
        end_s = _os.monotonic() + _END_S
        while not self.has_ended and not self._ends_within(_SILENCE_S):
            if _os.monotonic() > end_s or _os.is_stopped(self.pid):
                self._kill()
        if self.process is None:
            self._program.wait()
        else:
            self.process.close()

    def _kill(self) -> None:
        if not self.has_ended:
            for pid in [*_os.descendants_of(self.pid), self.pid]:
                _os.end_process(pid)
