"""Which zygote starts the ranks of a program: one of this command's own, or one that ``torch_ext serve`` keeps warm.
Runs in the process that the user has started, which loads no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch_ext.world import scratch
from torch_ext.world.protocol import Preparation
from torch_ext.world.tree import RootZygote, ZygoteClient

__all__ = ["preparation", "zygote_for"]

# Of these torch._dynamo is what every optimizer loads at its first step, in each rank anew unless its zygote has it.
_ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "torch_ext.world.rank", "torch_ext.program.rank")
# Before a rank's own use, so that a fork has it.
_SIMULATED = ("torch_ext.sim",)


def preparation(simulated: bool, path: tuple[str, ...]) -> Preparation:
    """Return what a zygote of programs loads."""
    return Preparation(path, (*_ALWAYS, *(_SIMULATED if simulated else ())))


@contextlib.contextmanager
def zygote_for(simulated: bool, path: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[ZygoteClient]:
    """A zygote that has loaded torch, and the simulator if it is wanted, until the block is left.

    Raises:
        LoadError: one of the two cannot be loaded.
        ZygoteDiedError: the process ended meanwhile.
    """
    root = RootZygote(preparation(simulated, path), scratch.folder(), environment)
    try:
        root.wait_ready()
        yield ZygoteClient(root.channel, root.process.pid)
    finally:
        root.close()
