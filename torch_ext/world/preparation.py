"""Loading into a process what its like have loaded: a fresh interpreter becomes like a forked child. Standard library
and own layer only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing.spawn
import os
import sys
import warnings
from collections.abc import Iterator

from torch_ext.world import module_environment
from torch_ext.world.protocol import Preparation

__all__ = ["compute_on_one_thread", "load", "load_first_uses", "preparation_of_this_process", "uncollected"]

# Torch imports these itself: the first for the first comparison of two tensors, the second for the first optimizer.
# Each takes about as long as a short test, and in a fresh rank each use is the first. Neither starts a thread.
_FIRST_USES = ("torch.distributed.tensor", "torch._dynamo")

# The collector's thresholds: one look for every so many new containers, and never at all that lives.
_SELDOM = (200_000, 1000, 1000)


def load(preparation: Preparation) -> None:
    """Load everything that ``preparation`` names into this process. Raises whatever an import raises."""
    sys.path[:] = preparation.path
    with uncollected(), module_environment.noted():
        for name in preparation.modules:
            importlib.import_module(name)
            compute_on_one_thread()
        if preparation.main_name:
            multiprocessing.spawn.prepare({"init_main_from_name": preparation.main_name})
        if preparation.main_path:
            multiprocessing.spawn.prepare({"init_main_from_path": preparation.main_path})


def load_first_uses() -> None:
    """In a zygote that has loaded torch: import the parts of it that ranks would each import at first use."""
    with uncollected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filters of a test that make errors of warnings would break off the import
        for name in _FIRST_USES if "torch" in sys.modules else ():
            with contextlib.suppress(Exception):  # a rank that needs the module reports why it cannot be imported
                importlib.import_module(name)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within, hardly look for garbage: next to nothing that an import makes is any, and looking for it takes a fifth of
    the time to load torch. A module that sets thresholds of its own, or turns the collector off, has its way.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        if gc.get_threshold() == _SELDOM:
            gc.set_threshold(*before)


def compute_on_one_thread() -> None:
    """Keep what a test module computes while it is imported from starting a thread pool. See Note [Fork safety]."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def preparation_of_this_process(modules: tuple[str, ...]) -> Preparation:
    """Return what makes a fresh interpreter resolve ``modules`` and ``__main__`` to the files that they are here."""
    found = multiprocessing.spawn.get_preparation_data("rank") if "__main__" in modules else {}
    return Preparation(
        path=tuple(entry or os.getcwd() for entry in sys.path),
        modules=tuple(name for name in modules if name != "__main__"),
        main_name=found.get("init_main_from_name", ""),
        main_path=found.get("init_main_from_path", ""),
    )
