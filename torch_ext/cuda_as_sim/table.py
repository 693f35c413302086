"""The table that gives each name of ``torch.cuda`` its meaning on the simulated accelerator.

A name that is not here means that name of ``torch.sim``, or of its submodule. Names of submodules are also found by
their last part, such as ``torch.cuda.memory.memory_stats``.
"""

from __future__ import annotations

import contextlib
import os
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import comm

from torch_ext.cuda_as_sim import legacy
from torch_ext.sim import _devices, _module
from torch_ext.sim._name import NAME


class NeedsCudaError(unittest.SkipTest, NotImplementedError):
    """The program uses a feature that only CUDA, NCCL or NVIDIA's libraries have; the message names it in one sentence.

    A test that raises it is skipped with that sentence, since no simulated device can run the test.
    """


# The submodules of torch.cuda that programs import by name.
SUBMODULES = (
    "amp", "amp.autocast_mode", "amp.common", "amp.grad_scaler", "comm", "gds", "graphs", "green_contexts", "jiterator",
    "memory", "nccl", "nvtx", "profiler", "random", "sparse", "streams", "tunable",
)  # fmt: skip

_GRAPHS = "Graphs of the simulated accelerator are none of CUDA's driver."
_NVML = "Power, clocks and processes come from NVML, which needs hardware that the simulated accelerator lacks."
_CUBLAS = "cuBLAS is NVIDIA's library: the simulated accelerator computes with the CPU's kernels."
_NCCL = "This calls NCCL itself; the simulated accelerator's collectives are simccl's, behind torch.distributed."
_ALLOCATOR = "CUDA's allocator can be replaced; the simulated accelerator's cannot."
_DRIVER = "This calls CUDA's driver or runtime, which the simulated accelerator lacks."
_COMPILER = "This compiles or tunes CUDA kernels, and the simulated accelerator runs the CPU's."

# Names that only CUDA has, and why they have no counterpart.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("export_dot", "export_graph_data",
         *(f"register_graph_{when}_hook" for when in
           ("capture_end", "capture_start", "destroy", "instantiate", "replay_end", "replay_start"))), _GRAPHS),
    **dict.fromkeys(
        ("clock_rate", "device_memory_used", "list_gpu_processes", "memory_usage", "power_draw", "temperature",
         "utilization"), _NVML),
    **dict.fromkeys(("current_blas_handle", "current_solver_handle"), _CUBLAS),
    **dict.fromkeys(
        ("all_gather", "all_reduce", "broadcast", "init_rank", "reduce", "reduce_scatter", "unique_id",
         "ProcessGroupNCCL"), _NCCL),
    **dict.fromkeys(
        ("CUDAPluggableAllocator", "caching_allocator_alloc", "caching_allocator_delete", "change_current_allocator"),
        _ALLOCATOR),
    **dict.fromkeys(
        ("GreenContext", "check_error", "cudaStatus", "cudart", "gds", "green_contexts"), _DRIVER),
    **dict.fromkeys(("_compile_kernel", "jiterator", "tunable"), _COMPILER),
}  # fmt: skip

# Hints to hardware or tools that are absent; programs stay correct without them.
NO_OPS = frozenset(
    {
        "caching_allocator_disabled", "caching_allocator_enable",
        "ipc_collect", "mark", "range_end", "range_pop", "range_push", "range_start", "start", "stop",
    }
)  # fmt: skip

CONSTANTS: Mapping[str, Any] = {
    **legacy.TYPES,
    "has_half": True,
    "has_magma": False,
    "CudaError": RuntimeError,
    "DeferredCudaCallError": RuntimeError,
    "OutOfMemoryError": torch.OutOfMemoryError,
}


def _lazy_call(function: Callable[[], object], **kwargs: Any) -> None:
    """Call ``function`` now; torch does so once it has initialized CUDA."""
    function()


def _capability(device: Any = None) -> tuple[int, int]:
    """Return ``TORCH_EXT_SIM_CAPABILITY``. Programs infer supported types from it: bfloat16 came with 8.0."""
    _devices.checked_index(_devices.index_of(device))
    text = os.environ.get("TORCH_EXT_SIM_CAPABILITY", "8.0")
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"TORCH_EXT_SIM_CAPABILITY={text}: expected a compute capability, such as 9.0.")
    return int(major), int(minor)


def _properties(device: Any = None) -> _devices.Properties:
    index = _devices.index_of(device)
    return _devices.Properties(_devices.get_device_name(index), index, *_capability())


@contextlib.contextmanager
def _nvtx_range(msg: str, *args: Any, **kwargs: Any) -> Any:
    yield


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "get_device_capability": _capability,
    "get_device_properties": _properties,
    # The two calls that programs use: they start and stop NVIDIA's profilers.
    "cudart": lambda: Refused("cudart", cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
    "_is_compiled": lambda: True,
    "_lazy_call": _lazy_call,
    "get_arch_list": lambda: ["sm_{}{}".format(*_capability())] if _module.is_available() else [],
    "is_bf16_supported": lambda including_emulation=True: including_emulation or _capability() >= (8, 0),
    "is_tf32_supported": lambda: _capability() >= (8, 0),
    "version": lambda: (2, 27, 0),  # the release of NCCL whose operations and reductions simccl has
    "is_nccl_available": lambda: True,
    "amp_definitely_not_available": lambda: False,
    "range": _nvtx_range,
    "profile": contextlib.nullcontext,
}

# Names that mean something else in a submodule than elsewhere.
SUBMODULE_NAMES: Mapping[str, Mapping[str, Any]] = {
    "comm": {name: getattr(comm, name) for name in
             ("broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced", "scatter")},
    "nccl": {"is_available": lambda tensors: all(tensor.device.type == NAME for tensor in tensors)},
}  # fmt: skip


def refuse(name: str) -> NeedsCudaError:
    """Return the error for a use of ``name``."""
    return NeedsCudaError(f"torch.cuda: {name}: {REFUSED[name]}")


class Refused:
    """Stands for a name that only CUDA has: importing and passing it works, using anything but ``served`` raises."""

    def __init__(self, name: str, **served: Any) -> None:
        vars(self).update(served, _name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise refuse(self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse(self._name)

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __or__(self, other: object) -> object:
        """An annotation such as ``torch.cuda.CUDAGraph | None`` does not use the class, so it does not raise."""
        return Any

    __ror__ = __or__


def _no_op(*args: Any, **kwargs: Any) -> None:
    """Stands for a hint that the simulated accelerator has no use for."""


def find(name: str, submodule: str = "") -> Any:
    """Return the object for ``torch.cuda.<name>``, or ``torch.cuda.<submodule>.<name>``.

    Raises:
        AttributeError: neither the table nor ``torch.sim`` has the name.
    """
    part = submodule.partition(".")[0]
    for names in (SUBMODULE_NAMES.get(part, {}), CONSTANTS, FUNCTIONS):
        if name in names:
            return names[name]
    if name in REFUSED:
        return Refused(name)
    if part in REFUSED:
        return Refused(part)
    if name in NO_OPS:
        return _no_op
    for holder in (getattr(_module, part, None) if part else None, _module):
        if hasattr(holder, name):
            return getattr(holder, name)
    dotted = f"{submodule}.{name}" if submodule else name
    raise AttributeError(
        f"torch.cuda.{dotted} has no counterpart on the simulated accelerator; "
        "torch_ext/cuda_as_sim/table.py says what each name means"
    )
