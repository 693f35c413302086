"""Replaces torch's CUDA half for the simulated device: C++ functions that Python calls past ``torch.cuda``, storages,
profiler activities, the name of NCCL's groups. The originals of a CUDA build, which would use a GPU, are removed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions

from torch_ext.sim import _collectives, _devices, _memory, _native, _streams
from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import NAME


def complete(process_group_nccl: type) -> None:
    """Add everything, in this process. ``process_group_nccl`` makes the backends of groups of ``"nccl"``."""
    for name in [name for name in vars(torch._C) if name.startswith("_cuda_")]:
        delattr(torch._C, name)
    for name, value in (*_C_FUNCTIONS.items(), *_MISSING_LIBRARIES.items()):
        setattr(torch._C, name, value)
    # Torch made its class of graphs of a C++ class that cannot be replaced.
    graphs = importlib.reload(torch.cuda.graphs)
    for name in graphs.__all__:
        setattr(torch.cuda, name, getattr(graphs, name))
    torch._C._jit_override_can_fuse_on_gpu(False)  # TorchScript would compile CUDA code where the build can
    _enable_profiling()
    _replace_storages()
    _add_nccl(process_group_nccl)
    _refuse_foreign_code()
    when_imported("torch.utils._triton", _hide_triton)
    when_imported("torch._inductor.compile_fx", _generate_code)


def _hide_triton(module: Any) -> None:
    """Report Triton as unavailable even where it is installed: it would look for a GPU's driver."""
    module.has_triton = lambda **kwargs: False


def _generate_code(module: object) -> None:
    from torch_ext.sim import _inductor  # noqa: F401  # registers itself; loads Inductor


def _numbers_of(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch.accelerator.set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


def maybe_exchange_device(index: int) -> int:
    """As ``exchange_device``; a separate function, because Dynamo has a handler for each."""
    return _devices.exchange_device(index)


class _Graph(torch._C._acceleratorGraph):
    """The graphs of any accelerator, with what CUDA's have besides."""

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)
        self._generators: list[torch.Generator] = []
        self._is_ending = False

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._generators.append(generator)

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: Any = "global") -> None:
        super().capture_begin(pool, capture_error_mode)
        for generator in self._generators:
            _native.capture_generator(generator)

    _has_graph_exec = True  # torch 2.14 would call `instantiate` otherwise; `replay` does so here

    # Torch 2.14 ends a capture in three steps, of which the first is all of ours.
    def capture_end_pre(self) -> None:
        super().capture_end()
        self._is_ending = True

    def instantiate(self) -> None:
        if not self._is_ending:
            super().instantiate()

    def capture_end_post(self) -> None:
        self._is_ending = False

    def reset(self) -> None:
        super().reset()
        self._generators.clear()

    def raw_cuda_graph(self) -> NoReturn:
        raise NotImplementedError(
            "A graph of the simulated accelerator is none of CUDA's driver: it has no cudaGraph_t."
        )

    raw_cuda_graph_exec = raw_cuda_graph


# Functions of torch's C++ half that its Python half calls past `torch.cuda`.
_C_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_cuda_getDeviceCount": _native.device_count,
    "_cuda_getDevice": _devices.current_device,
    "_cuda_setDevice": _native.set_device,
    "_cuda_exchangeDevice": _devices.exchange_device,
    "_cuda_maybeExchangeDevice": maybe_exchange_device,
    "_cuda_init": _native.init,
    "_cuda_isInBadFork": _native.is_in_bad_fork,
    "_cuda_synchronize": lambda: _devices.synchronize(),
    "_cuda_clearCublasWorkspaces": lambda: None,
    "_cuda_emptyCache": lambda: _memory.empty_cache(),
    "_cuda_memoryStats": _memory.memory_stats_as_nested_dict,
    "_cuda_sleep": _native.sleep,
    "_cuda_cudaCachingAllocator_is_enabled": lambda: False,  # turns off CUDA graphs in Inductor
    "_cuda_isCurrentStreamCapturing": _native.is_current_stream_capturing,
    "_CUDAGraph": _Graph,
    "_graph_pool_handle": _native.graph_pool_handle,
    "_host_emptyCache": lambda: None,
    "_cuda_hasPrimaryContext": lambda index: _native.is_initialized(),
    "_cuda_getCurrentRawStream": lambda index: int(_streams.current_stream(index).stream_id),
    "_cuda_getCurrentStream": lambda index: _numbers_of(_streams.current_stream(index)),
    "_cuda_getDefaultStream": lambda index: _numbers_of(_streams.default_stream(index)),
    "_cuda_setStream": _set_stream,
}


# Flags for NVIDIA's libraries, which GPU builds have.
_MISSING_LIBRARIES = dict.fromkeys(("_has_cudnn", "_has_cusparselt", "_has_magma"), False)


def _replace_storages() -> None:
    """Make, resize and pickle storages of the device: torch would use CUDA's memory, or refuse without CUDA."""
    kind: Any = torch.UntypedStorage
    make, resize = kind.__new__, kind.resize_

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type != NAME:
            return make(cls, *args, **kwargs)
        size = args[0] if args else kwargs.get("size", 0)
        index = _devices.index_of(device)
        if isinstance(size, int):
            return _native.new_storage(size, index)
        made = _native.new_storage(len(size), index)
        made.copy_(make(cls, size))
        return made

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != NAME:
            return resize(self, size)
        _native.resize_storage(self, size)
        return self

    kind.__new__, kind.resize_ = new, resize_
    original = reductions.reduce_tensor

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if tensor.device.type != NAME or (tensor.requires_grad and not tensor.is_leaf):
            return original(tensor)
        metadata = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.requires_grad)
        return reductions.rebuild_tensor, (type(tensor), tensor._typed_storage(), metadata)

    setattr(reductions, "reduce_tensor", reduce_tensor)  # noqa: B010 - mypy refuses to assign a function
    for pickled in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(pickled, reduce_tensor)


def _enable_profiling() -> None:
    for module in (
        torch._C._autograd,
        torch.autograd,
        torch.autograd.profiler,
        torch.profiler.profiler,
        torch.profiler,
    ):
        if (original := vars(module).get("_supported_activities")) is not None:
            setattr(module, "_supported_activities", _with_cuda(original))  # noqa: B010 - mypy knows no such name


def _with_cuda(original: Callable[[], set[Any]]) -> Callable[[], set[Any]]:
    return lambda: {*original(), torch.profiler.ProfilerActivity.CUDA}


def _add_nccl(process_group: type) -> None:
    """Make ``torch.distributed`` report NCCL as available, with backends of simccl."""
    setattr(c10d, "_NCCL_AVAILABLE", True)  # noqa: B010 - mypy knows it as a constant
    for holder in (c10d, torch.distributed.constants):
        setattr(holder, "default_pg_nccl_timeout", _collectives.TIMEOUT_OF_NCCL)  # noqa: B010 - as above
    of_c: Any = torch._C._distributed_c10d
    for module in (c10d, dist, of_c):
        setattr(module, "ProcessGroupNCCL", process_group)  # noqa: B010 - as above
    # The flight recorder under its older names, which a build with NCCL has besides the newer ones.
    of_c._dump_nccl_trace, of_c._dump_nccl_trace_json = of_c._dump_fr_trace, of_c._dump_fr_trace_json
    backends: Any = c10d.Backend
    if hasattr(backends, "_ensure_backend_registered"):  # from torch 2.15 on, by default for another class of NCCL's
        backends._ensure_backend_registered("nccl")
        maker = getattr(c10d, "_create_nccl_process_group")  # noqa: B009 - mypy knows no such name
        backends._plugins["NCCL"] = backends._plugins["NCCL"]._replace(creator_fn=maker)
        for name in ("nccl2", "nccl-legacy"):
            backends.register_backend(name, maker, extended_api=True, devices=[NAME])


def _refuse_foreign_code() -> None:
    """Refuse to export device memory to other CUDA code, which would use its address as a GPU's."""

    def no_interface(self: torch.Tensor) -> Any:
        if self.device.type != NAME:
            raise AttributeError(f"Can't get __cuda_array_interface__ on a tensor of the device {self.device}.")
        raise AttributeError("The memory of a simulated device is the host's, so no CUDA code can read it.")

    setattr(torch.Tensor, "__cuda_array_interface__", property(no_interface))  # noqa: B010
    export: Any = torch.Tensor.__dlpack__

    def __dlpack__(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == NAME:
            raise BufferError("The memory of a simulated device is the host's, so no CUDA code can read it.")
        return export(self, *args, **kwargs)

    setattr(torch.Tensor, "__dlpack__", __dlpack__)  # noqa: B010
    setattr(torch.utils.dlpack, "to_dlpack", torch.Tensor.__dlpack__)  # noqa: B010 - calls torch's C++ half
