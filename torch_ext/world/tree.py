"""The supervisor's side of the tree of zygotes: start the root, load modules, start children in them. Imports no torch.

Supervisor -> root zygote -> module zygote -> children (class processes and ranks).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch_ext.world import _os, frames
from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair
from torch_ext.world.interpreter import PACKAGE_ROOT
from torch_ext.world.protocol import (
    AddClient,
    Ended,
    Loaded,
    ModuleOrder,
    NotLoaded,
    Order,
    Preparation,
    RootOrder,
    Signal,
    Start,
    Started,
)

__all__ = ["Child", "LoadError", "ModuleZygote", "RootZygote", "ZygoteClient", "ZygoteDiedError"]

_PROGRAM = f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from torch_ext.world.loading import main; main()"

# Set in every zygote, whatever the user has: otherwise importing numpy starts threads, and asking torch for a GPU a
# driver, which no child survives. Children get the user's values back. See Note [Fork safety].
_ZYGOTE_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class LoadError(RuntimeError):
    """A module could not be imported; the message is its traceback."""


class ZygoteDiedError(RuntimeError):
    """A zygote ended by itself or was killed."""


class Child:
    """A process that a zygote started for the supervisor: its pid, and a channel on which its end is told."""

    def __init__(
        self,
        zygote: Channel,
        order: Order,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        interpreter: bool,
    ) -> None:
        self.pid = 0
        self.why_interpreter = ""
        self.ended: Ended | None = None
        self._group, theirs = channel_pair()
        try:
            zygote.send(Start((order,), dict(environment), interpreter), [theirs.fileno(), *descriptors])
        except ChannelClosedError as error:
            raise ZygoteDiedError("the zygote is gone") from error
        finally:
            theirs.close()
        self.take_in()

    def fileno(self) -> int:
        return self._group.fileno()

    def take_in(self) -> None:
        """Receive one message of the zygote about this child. Blocks; call it when :meth:`fileno` is readable.

        Raises:
            ZygoteDiedError: the zygote is gone, and the child with it.
        """
        try:
            message, _ = self._group.receive()
        except ChannelClosedError as error:
            raise ZygoteDiedError("the zygote was killed") from error
        if isinstance(message, Started):
            self.pid, self.why_interpreter = message.pids[0], message.why_interpreter
        elif isinstance(message, Ended):
            self.ended = message

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ChannelClosedError, OSError):
            self._group.send(Signal(0, number))

    def close(self) -> None:
        """Let go of the child; the zygote kills it if it still lives."""
        self._group.close()


class ZygoteClient:
    """A command channel to a zygote that has loaded a test module, for starting children in it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def start(
        self,
        target: str,
        payload: Any,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        interpreter: bool = False,
    ) -> Child:
        """Start a child that runs ``target(payload, descriptors)``.

        Raises:
            ZygoteDiedError: the zygote is gone.
        """
        return Child(self.channel, Order(target, payload, len(descriptors)), descriptors, environment, interpreter)

    def add_client(self) -> int:
        """Return the descriptor of a new command channel to this zygote, for a process that starts ranks itself."""
        ours, theirs = channel_pair()
        try:
            self.channel.send(AddClient(), [theirs.fileno()])
        except ChannelClosedError as error:
            raise ZygoteDiedError("the zygote is gone") from error
        finally:
            theirs.close()
        descriptor = os.dup(ours.fileno())
        ours.close()
        return descriptor


class ModuleZygote(ZygoteClient):
    """A zygote that loads one test module, in the background until :meth:`wait_loaded`."""

    def __init__(self, root: Channel, order: ModuleOrder) -> None:
        ours, theirs = channel_pair()
        super().__init__(ours)
        self.order = order
        zygote_order = Order("torch_ext.world.loading:load_module", order, 1)
        # The root's own environment, so that it never finds a reason not to fork; the order carries the module's.
        self.process = Child(root, zygote_order, [theirs.fileno()], os.environ, interpreter=False)
        theirs.close()
        self.imported: tuple[str, ...] | None = None

    def wait_loaded(self) -> None:
        """Wait until the module is imported.

        Raises:
            LoadError: it cannot be.
            ZygoteDiedError: the process ended while importing it.
        """
        if self.imported is not None:
            return
        try:
            message, _ = self.channel.receive()
        except ChannelClosedError as error:
            raise ZygoteDiedError(f"the process died while importing {self.order.name}") from error
        if isinstance(message, NotLoaded):
            raise LoadError(message.trace)
        frames.add(message.hidden_frames)
        self.imported = message.imported

    def close(self) -> None:
        """End the zygote and all its children."""
        self.channel.close()
        self.process.close()


class RootZygote:
    """The process that has loaded torch once for the whole run.

    Args:
        preparation: its ``sys.path``, and what it imports before anything else.
        scratch: a folder that it removes when this process is gone, however that ends.
        environment: of the zygote; what it needs itself is added.
    """

    def __init__(self, preparation: Preparation, scratch: str, environment: Mapping[str, str]) -> None:
        _os.require_supported()
        self.channel, theirs = channel_pair()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        arguments = [sys.executable, *flags, "-c", _PROGRAM, str(theirs.fileno())]
        self.process = subprocess.Popen(
            arguments,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**environment, **_ZYGOTE_ENVIRONMENT},
        )
        theirs.close()
        self.channel.send(RootOrder(preparation, scratch))
        self._ready = False

    def wait_ready(self) -> None:
        """Wait until the modules are imported.

        Raises:
            LoadError: one of them cannot be.
            ZygoteDiedError: the process ended.
        """
        if self._ready:
            return
        try:
            message, _ = self.channel.receive()
        except ChannelClosedError as error:
            raise ZygoteDiedError(
                f"the root zygote ended with code {self.process.wait()} while it loaded torch"
            ) from error
        if isinstance(message, NotLoaded):
            raise LoadError(message.trace)
        if not isinstance(message, Loaded):
            raise AssertionError(f"unexpected message {message!r}")
        frames.add(message.hidden_frames)
        self._ready = True

    def load(self, order: ModuleOrder) -> ModuleZygote:
        """Have a module loaded in a zygote of its own; several may load at once."""
        self.wait_ready()
        return ModuleZygote(self.channel, order)

    def close(self) -> None:
        """End the tree and wait until it is gone."""
        self.channel.close()
        self.process.wait()
