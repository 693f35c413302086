"""Operators whose results on ``sim`` are not those of ``cpu``, each with its reason. Data of test_ops.py.

An entry of ``GPU_ONLY`` that no longer differs makes a test fail. The other lists allow a difference and do not demand
it, because an operator may differ for some samples only.
"""

from typing import NamedTuple

# The host draws only for some values, here negative ones; a device's generator advances for all.
RANDOM_BY_VALUE = frozenset({"nn.functional.rrelu"})

# Operators that return memory which nothing has written.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


class Rounded(NamedTuple):
    """Why an operator rounds differently, and by how much (relative and absolute) in float32 and in bfloat16."""

    reason: str
    full: float = 0.0
    half: float = 0.0


_GELSY = "LAPACK's gelsy rounds by the alignment of its workspace: the host does not always equal itself"
_BY_NAME = "torch chooses the type it accumulates in by the device's name, and knows only its own devices"
ROUNDED = {
    "linalg.lstsq": Rounded(_GELSY, full=1e-5),
    "linalg.lstsq.grad_oriented": Rounded(_GELSY, full=1e-5),
    "nn.functional.linear_cross_entropy.chunked": Rounded(_BY_NAME, half=5e-2),
    "nn.functional.linear_cross_entropy.chunked_none": Rounded(_BY_NAME, half=5e-2),
}

# The statistics of half precision are in float, as GPUs save them.
IN_FLOAT = frozenset({"native_batch_norm", "native_layer_norm", "_native_batch_norm_legit"})

# Arguments that are on the host for every accelerator.
HOST_ARGUMENTS = frozenset({"tensor_split"})

# Operators written for GPUs only, without a result on cpu to compare with.
GPU_ONLY = frozenset(
    {
        "jiterator_2inputs_2outputs",
        "jiterator_4inputs_with_extra_args",
        "jiterator_binary",
        "jiterator_binary_return_by_ref",
        "jiterator_unary",
        "nn.functional.batch_norm.without_cudnn",
        "torch.ops.aten._efficient_attention_forward",
        "torch.ops.aten._flash_attention_forward",
    }
)

# The errors of the host for some samples, which are left out. Any other exception of the host fails the test.
REFUSED_BY_HOST = {
    "as_strided.partial_views": "setStorage: ",  # a copy of the sample has less storage than the sample
    "nn.functional.embedding": "scale_grad_by_freq not supported with sparse gradients",
    "nn.functional.embedding_bag": "scale_grad_by_freq not supported with sparse gradients",
    "scatter": "derivative for aten::scatter is not implemented",
}
