"""``torch.sim.amp``: automatic mixed precision, under the names that ``torch.cuda.amp`` has."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_ext.sim._name import NAME


class autocast(torch.autocast):
    """``torch.autocast`` for this device."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = torch.float16, cache_enabled: bool | None = True
    ) -> None:
        super().__init__(NAME, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for this device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(NAME, *args, **kwargs)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=NAME)
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=NAME)
