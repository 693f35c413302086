"""``all_reduce`` of sparse ``sim`` tensors, such as the gradients of ``nn.Embedding(sparse=True)`` under DDP.

=====================================  ======================================================================
a group or a backend of ``"gloo"``     reduces them, as it does those of CUDA: here on copies on the host
``simccl``, that is any other group    refuses them, as NCCL does
=====================================  ======================================================================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_ext.sim import _gloo_halves, _other_backends

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
    process_group = c10d._resolve_process_group(dist.ProcessGroup.unbox(group).group_name)
    if not (_other_backends.is_gloo(process_group) and _HOST in process_group._device_types):
        raise NotImplementedError(_REFUSAL)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(op.op()))
    gloo: Any = process_group._get_backend(_HOST)
    return tensors, _gloo_halves.reduce_sparse(tensors, lambda on_host: gloo.allreduce(on_host, options)).boxed()
