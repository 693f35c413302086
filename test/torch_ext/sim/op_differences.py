"""Operators whose results on ``sim`` are not those of ``cpu``, each with its reason. Data of test_ops.py.

An entry that no longer differs makes its test fail, so the list cannot go stale.
"""

from __future__ import annotations

# Values are drawn from the device's own generator: shapes, types and devices are compared, values are not.
RANDOM = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "nn.functional.rrelu",
        "normal",
        "normal.in_place",
        "normal.number_mean",
        "pca_lowrank",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "svd_lowrank",
        "uniform",
    }
)

# Values of memory that nothing has written.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

# Operators that fail on sim and run on cpu.
_SPARSE = "the device has dense tensors only"
FAILING: dict[str, str] = {
    "sparse.mm.reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "tensor_split": "sections given as a tensor must be on the host, for every accelerator",
    "to_sparse": _SPARSE,
}
