"""The base classes and helpers of distributed tests, under upstream's names, from
``_distributed``. Other names are torch's own.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch_ext.compat import UntestedTorchWarning, untested_torch
from torch_ext.compat.testing import upstream_name
from torch_ext.testing._internal._distributed.continuous import MultiProcContinuousTest
from torch_ext.testing._internal._distributed.helpers import (
    captured_output,
    create_tcp_store,
    init_multigpu_helper,
    run_subtests,
    with_dist_debug_levels,
    with_timeout,
)
from torch_ext.testing._internal._distributed.multi_process import (
    DEFAULT_WORLD_SIZE,
    DistributedTestBase,
    MultiProcessTestCase,
)
from torch_ext.testing._internal._distributed.multi_threaded import (
    MultiThreadedTestCase,
    spawn_threads_and_init_comms,
)
from torch_ext.testing._internal._distributed.skips import (
    ACCELERATOR_DIST_BACKENDS,
    TEST_SKIPS,
    TestSkip,
    at_least_x_gpu,
    get_required_world_size,
    requires_accelerator_dist_backend,
    requires_gloo,
    requires_nccl,
    requires_world_size,
    skip_if_lt_x_gpu,
    skip_if_no_gpu,
    skip_if_rocm_multiprocess,
)
from torch_ext.world.settings import TIMEOUT_DEFAULT, TIMEOUT_OVERRIDE, get_timeout
from torch_ext.world.verdict import WorldFailure

__all__ = [
    "ACCELERATOR_DIST_BACKENDS",
    "DEFAULT_WORLD_SIZE",
    "TEST_SKIPS",
    "TIMEOUT_DEFAULT",
    "TIMEOUT_OVERRIDE",
    "DistributedTestBase",
    "MultiProcContinuousTest",
    "MultiProcessTestCase",
    "MultiThreadedTestCase",
    "TestSkip",
    "WorldFailure",
    "at_least_x_gpu",
    "captured_output",
    "create_tcp_store",
    "get_required_world_size",
    "get_timeout",
    "init_multigpu_helper",
    "requires_accelerator_dist_backend",
    "requires_gloo",
    "requires_nccl",
    "requires_world_size",
    "run_subtests",
    "skip_if_lt_x_gpu",
    "skip_if_no_gpu",
    "skip_if_rocm_multiprocess",
    "spawn_threads_and_init_comms",
    "with_dist_debug_levels",
    "with_timeout",
]

if message := untested_torch():
    warnings.warn(message, UntestedTorchWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    # On use, so that importing this module does not require every private name that
    # upstream's file imports.
    return upstream_name("common_distributed", name)
