"""Which zygote starts the ranks of a program: one that ``torch_ext serve`` keeps warm, or one of this command's own.
Runs in the process that the user has started, which loads no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch_ext.warm import address
from torch_ext.warm.connect import connect
from torch_ext.world import scratch
from torch_ext.world.follow import ZygoteLostError
from torch_ext.world.protocol import Preparation
from torch_ext.world.tree import ZygoteClient, ZygoteDiedError, start_root

__all__ = ["preparation", "zygote_for"]

# Of these torch._dynamo is what every optimizer loads at its first step, in each rank anew unless its zygote has it.
_ALWAYS = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch_ext.world.rank",
    "torch_ext.program.rank",
    "torch_ext.warm.lent",
    "torch_ext.warm.machine",
)
_SIMULATED = ("torch_ext.sim",)


def preparation(simulated: bool, path: tuple[str, ...]) -> Preparation:
    """Return what a warm zygote loads."""
    return Preparation(path, (*_ALWAYS, *(_SIMULATED if simulated else ())))


@contextlib.contextmanager
def zygote_for(simulated: bool, path: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[ZygoteClient]:
    """A zygote that has loaded torch, and the simulator if it is wanted, until the block is left.

    Raises:
        LoadError: one of the two cannot be loaded.
        ZygoteDiedError: the process ended meanwhile.
    """
    with contextlib.ExitStack() as held:
        found = connect(address.key_of(simulated, path, environment), held)
        if found is None:
            root = start_root(preparation(simulated, path), scratch.folder(), environment)
            held.callback(root.close)
            root.wait_ready()
            yield ZygoteClient(root.channel, root.process.pid)
            return
        try:
            yield found
        except (ZygoteDiedError, ZygoteLostError) as error:
            raise ZygoteDiedError("`torch_ext serve`, which had started the ranks, has ended") from error
