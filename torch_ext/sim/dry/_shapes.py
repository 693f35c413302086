"""Which shape functions a dry run uses.

Torch has one in C++ for most operators and registers another in Python on top of many, for symbolic sizes, at a hundred
times the cost. In this process the first ones come back.
"""

from __future__ import annotations

import torch
from torch import _meta_registrations

_library: torch.library.Library | None = None  # registrations end with the object that made them


def prefer_native() -> None:
    """Leave shape functions written in Python to operators that have no other."""
    global _library
    theirs = _meta_registrations._meta_lib_dont_use_me_use_register_meta
    functions = {}
    for key in theirs._op_impls:  # "aten/add.Tensor/Meta"
        packet, _, overload = key.split("/")[1].partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        functions[op] = op.py_kernels[torch._C.DispatchKey.Meta]
    theirs._destroy()
    _library = torch.library.Library("aten", "IMPL", "Meta")
    for op, function in functions.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
            _library.impl(op, function)
