"""A log of the collectives that DistributedDataParallel calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_ext.compat.fsdp import TorchDispatchMode

__all__ = ["CollectiveLog"]


class Collective(NamedTuple):
    """A collective that was called: its name in c10d without underscores, and its first
    tensor's type and elements.
    """

    name: str
    dtype: torch.dtype
    numel: int


class CollectiveLog(TorchDispatchMode):
    """Notes all-reduces and broadcasts while it is entered, also those of C++ and of
    autograd's threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in ("allreduce_", "broadcast_"):
            tensor = args[0][0]
            self.calls.append(Collective(name.strip("_"), tensor.dtype, tensor.numel()))
        return func(*args, **(kwargs or {}))
