"""Private names of ``torch._dynamo``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch._dynamo import reset

__all__ = ["reset"]

__getattr__ = lazy_names(__name__, {"reset": ("torch._dynamo:reset",)})
