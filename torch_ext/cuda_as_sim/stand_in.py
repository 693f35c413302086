"""Makes ``torch.cuda`` and torch's CUDA half serve the simulated device, in the process that imports this module.

The import runs right after ``import torch``: see Note [Two personalities] in sim/build.py. Programs, libraries and
torch itself then find ``torch.cuda`` with devices.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from types import ModuleType
from typing import Any

import torch

import torch_ext.sim  # noqa: F401  # registers the device
from torch_ext.cuda_as_sim import legacy, nccl, table
from torch_ext.sim import _cuda, _module, _native
from torch_ext.sim._imports import when_imported
from torch_ext.sim._streams import Stream, refuse_to_share

# torch.version.cuda: programs test that it is set, and new enough for bfloat16.
_VERSION = "12.8"
# Torch's own definitions work with the replaced names: classes of storages, graphs, and a table of statistics.
_KEPT = {"get_gencode_flags", "memory_summary", "CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables"}
_KEPT_NAMES = frozenset({*_KEPT, *(name for name in vars(torch.cuda) if name.endswith("Storage"))})


class _Cuda(ModuleType):
    """``torch.cuda``, with the names whose values change."""

    @property
    def _initialized(self) -> bool:
        return _native.is_initialized()

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The generator of each device."""
        return tuple(_native.default_generator(index) for index in range(_native.device_count()))


def _install() -> None:
    _replace_names(torch.cuda, "")
    for dotted in table.SUBMODULES:
        if dotted not in table.REFUSED:  # torch imports these itself, calls nothing in them, and they refuse, too
            when_imported(f"torch.cuda.{dotted}", functools.partial(_replace_names, dotted=dotted))
    _set(torch.cuda, _maybe_exchange_device=_cuda.maybe_exchange_device)
    torch.cuda.__class__ = _Cuda
    for name in ("_initialized", "default_generators"):
        vars(torch.cuda).pop(name, None)
    torch.version.cuda = _VERSION
    _set(torch.backends.cuda, is_built=_is_built)
    for name in ("_create_jit_fn", "_create_multi_output_jit_fn"):  # torch defines some at import, and calls none
        _set(torch.cuda.jiterator, **{name: lambda *args, **kwargs: table.Refused("jiterator")})
    _set(
        Stream,
        cuda_stream=property(lambda self: self.native_handle),
        _as_parameter_=property(lambda self: ctypes.c_void_p(self.native_handle)),
        __cuda_stream__=lambda self: (0, self.native_handle),
    )
    _complete_events()
    _set(torch.autograd.profiler.emit_nvtx, __enter__=_begin_marks, __exit__=_end_marks)
    _set(torch, set_default_tensor_type=legacy.set_default_tensor_type)
    nccl.install()
    _cuda.complete(nccl.ProcessGroupNCCL)


def _set(holder: Any, **values: Any) -> None:
    """Assign attributes that mypy refuses to assign."""
    for name, value in values.items():
        setattr(holder, name, value)


def _replace_names(module: ModuleType, dotted: str) -> None:
    """Replace the names of ``module``, which is ``torch.cuda`` or a submodule of it, by the table's."""
    names = set(vars(module))
    if not dotted:
        names |= {*table.CONSTANTS, *table.FUNCTIONS, *table.NO_OPS, *_module.__all__}
    for name in names:
        before = vars(module).get(name)
        if name.startswith("__") or isinstance(before, ModuleType) or name in _KEPT_NAMES:
            continue
        try:
            found = table.find(name, dotted)
        except AttributeError:
            continue
        if isinstance(found, table.Refused) and (wrapped := getattr(before, "__wrapped__", None)):
            _set(found, __wrapped__=wrapped)  # Dynamo of 2.15 reads it from `use_mem_pool`
        if not isinstance(found, ModuleType):
            setattr(module, name, found)


def _is_built() -> bool:
    """True for programs, which want the device; False for torch's own modules, which would call CUDA code next."""
    return not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")


def _complete_events() -> None:
    """Add CUDA's attributes to ``torch.Event``, the class of all events, which Python refuses to change."""
    (members,) = gc.get_referents(vars(torch.Event))
    members |= {
        "cuda_event": property(lambda self: self.event_id),
        "_as_parameter_": property(lambda self: ctypes.c_void_p(self.event_id)),
        "ipc_handle": refuse_to_share,
    }
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.Event))


def _begin_marks(self: Any) -> Any:
    """Mark nothing: marks, like those of ``torch.cuda.nvtx``, are hints to NVIDIA's tools."""
    return self if self.enabled else None


def _end_marks(self: Any, *error: Any) -> None:
    """Do nothing, since no mark was set."""


_install()
