"""The device under test is looked up on use, through names that a test file may patch."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from test.torch_ext.interpreter import python
from torch_ext import accelerator
from torch_ext.testing._internal import common_fsdp
from torch_ext.testing._internal._fsdp import device


def test_importing_the_helpers_chooses_no_device_and_loads_no_compiler():
    program = (
        "import sys; from torch_ext import accelerator; import torch_ext.testing._internal.common_fsdp; "
        "assert accelerator._chosen is None, accelerator._chosen; "
        "assert 'torch._inductor.compile_fx' not in sys.modules"
    )
    assert python("-c", program).returncode == 0


def test_names_default_to_the_values_of_accelerator():
    assert accelerator.device_type() == common_fsdp.DEVICE_TYPE
    assert accelerator.device_count() == common_fsdp.DEVICE_COUNT
    assert accelerator.backend() == common_fsdp.DISTRIBUTED_BACKEND
    assert accelerator.default_world_size() == device.default_world_size()


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="DEVICE_KIND"):
        common_fsdp.DEVICE_KIND  # noqa: B018


def test_patched_names_are_obeyed_and_forgotten():
    with (
        mock.patch.object(common_fsdp, "DEVICE_TYPE", "meta"),
        mock.patch.object(common_fsdp, "DEVICE_COUNT", 2),
        mock.patch.object(common_fsdp, "DISTRIBUTED_BACKEND", "fake"),
    ):
        assert common_fsdp.get_devtype() == torch.device("meta")
        assert common_fsdp.rank_device(3) == torch.device("meta", 1)
        assert device.distributed_backend() == "fake"
        assert device.default_world_size() == 2
        moved = common_fsdp._move_to_device(torch.nn.Linear(1, 1), True)
        assert moved.weight.is_meta
        # FSDP finds an accelerator itself.
        assert device.with_compute_device({}) == {}
        common_fsdp.skip_without_accelerator("unused")
    assert accelerator.device_type() == common_fsdp.DEVICE_TYPE
    assert device.default_world_size() == accelerator.default_world_size()


def test_host_is_named_to_fsdp_unless_the_caller_did():
    with mock.patch.object(common_fsdp, "DEVICE_TYPE", accelerator.HOST):
        host = torch.device(accelerator.HOST)
        assert common_fsdp.rank_device(3) == host
        assert device.with_compute_device({"forward_prefetch": True}) == {"device_id": host, "forward_prefetch": True}
        assert device.with_compute_device({"device_id": 7}) == {"device_id": 7}


@pytest.mark.parametrize(("count", "expected"), [(None, 4), (1, 1), (4, 4), (8, 8), (16, 8)])
def test_default_world_size(count, expected):
    with (
        mock.patch.object(accelerator, "is_accelerator", return_value=count is not None),
        mock.patch.object(accelerator, "device_count", return_value=count),
        mock.patch.object(accelerator, "device_module", return_value=SimpleNamespace()),
    ):
        assert accelerator.default_world_size() == expected


@pytest.mark.parametrize(("can_sleep", "slept"), [(True, [3000]), (False, [0.003])])
def test_delay_sleeps_on_a_device_that_can_and_in_the_host_otherwise(can_sleep, slept):
    calls = []
    module = SimpleNamespace(_sleep=calls.append) if can_sleep else None
    host_sleep = pytest.fail if can_sleep else calls.append
    with (
        mock.patch.object(accelerator, "can_sleep", return_value=can_sleep),
        mock.patch.object(torch, "get_device_module", return_value=module),
        mock.patch("torch_ext.testing._internal.common_utils.get_cycles_per_ms", return_value=1000.0),
        mock.patch.object(device.time, "sleep", host_sleep),
    ):
        for milliseconds in (3, 0, -1):
            device.delay(milliseconds)
    assert calls == slept
