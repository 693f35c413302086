"""The base classes and helpers of distributed tests, under upstream's names, from
``_distributed``, whose modules list them in ``__all__``. Other names are torch's own.
"""

# ruff: noqa: F403  # see above

from __future__ import annotations

import warnings
from typing import Any

from torch_ext.compat import UntestedTorchWarning, untested_torch
from torch_ext.compat.testing import upstream_name
from torch_ext.testing._internal._distributed.continuous import *
from torch_ext.testing._internal._distributed.helpers import *
from torch_ext.testing._internal._distributed.multi_process import *
from torch_ext.testing._internal._distributed.multi_threaded import *
from torch_ext.testing._internal._distributed.skips import *
from torch_ext.world.settings import TIMEOUT_DEFAULT as TIMEOUT_DEFAULT
from torch_ext.world.settings import TIMEOUT_OVERRIDE as TIMEOUT_OVERRIDE
from torch_ext.world.settings import get_timeout as get_timeout
from torch_ext.world.verdict import WorldFailure as WorldFailure

if message := untested_torch():
    warnings.warn(message, UntestedTorchWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    # On use, so that importing this module does not require every private name that
    # upstream's file imports.
    return upstream_name("common_distributed", name)
