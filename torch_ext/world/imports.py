"""What the children of a zygote would each import, imported once: by the zygote, before it forks them.

Runs in zygotes and their children. Standard library only.

Note [Imports at first use]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Torch imports parts of itself at their first use only: the first optimizer of a process imports ``torch._dynamo``, the
first comparison of two tensors ``torch.distributed.tensor``, and each takes about as long as a short test. In ranks,
which are fresh for every test, each use is the first. A zygote that has loaded them spares its children that; one that
has done so in vain has wasted up to a third of what a run takes to start. So who plans a run asks for them where a test
file looks as if it needed them (:attr:`~torch_ext.world.protocol.Start.ahead`); and where that was wrong, the first
child that ends with one loaded says so, and the zygote loads it when it has started the next ones, whose test must not
pay for that out of its limit.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import mmap
import sys
from collections.abc import Iterable

from torch_ext.world.preparation import compute_on_one_thread, uncollected

__all__ = ["FIRST_USE", "Imports"]

# Modules that ranks import at the first use of something. None starts a thread, which no fork would survive.
FIRST_USE = ("torch.distributed.tensor", "torch._dynamo")


class Imports:
    """What a zygote imports ahead of its children, and what these have imported themselves."""

    def __init__(self) -> None:
        self._used = mmap.mmap(-1, len(FIRST_USE))  # shared with every child; a byte each
        self._tried: set[str] = set()

    def tell(self) -> None:
        """In a child that is over: say which of :data:`FIRST_USE` it has loaded."""
        for index, name in enumerate(FIRST_USE):
            if name in sys.modules:
                self._used[index] = 1

    def catch_up(self) -> None:
        """In the zygote, while nobody waits for it: import what children have loaded themselves."""
        self.load(name for index, name in enumerate(FIRST_USE) if self._used[index])

    def load(self, names: Iterable[str]) -> None:
        """In the zygote: import ``names``. What cannot be imported is left for whoever needs it."""
        missing = [name for name in names if name not in sys.modules and name not in self._tried]
        if not missing:
            return
        self._tried.update(missing)
        with uncollected():
            for name in missing:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        compute_on_one_thread()
        gc.freeze()
