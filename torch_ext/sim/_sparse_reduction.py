"""``all_reduce`` of sparse ``sim`` tensors, such as the gradients of ``nn.Embedding(sparse=True)`` under DDP.

=====================================  ======================================================================
a group of ``"gloo"``                  reduces them, as it does those of CUDA: here on copies on the host
``simccl``, that is any other group    refuses them, as NCCL does
=====================================  ======================================================================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # not in the stubs
from torch.distributed import distributed_c10d as c10d

from torch_ext.sim import _other_backends

__all__ = ["install"]

# Upstream's tests look for the first sentence, which is NCCL's.
_REFUSAL = (
    "NCCL does not support all_reduce with sparse tensors, and neither does simccl. "
    "Use dense tensors (nn.Embedding(sparse=False)), or a group of gloo (backend='gloo')."
)

_HOST = torch.device("cpu")
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Give ``c10d::allreduce_``, to which ``dist.all_reduce`` leads, a kernel for sparse tensors of the device."""
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", _all_reduce, "SparsePrivateUse1")
    _libraries.append(library)  # its kernels go with it


def _all_reduce(tensors: list[torch.Tensor], group: Any, op: Any, *_others: Any) -> tuple[list[torch.Tensor], Any]:
    """Reduce ``tensors``, one sparse COO tensor, in place. The host waits, so that the work returned is complete."""
    process_group = c10d._resolve_process_group(dist.ProcessGroup.unbox(group).group_name)
    if not (_other_backends.is_gloo(process_group) and _HOST in process_group._device_types):
        raise NotImplementedError(_REFUSAL)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(op.op()))
    on_host = [tensor.cpu() for tensor in tensors]
    gloo: Any = process_group._get_backend(_HOST)
    gloo.allreduce(on_host, options).wait()
    for tensor, reduced in zip(tensors, on_host, strict=True):
        tensor.copy_(reduced)
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[tensors[0].device])
    future.set_result(tensors)
    return tensors, _create_work_from_future(future).boxed()
