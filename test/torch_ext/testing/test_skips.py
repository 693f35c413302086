"""Each decorator on the host and on accelerators with n devices: which tests run, which skip, and how."""

import types
import unittest

import pytest
import torch
import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.testing._internal.common_distributed import (
    TEST_SKIPS,
    get_required_world_size,
    requires_accelerator_dist_backend,
    requires_gloo,
    requires_nccl,
    requires_world_size,
    skip_if_lt_x_gpu,
    skip_if_no_gpu,
    skip_if_rocm_multiprocess,
)

# The skip of a test that needs more devices than upstream has exit codes for.
NEEDS = "skipped: Needs {} accelerator devices. Run with --device sim to use simulated ones."


@pytest.fixture
def machine(monkeypatch):
    """Pretend that the machine has an accelerator with ``count`` devices; 0 means none."""

    def pretend(count):
        monkeypatch.setattr(accelerator, "_chosen", "cuda" if count else "cpu")
        module = types.SimpleNamespace(device_count=lambda: count)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: module)

    return pretend


def ending(test, *args):
    """Run a decorated test and return how it ended: its result, or the skip that it raised or exited with."""
    try:
        return str(test(*args))
    except SystemExit as stop:
        return next(name for name, skip in TEST_SKIPS.items() if skip.exit_code == stop.code)
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"


def body(*args):
    return "ran"


@pytest.mark.parametrize(
    ("decorate", "devices", "world_size", "ends"),
    [
        (skip_if_lt_x_gpu(1), 0, 1, "multi-gpu-1"),
        (skip_if_lt_x_gpu(2), 0, 1, "multi-gpu-2"),
        (skip_if_lt_x_gpu(2, allow_cpu=True), 0, 1, "ran"),
        (skip_if_lt_x_gpu(2), 1, 1, "multi-gpu-2"),
        (skip_if_lt_x_gpu(2, allow_cpu=True), 1, 1, "multi-gpu-2"),
        (skip_if_lt_x_gpu(2), 2, 1, "ran"),
        (skip_if_lt_x_gpu(8), 7, 1, "multi-gpu-8"),
        (skip_if_lt_x_gpu(16), 16, 1, "ran"),
        *((skip_if_lt_x_gpu(count), devices, 1, NEEDS.format(count)) for devices in (0, 8) for count in (9, 16, 32)),
        (skip_if_no_gpu, 0, 1, "no_cuda"),
        (skip_if_no_gpu, 1, 1, "ran"),
        (skip_if_no_gpu, 1, 2, "multi-gpu-2"),
        (skip_if_no_gpu, 2, 2, "ran"),
        (skip_if_no_gpu, 3, 4, "multi-gpu-4"),
        (skip_if_no_gpu, 8, 9, NEEDS.format(9)),
        # This one skips only for lack of devices.
        (requires_world_size(4), 0, 1, "ran"),
        (requires_world_size(4), 2, 1, "skipped: requires 4 devices, found 2 of cuda"),
        (requires_world_size(4), 4, 1, "ran"),
    ],
)
def test_decorator_requests_devices_when_the_test_runs(machine, monkeypatch, decorate, devices, world_size, ends):
    machine(0 if devices else 1)
    test = decorate(body)
    machine(devices)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert ending(test) == ends


@pytest.mark.parametrize("decorate", [skip_if_lt_x_gpu(2), skip_if_lt_x_gpu(16), skip_if_no_gpu])
def test_skip_handler_of_the_class_is_called(machine, decorate):
    machine(0)
    heard = []
    case = types.SimpleNamespace(_handle_test_skip=heard.append)
    assert ending(decorate(body), case) == "None"
    assert len(heard) == 1
    assert "accelerator" in heard[0]


class Case:
    @requires_world_size(3)
    def test_three(self): ...

    def test_any(self): ...

    _testMethodName = "test_three"


@pytest.mark.parametrize(
    ("current", "expected"),
    [("test_three", 3), (lambda: "test_three", 3), ("test_any", 2), (lambda: "test_any", 2), ("test_gone", 2)],
)
def test_the_required_world_size_is_that_of_the_current_test(current, expected):
    case = Case()
    assert get_required_world_size(case, 2) == 3  # by unittest's own name of the test
    vars(case)["_current_test_name"] = current  # a property in one base class, a method in another
    assert get_required_world_size(case, 2) == expected
    assert get_required_world_size(object(), 5) == 5


@pytest.mark.parametrize(
    "decorators", [(requires_world_size(3), skip_if_lt_x_gpu(1)), (skip_if_lt_x_gpu(1), requires_world_size(3))]
)
def test_the_required_world_size_is_seen_through_other_decorators(decorators):
    outer, inner = decorators
    decorated = type("Decorated", (), {"test_it": outer(inner(body)), "_testMethodName": "test_it"})
    assert get_required_world_size(decorated(), 1) == 3


# Backends, which are looked up when the decorator is called


def is_skipped(decorate):
    def test(): ...

    return bool(getattr(decorate(test), "__unittest_skip__", False))


@pytest.mark.parametrize("there", [True, False])
def test_requires_a_backend_by_name(monkeypatch, there):
    monkeypatch.setattr(c10d, "is_gloo_available", lambda: there)
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: not there)
    assert is_skipped(requires_gloo()) is not there
    assert is_skipped(requires_nccl()) is there


@pytest.mark.parametrize(
    ("devices", "wanted", "there", "skipped"),
    [
        (0, None, {"gloo"}, True),
        (0, None, {"xccl"}, False),
        (0, ["gloo"], {"gloo"}, False),
        (2, ["hccl"], {"nccl"}, True),
        (2, None, {"nccl"}, False),
        (2, None, {"own"}, False),
        (2, ["hccl"], {"own"}, False),
        (2, None, set(), True),
    ],
)
def test_requires_accelerator_dist_backend(machine, monkeypatch, devices, wanted, there, skipped):
    """The backend of the device under test, here "own", counts whatever its name is."""
    machine(devices)
    monkeypatch.setattr(accelerator, "backend", lambda: "own")
    monkeypatch.setattr(c10d, "is_backend_available", lambda name: name in there)
    assert is_skipped(requires_accelerator_dist_backend(wanted)) is skipped


@pytest.mark.parametrize(("hip", "skipped"), [(None, False), ("6.2", True)])
def test_skip_if_rocm_multiprocess(monkeypatch, hip, skipped):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert is_skipped(skip_if_rocm_multiprocess) is skipped


@pytest.mark.parametrize("name", ["multi-gpu-", "multi-gpu-many", "9", "no_such_reason"])
def test_unknown_reason_is_a_key_error(name):
    with pytest.raises(KeyError, match=name):
        TEST_SKIPS[name]


def test_the_codes_are_upstreams_and_no_two_are_equal():
    from torch.testing._internal.common_distributed import TEST_SKIPS as upstream

    assert {name: skip.exit_code for name, skip in TEST_SKIPS.items() if name in upstream} == {
        name: skip.exit_code for name, skip in upstream.items() if name in TEST_SKIPS
    }
    assert upstream.keys() - TEST_SKIPS.keys() == set()
    codes = [skip.exit_code for skip in TEST_SKIPS.values()]
    assert len(set(codes)) == len(codes)
    assert all(skip.message.endswith(".") for skip in TEST_SKIPS.values())
    assert TEST_SKIPS["multi-gpu-9"].exit_code == TEST_SKIPS["generic"].exit_code  # upstream's codes end at 8
