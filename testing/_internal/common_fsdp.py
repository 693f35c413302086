"""FSDP test helpers for every device: models, patches, parity checks and base classes,
under upstream's names.

Each import below exports what the module lists in ``__all__``. To add a helper, write
it in a module of ``_fsdp`` and add its name to that module's ``__all__``.

``DEVICE_TYPE``, ``DEVICE_COUNT`` and ``DISTRIBUTED_BACKEND`` come from
:mod:`torch_ext.accelerator` each time they are read, never at import. A test file may
assign them here; all helpers follow.
"""

# ruff: noqa: F403  # see above: __all__ of each module is the one list of its names

from __future__ import annotations

from typing import Any

from torch_ext.testing._internal._fsdp import device as _device
from torch_ext.testing._internal._fsdp.cases import *
from torch_ext.testing._internal._fsdp.compiled import *
from torch_ext.testing._internal._fsdp.device import *
from torch_ext.testing._internal._fsdp.extension_contract import *
from torch_ext.testing._internal._fsdp.fsdp2_parity import *
from torch_ext.testing._internal._fsdp.models.base import *
from torch_ext.testing._internal._fsdp.models.chain import *
from torch_ext.testing._internal._fsdp.models.mlp import *
from torch_ext.testing._internal._fsdp.models.nested import *
from torch_ext.testing._internal._fsdp.models.transformer import *
from torch_ext.testing._internal._fsdp.models.trees import *
from torch_ext.testing._internal._fsdp.patches import *
from torch_ext.testing._internal._fsdp.state import *
from torch_ext.testing._internal._fsdp.step_log import *
from torch_ext.testing._internal._fsdp.streams import *

DEVICE_TYPE: str
DEVICE_COUNT: int
DISTRIBUTED_BACKEND: str


def __getattr__(name: str) -> Any:
    if name in _device.DEFAULTS:
        return _device.DEFAULTS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
