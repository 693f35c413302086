"""The first zygote of a run of tests, as a child of a warm one. Runs in the supervisor, which loads no torch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping

from torch_ext.warm import address
from torch_ext.warm.connect import connect, search_path
from torch_ext.warm.lent import own_surroundings
from torch_ext.world import _os, notices
from torch_ext.world.channel import ChannelClosedError, channel_pair, readable
from torch_ext.world.protocol import LentOrder, Preparation, RootOrder
from torch_ext.world.tree import (
    ZYGOTE_ENVIRONMENT,
    Child,
    DoesNotFitError,
    RootZygote,
    ZygoteClient,
    ZygoteDiedError,
)

__all__ = ["lent_root"]

_TARGET = "torch_ext.warm.lent:main"
_STDERR = 2
# How often a wait without end looks up, in seconds.
_LOOK_S = 60.0


def lent_root(
    preparation: Preparation,
    scratch: str,
    environment: Mapping[str, str],
    simulated: bool,
    held: contextlib.ExitStack,
) -> RootZygote | None:
    """Return a zygote that is what :func:`~torch_ext.world.tree.start_root` would start, as a child of the one that
    ``torch_ext serve`` keeps warm; None if none is kept, or none that fits, which is said. ``held`` gets what the child
    needs of this process.

    Raises:
        LoadError: something that ``preparation`` names cannot be imported.
    """
    if not _os.CAN_FORK:
        return None
    warm = connect(address.key_of(simulated, search_path(), environment), held)
    if warm is None:
        return None
    try:
        return _lend(warm, RootOrder(preparation, scratch), {**environment, **ZYGOTE_ENVIRONMENT})
    except DoesNotFitError as error:
        notices.announce(f"the zygote of `torch_ext serve` is not used: {error}")
    except (ZygoteDiedError, ChannelClosedError, OSError):
        pass  # it has ended meanwhile
    return None


def _lend(warm: ZygoteClient, root: RootOrder, environment: dict[str, str]) -> RootZygote:
    order = LentOrder(root, environment, *own_surroundings())
    ours, theirs = channel_pair()
    directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        child = warm.start(_TARGET, order, [theirs.fileno(), _STDERR, directory], environment, outlive=True)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(directory)
    found = RootZygote(ours, _LentProcess(child))
    try:
        found.wait_ready()
    except BaseException:
        found.close()
        raise
    return found


class _LentProcess:
    """The child, whose end the warm zygote tells. It ends with that zygote at the latest."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._code: int | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        self.ends_within(0)
        return self._code

    def wait(self) -> int:
        while self._code is None:
            self.ends_within(_LOOK_S)
        return self._code

    def ends_within(self, seconds: float) -> bool:
        if self._code is None and readable(self._child.fileno(), seconds):
            try:
                self._child.take_in()
                self._code = None if self._child.ended is None else self._child.ended.exit_code
            except ZygoteDiedError:
                self._code = -signal.SIGKILL
            if self._code is not None:
                self._child.close()
        return self._code is not None
