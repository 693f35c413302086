"""The one table of what each name of ``torch.cuda`` means on the simulated accelerator.

A name that is not here means the one of ``torch.sim``. Names of submodules are found by their last part, as
``torch.cuda.memory.memory_stats`` is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_ext.cuda_as_sim.errors import NeedsCudaError
from torch_ext.cuda_as_sim.words import DEVICE

__all__ = ["CONSTANTS", "DOES_NOTHING", "FUNCTIONS", "REFUSED", "SUBMODULES"]

# The submodules of torch.cuda that programs import by name.
SUBMODULES = (
    "amp", "amp.autocast_mode", "amp.common", "amp.grad_scaler", "comm", "gds", "graphs", "green_contexts", "jiterator",
    "memory", "nccl", "nvtx", "profiler", "random", "sparse", "streams", "tunable",
)  # fmt: skip

_GRAPHS = (
    "CUDA graphs are CUDA's own: the simulated accelerator runs each operator when it is called and captures none."
)
_NVML = "Power, clocks and processes come from NVML, and there is no such hardware behind the simulated accelerator."
_CUBLAS = "cuBLAS is NVIDIA's library: the simulated accelerator computes with the CPU's kernels."
_NCCL = "This calls NCCL itself; the simulated accelerator's collectives are simccl's, behind torch.distributed."
_ALLOCATOR = "CUDA's allocator can be replaced and divided; the simulated accelerator's cannot."
_TYPES = "torch.cuda's legacy tensor types have no simulated ones; give a factory its device and dtype."
_DRIVER = "This is a call of CUDA's driver or runtime, and there is none."
_COMPILER = "This compiles or tunes CUDA kernels, and the simulated accelerator runs the CPU's."

# What is CUDA itself, and why it has no counterpart.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables"), _GRAPHS),
    **dict.fromkeys(
        ("clock_rate", "device_memory_used", "list_gpu_processes", "memory_usage", "power_draw", "temperature",
         "utilization"), _NVML),
    **dict.fromkeys(("current_blas_handle", "current_solver_handle"), _CUBLAS),
    **dict.fromkeys(
        ("all_gather", "all_reduce", "broadcast", "init_rank", "reduce", "reduce_scatter", "unique_id",
         "ProcessGroupNCCL"), _NCCL),
    **dict.fromkeys(
        ("CUDAPluggableAllocator", "MemPool", "caching_allocator_alloc", "caching_allocator_delete",
         "change_current_allocator", "use_mem_pool"), _ALLOCATOR),
    **dict.fromkeys(
        (f"{kind}{what}" for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long",
         "Short") for what in ("Tensor", "Storage")), _TYPES),
    **dict.fromkeys(
        ("ExternalStream", "GreenContext", "cudart", "check_error", "cudaStatus", "gds", "get_stream_from_external"),
        _DRIVER),
    **dict.fromkeys(("_compile_kernel", "jiterator", "tunable"), _COMPILER),
}  # fmt: skip

# Hints to hardware or tools that are not there; a program is as right without them.
DOES_NOTHING = frozenset(
    {
        "_lazy_call", "_set_allocator_settings", "caching_allocator_disabled", "caching_allocator_enable",
        "ipc_collect", "mark", "range_end", "range_pop", "range_push", "range_start", "start", "stop",
    }
)  # fmt: skip

CONSTANTS: Mapping[str, Any] = {
    "has_half": True,
    "has_magma": False,
    "CudaError": RuntimeError,
    "DeferredCudaCallError": RuntimeError,
    "OutOfMemoryError": torch.OutOfMemoryError,
}


def _device_name(device: Any = None) -> str:
    return f"{torch.get_device_module(DEVICE).get_device_name(device)}, simulated on the CPU"


def _none_captures() -> bool:
    return False


def _capability(device: Any = None) -> tuple[int, int]:
    """Programs ask for it to learn about types: bfloat16 came with 8.0."""
    return (8, 0)


def _amp(name: str) -> Callable[..., Any]:
    return functools.partial(getattr(torch.amp, name), device_type=DEVICE)


@contextlib.contextmanager
def _nvtx_range(msg: str, *args: Any, **kwargs: Any) -> Any:
    yield


def _scaler(*args: Any, **kwargs: Any) -> Any:
    return torch.amp.GradScaler(DEVICE, *args, **kwargs)


def _autocast(enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
    return torch.autocast(DEVICE, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


def _version() -> tuple[int, int, int]:
    """The release of NCCL whose operations and reductions simccl has."""
    return (2, 27, 0)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "get_device_name": _device_name,
    "get_device_capability": _capability,
    "is_current_stream_capturing": _none_captures,
    "get_arch_list": list,
    "get_gencode_flags": lambda: "",
    "get_allocator_backend": lambda: "native",
    "is_tf32_supported": lambda: False,
    "memory_cached": lambda device=None: torch.get_device_module(DEVICE).memory_reserved(device),
    "max_memory_cached": lambda device=None: torch.get_device_module(DEVICE).max_memory_reserved(device),
    "reset_max_memory_allocated": lambda device=None: torch.get_device_module(DEVICE).reset_peak_memory_stats(device),
    "reset_max_memory_cached": lambda device=None: torch.get_device_module(DEVICE).reset_peak_memory_stats(device),
    "GradScaler": _scaler,
    "autocast": _autocast,
    "custom_fwd": _amp("custom_fwd"),
    "custom_bwd": _amp("custom_bwd"),
    "version": _version,
    "is_nccl_available": lambda: True,
    "range": _nvtx_range,
    "profile": contextlib.nullcontext,
}


def refuse(name: str) -> NeedsCudaError:
    """Return the error of a use of ``name``."""
    return NeedsCudaError(f"torch.cuda: {name}: {REFUSED[name]}")
