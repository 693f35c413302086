"""Tensors in pinned memory that are pickled or saved: reads of the host that torch's dispatcher does not see.

``torch.save``, checkpoints and ``all_gather_object`` pickle a tensor, and read its storage at once.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from torch_ext.sim import _native

__all__ = ["see_pickled_tensors"]


def see_pickled_tensors() -> None:
    """Tell every check from now on of tensors of the host that are pickled."""
    # Not __reduce_ex__ itself: subclasses look up by that very function what to do instead.
    original = torch.Tensor._reduce_ex_internal

    @wraps(original)
    def reduce_ex(self: torch.Tensor, protocol: Any) -> Any:
        if (
            _native.is_checking_races()
            and type(self) in (torch.Tensor, torch.nn.Parameter)
            and self.device.type == "cpu"
        ):
            _native.use_tensors("pickle", [self.detach()], False)
        return original(self, protocol)

    setattr(torch.Tensor, "_reduce_ex_internal", reduce_ex)  # noqa: B010 - mypy refuses to assign a method
