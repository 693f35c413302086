"""What ``torch.manual_seed`` does for kinds of devices that this torch was built without."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType
from typing import Any

__all__ = ["seed_without_stacks"]

_KINDS = ("torch.cuda", "torch.xpu", "torch.mtia")


def seed_without_stacks() -> None:
    """Seed generators without formatting the caller's stack for each kind of device that this torch cannot have.

    Torch keeps each seed for a device that is not initialized yet, along with the stack, which it shows if setting the
    seed fails then. For a kind that it was built without, nothing will ever look at it, and three stacks for each seed
    are a twelfth of what tests of FSDP compute. Other callers of these modules find ``traceback`` as it is.
    """
    for name in _KINDS:
        module = importlib.import_module(name)
        is_compiled = getattr(module, "_is_compiled", None)
        if is_compiled is not None and not is_compiled() and getattr(module, "traceback", None) is traceback:
            module.traceback = _NoStacks("traceback")  # type: ignore[attr-defined]


class _NoStacks(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    @staticmethod
    def format_stack(*args: Any, **kwargs: Any) -> list[str]:
        return []
