"""Adds the device under test to the device and backend lists that are hard-coded in torch's test helpers.

Upstream's files end in ``instantiate_device_type_tests(TestX, globals(), only_for=("cuda", "hpu"))``. An accelerator
that is not on such a list would get no tests. ``DTensorTestBase`` rejects backends it does not know, unless it is given
one for the host and one for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torch_ext import accelerator
from torch_ext.compat.testing import upstream_module

__all__ = ["install", "with_device_under_test"]

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
    if accelerator.backend() not in upstream_module("common_distributed").ACCELERATOR_DIST_BACKENDS:
        upstream_module("distributed._tensor.common_dtensor").DTensorTestBase.backend = property(_backends)


def _backends(case: Any) -> str:
    device = case.device_type
    own = dist.get_default_backend_for_device(device)
    host = dist.get_default_backend_for_device(accelerator.HOST)
    return own if device == accelerator.HOST else f"{accelerator.HOST}:{host},{device}:{own}"


def _for_device_under_test(instantiate: Any, bases: Sequence[Any]) -> Any:
    own = accelerator.device_type()
    in_slot = [base for base in bases if base.device_type in (_SLOT, own)]

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
