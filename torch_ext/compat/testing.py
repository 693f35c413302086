"""Private names of torch's test utilities that torch_ext's own code touches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import FILE_SCHEMA, find_free_port
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

__all__ = [
    "FILE_SCHEMA",
    "TEST_SKIPS",
    "FakeStore",
    "ProcessLocalGroup",
    "_install_threaded_pg",
    "_uninstall_threaded_pg",
    "find_free_port",
]

_UTILS = "torch.testing._internal.common_utils"
_DISTRIBUTED = "torch.testing._internal.common_distributed"
_THREADED = "torch.testing._internal.distributed.multi_threaded_pg"

__getattr__ = lazy_names(
    __name__,
    {
        "FILE_SCHEMA": (f"{_UTILS}:FILE_SCHEMA",),
        "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore",),
        "ProcessLocalGroup": (f"{_THREADED}:ProcessLocalGroup",),
        "TEST_SKIPS": (f"{_DISTRIBUTED}:TEST_SKIPS",),
        "_install_threaded_pg": (f"{_THREADED}:_install_threaded_pg",),
        "_uninstall_threaded_pg": (f"{_THREADED}:_uninstall_threaded_pg",),
        "find_free_port": (f"{_UTILS}:find_free_port",),
    },
)
