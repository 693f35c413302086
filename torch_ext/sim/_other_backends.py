"""How torch's other backends serve ``sim`` tensors.

===================================  ===============================================================================
``fake``, torch's threaded group     serve ``sim`` as they serve ``cuda``
``"gloo"``                           ``sim`` tensors by ``simccl``, in the same group; several ranks may use one device
``"sim:gloo"``                       likewise
a backend of gloo that has no group  likewise: see :mod:`torch_ext.sim._gloo_halves`
``"cpu:gloo"``, anything else        torch refuses: no backend for device type ``sim``
===================================  ===============================================================================

``all_reduce`` of sparse ``sim`` tensors, such as the gradients of ``nn.Embedding(sparse=True)`` under DDP: a group or a
backend of ``"gloo"`` reduces copies of them on the host (gloo reduces sparse CUDA tensors too). ``simccl`` in any other
group refuses them, as NCCL does.

Gloo reads only host and CUDA memory. A group made with the plain name ``"gloo"`` serves the accelerator too where gloo
was built for it; here ``simccl`` serves that half, so every rank of such a group must have imported the simulator.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_ext.sim import _gloo_halves
from torch_ext.sim._name import KEY, NAME

# Backends that work on any tensor, each with a list of devices that torch knows.
_ANY_TENSOR = ("threaded", "fake")

# Upstream's tests look for the first sentence, which is NCCL's.
_REFUSAL = (
    "NCCL does not support all_reduce with sparse tensors, and neither does simccl. "
    "Use dense tensors (nn.Embedding(sparse=False)), or a group of gloo (backend='gloo')."
)

_HOST = torch.device("cpu")
_libraries: list[torch.library.Library] = []


def serve_threaded_and_fake_groups() -> None:
    """Let torch's threaded and fake groups serve ``sim``, whether or not they are registered yet."""
    # Each registers itself when its module is imported, which overwrites any entry made before; the registration is
    # wrapped so that `sim` joins whenever that happens.
    registered = dist.Backend.register_backend

    def register_backend(
        name: str, func: Any, extended_api: bool = False, devices: str | list[str] | None = None, **private: Any
    ) -> None:
        if name in _ANY_TENSOR and isinstance(devices, list):
            devices = [*devices, NAME]
        # Since 2.15 torch marks its own backends by private arguments.
        registered(name, func, extended_api, devices, **private)

    setattr(dist.Backend, "register_backend", staticmethod(register_backend))  # noqa: B010 - mypy refuses to assign a method
    for name in _ANY_TENSOR:
        devices = dist.Backend.backend_capability.get(name)
        if devices is not None and NAME not in devices:
            devices.append(NAME)


def serve_gloo(
    group: dist.ProcessGroup, store: c10d.Store, make: _gloo_halves.Make, wrappers: Sequence[Any] = ()
) -> None:
    """Give a group of gloo, as ``_new_process_group_helper`` made it, a backend for ``sim`` tensors.

    ``wrappers`` are torch's wrappers around the group's backends, which compare the ranks' calls.
    """
    if not is_gloo(group):
        return
    config = c10d._world.pg_backend_config[group]
    device = config.partition(":")[0] if config == _gloo_config() else NAME
    gloo: Any = group._get_backend(torch.device(device))
    name, description = group.group_name, group.group_desc
    backend = _gloo_halves.make_half(gloo, store, make, lambda _store, _rank, size: list(range(size)))
    if gloo in wrappers:
        backend = _gloo_halves.wrap_half(backend, gloo)
    group._register_backend(torch.device(NAME), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)  # sets it on the new backend too
    group._set_group_desc(description)


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo was asked to serve ``sim`` tensors in ``group``, by its name alone or as ``"sim:gloo"``."""
    config = c10d._world.pg_backend_config.get(group, "")
    return config == _gloo_config() or f"{NAME}:{dist.Backend.GLOO}" in config.split(",")


def _gloo_config() -> str:
    return str(c10d.BackendConfig(dist.Backend(dist.Backend.GLOO)))


def reduce_sparse_tensors() -> None:
    """Give ``c10d::allreduce_``, to which ``dist.all_reduce`` leads, a kernel for sparse tensors of the device."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():  # replaces torch's CUDA kernel, which refuses with another message
        warnings.simplefilter("ignore", UserWarning)
        library.impl("allreduce_", _all_reduce, f"Sparse{KEY}")
    _libraries.append(library)  # destroying it would unregister the kernel


def _all_reduce(tensors: list[torch.Tensor], group: Any, op: Any, *_others: Any) -> tuple[list[torch.Tensor], Any]:
    process_group = c10d._resolve_process_group(dist.ProcessGroup.unbox(group).group_name)
    if not (is_gloo(process_group) and _HOST in process_group._device_types):
        raise NotImplementedError(_REFUSAL)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(op.op()))
    gloo: Any = process_group._get_backend(_HOST)
    return tensors, _gloo_halves.reduce_sparse(tensors, lambda on_host: gloo.allreduce(on_host, options)).boxed()
