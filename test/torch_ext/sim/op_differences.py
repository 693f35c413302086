"""Operators whose results on ``sim`` are not those of ``cpu``, each with its reason. Data of test_ops.py.

An entry that no longer differs makes its test fail, so the list cannot go stale.
"""

from __future__ import annotations

# Values are drawn from the device's own generator: shapes, types and devices are compared, values are not.
RANDOM = frozenset(
    {
    }
)

# Values of memory that nothing has written.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})

# Operators that fail on sim and run on cpu.
FAILING: dict[str, str] = {
}
