"""Has ``torch.cuda``, and what torch's CUDA half would bring, serve the simulated device, which is CUDA's here.

:func:`install` runs once in a process, right after ``import torch``: see Note [Two personalities] in sim/build.py.
Programs, libraries and torch itself then find ``torch.cuda`` with devices. What a build without CUDA leaves out of
torch's C++ half, such as resizing a storage, is replaced in Python.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import torch

from torch_ext.cuda_as_sim import cuda, legacy, methods, nccl, table
from torch_ext.sim import _cuda, _module, _native
from torch_ext.sim._imports import when_imported

__all__ = ["install"]

# What programs read as torch.version.cuda: whether there is one, and whether it is new enough for bfloat16.
_VERSION = "12.8"
# Torch's own build upon names that are replaced: classes of storages, and a table of statistics.
_OF_TORCH = frozenset({"memory_summary", *(name for name in vars(torch.cuda) if name.endswith("Storage"))})


def install() -> None:
    """Replace everything, in this process. Calling it again does nothing."""
    if isinstance(torch.cuda, _Cuda):
        return
    _fill(torch.cuda, "")
    for dotted in table.SUBMODULES:
        if dotted not in table.REFUSED:  # torch's own refuse, too, and torch imports them to define what it never calls
            when_imported(f"torch.cuda.{dotted}", functools.partial(_fill, dotted=dotted))
    setattr(torch.cuda, "_maybe_exchange_device", _cuda.maybe_exchange_device)  # noqa: B010 - mypy refuses to assign it
    torch.cuda.__class__ = _Cuda
    for name in ("_initialized", "default_generators"):
        vars(torch.cuda).pop(name, None)
    torch.version.cuda = _VERSION
    setattr(torch.backends.cuda, "is_built", _is_built)  # noqa: B010 - mypy refuses to assign a function
    for name in ("_create_jit_fn", "_create_multi_output_jit_fn"):  # torch defines some at import, and calls none
        setattr(torch.cuda.jiterator, name, lambda *args, **kwargs: cuda.Refused("jiterator"))
    methods.complete()
    nccl.install()
    _cuda.complete(nccl.ProcessGroupNCCL)
    setattr(torch, "set_default_tensor_type", legacy.set_default_tensor_type)  # noqa: B010 - mypy refuses to assign it


class _Cuda(ModuleType):
    """``torch.cuda``, with the names whose values change."""

    @property
    def _initialized(self) -> bool:
        return _native.is_initialized()

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The generator of each device."""
        return tuple(_native.default_generator(index) for index in range(_native.device_count()))


def _fill(module: ModuleType, dotted: str) -> None:
    """Give ``module``, which is ``torch.cuda`` or a submodule of it, what the table says for its names."""
    names = set(vars(module))
    if not dotted:
        names |= {*table.CONSTANTS, *table.FUNCTIONS, *table.DOES_NOTHING, *_module.__all__}
    for name in names:
        before = vars(module).get(name)
        if name.startswith("__") or isinstance(before, ModuleType) or name in _OF_TORCH:
            continue
        try:
            found = cuda.find(name, dotted)
        except AttributeError:
            continue
        if not isinstance(found, ModuleType):
            setattr(module, name, found)


def _is_built() -> bool:
    """True for a program, which means to use the device; False for torch, which looks for its code of CUDA next."""
    return not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
