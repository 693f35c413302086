"""``torch.distributed.ProcessGroupNCCL``: options that programs pass on, and a class that a group may be asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch_ext.cuda_as_sim import table

__all__ = ["ProcessGroupNCCL"]


class _Kind(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise table.refuse(cls.__name__)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise table.refuse(cls.__name__)


class ProcessGroupNCCL(metaclass=_Kind):
    """Stands for NCCL's class. Making one is refused: ``init_process_group`` and ``new_group`` make groups."""

    class Options:
        """What a group of NCCL's is made with. simccl has streams of one priority, and ignores all of it."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()

    NCCLConfig = SimpleNamespace
