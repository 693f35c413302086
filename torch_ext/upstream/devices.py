"""Adds the device under test to the names that torch's test helpers list: device types, backends, delays.

Upstream's files end in ``instantiate_device_type_tests(TestX, globals(), only_for=("cuda", "hpu"))``. An accelerator
that is not on such a list would get no tests. ``DTensorTestBase`` and ``ShardedTensorTestBase`` refuse unlisted
backends, and set a rank's device only for the backends of two vendors.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_ext import accelerator
from torch_ext.compat.testing import upstream_module
from torch_ext.personality import is_cuda

# Torch's name for the slot of an out-of-tree device.
_SLOT = "privateuse1"


def install() -> None:
    """Add the accelerator under test to the lists of torch's helpers. Does nothing on plain ``cpu``."""
    if not accelerator.is_accelerator():
        return
    module = upstream_module("common_device_type")
    module.instantiate_device_type_tests = _for_device_under_test(  # type: ignore[attr-defined]
        module.instantiate_device_type_tests, module.device_type_test_bases
    )
    if accelerator.can_sleep():
        upstream_module("common_utils").get_cycles_per_ms = _cycles_per_ms  # type: ignore[attr-defined]
    distributed = upstream_module("common_distributed")
    distributed.HAS_ACCELERATOR = True  # type: ignore[attr-defined]  # upstream asks three vendors
    # Device types with one device for each DDP rank.
    ranked: list[str] = distributed.DDP_RANK_DEVICES
    if accelerator.device_type() not in ranked:
        ranked.append(accelerator.device_type())
    if accelerator.backend() not in distributed.ACCELERATOR_DIST_BACKENDS:
        _patch_dtensor_base(upstream_module("distributed._tensor.common_dtensor").DTensorTestBase)
        _patch_sharded_base(upstream_module("distributed._shard.sharded_tensor"))


def update_device_count() -> None:
    """Update the number of devices in ``common_dtensor``, which counts them once.

    Its tests run on the host if there are fewer devices than ranks.
    """
    if accelerator.is_accelerator():
        upstream_module("distributed._tensor.common_dtensor").DEVICE_COUNT = accelerator.device_count()  # type: ignore[attr-defined]


def _cycles_per_ms(device: str = "") -> float:
    """Replaces upstream's ``get_cycles_per_ms``, which measures CUDA. Measures the one device under test."""
    return float(importlib.import_module("torch_ext.testing._internal.common_utils").get_cycles_per_ms())


def _patch_dtensor_base(base: Any) -> None:
    base.backend = property(_backends)
    init_pg = base.init_pg

    @functools.wraps(init_pg)
    def wrapper(self: Any, eager_init: Any = False, backend: str | None = None) -> None:
        if not _init_on_own_backend(self, str(backend or self.backend), eager_init=bool(eager_init)):
            init_pg(self, eager_init, backend)

    base.init_pg = wrapper


def _backends(case: Any) -> str:
    device = case.device_type
    own = dist.get_default_backend_for_device(device)
    host = dist.get_default_backend_for_device(accelerator.HOST)
    return own if device == accelerator.HOST else f"{accelerator.HOST}:{host},{device}:{own}"


def _init_on_own_backend(case: Any, backend: str, *, eager_init: bool = False) -> bool:
    """Make the group of ``case`` if ``backend`` names the backend of the device under test; return whether it does."""
    if accelerator.backend() not in (part.rpartition(":")[2] for part in backend.split(",")):
        return False
    if accelerator.device_count() < case.world_size:
        accelerator.request_devices(case.world_size)
    accelerator.set_device_index(case.rank)
    dist.init_process_group(
        backend=backend,
        world_size=case.world_size,
        rank=case.rank,
        init_method=f"file://{case.file_name}",
        device_id=torch.device(accelerator.device_type(), case.rank) if eager_init else None,
    )
    return True


def _patch_sharded_base(module: Any) -> None:
    """Run sharded tensors' tests, which ask for ``nccl`` by default, on the device under test."""
    with_comms, init_pg = module.with_comms, module.ShardedTensorTestBase.init_pg
    module.with_comms = lambda func=None, init_rpc=True, backend="": with_comms(func, init_rpc, _backend_of(backend))

    @functools.wraps(init_pg)
    def wrapper(self: Any, backend: str = "") -> None:
        wanted = _backend_of(backend)
        if not _init_on_own_backend(self, wanted):
            init_pg(self, wanted)

    module.ShardedTensorTestBase.init_pg = wrapper


def _backend_of(name: str) -> str:
    """Return ``name``, or the device under test's backend if ``name`` is empty or another accelerator's."""
    others = upstream_module("common_distributed").ACCELERATOR_DIST_BACKENDS
    return accelerator.backend() if not name or name in others else name


def _for_device_under_test(instantiate: Any, bases: list[Any]) -> Any:
    own = accelerator.device_type()
    in_slot = [base for base in bases if base.device_type == _SLOT]
    if is_cuda():
        for base in bases:
            if base.device_type == own:
                base.setUpClass = classmethod(_name_primary_device)

    def name_slot(name: str) -> None:
        for base in in_slot:
            base.device_type = name

    @functools.wraps(instantiate)
    def wrapper(
        generic_test_class: type, scope: dict[str, Any], except_for: Any = None, only_for: Any = None, **options: Any
    ) -> None:
        # Torch renames the base after the device in setUpClass only. It compares lists with the old name; ranks, which
        # never run setUpClass, need the new one.
        name_slot(_SLOT)
        instantiate(generic_test_class, scope, except_for, with_device_under_test(only_for, own), **options)
        name_slot(own)

    return wrapper


def _name_primary_device(cls: Any) -> None:
    """Replaces ``setUpClass`` of torch's CUDA base, which uses the device, after which no process can fork."""
    cls.no_magma, cls.no_cudnn, cls.cudnn_version = True, True, None
    cls.primary_device = f"{accelerator.device_type()}:{accelerator.device_module().current_device()}"


def with_device_under_test(only_for: str | Sequence[str] | None, device: str) -> tuple[str, ...] | None:
    """Return ``only_for`` as a tuple, with ``device`` added if it names any accelerator. ``None`` means all devices.

    >>> with_device_under_test(("cuda", "hpu"), "sim")
    ('cuda', 'hpu', 'sim')
    >>> with_device_under_test("cpu", "sim")
    ('cpu',)
    """
    if only_for is None:
        return None
    listed = (only_for,) if isinstance(only_for, str) else tuple(only_for)
    names_accelerator = any(name != accelerator.HOST for name in listed)
    return (*listed, device) if names_accelerator and device not in listed else listed
