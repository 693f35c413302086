"""Private names of Inductor, whose modules take seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch._inductor import config as _config
    from torch._inductor.codegen.common import get_scheduling_for_device as get_scheduling_for_device
    from torch._inductor.codegen.common import init_backend_registration as init_backend_registration
    from torch._inductor.utils import is_gpu as is_gpu
    from torch.utils._triton import has_triton as has_triton

    config = _config

__getattr__ = lazy_names(
    __name__,
    {
        "config": ("torch._inductor:config",),
        "get_scheduling_for_device": ("torch._inductor.codegen.common:get_scheduling_for_device",),
        "has_triton": ("torch.utils._triton:has_triton",),
        "init_backend_registration": ("torch._inductor.codegen.common:init_backend_registration",),
        "is_gpu": ("torch._inductor.utils:is_gpu",),
    },
)
