"""How the device under test is chosen, and the properties that ``accelerator`` reports. Missing devices are mocked."""

import re
import sys
import types

import pytest
import torch

from torch_ext import accelerator

REQUESTED = accelerator.DEVICE_VARIABLE


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """A process in which the device has not been chosen yet."""
    monkeypatch.setattr(accelerator, "_chosen", None)
    monkeypatch.delenv(REQUESTED, raising=False)
    yield


def pretend_module(available=True, count=2, **names):
    module = types.ModuleType("torch.pretended")
    vars(module).update(is_available=lambda: available, device_count=lambda: count, **names)
    return module


@pytest.fixture
def machine(monkeypatch):
    """A machine on which torch finds the accelerator ``found``, with ``module`` for every device type."""
    machine = types.SimpleNamespace(found=None, module=pretend_module())
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: torch.device(machine.found) if check_available and machine.found else None,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: machine.module)
    return machine


@pytest.mark.parametrize(
    ("requested", "found", "available", "chosen"),
    [
        (None, "xpu", True, "xpu"),
        ("", "xpu", True, "xpu"),
        (None, None, True, "sim"),
        ("cpu", "xpu", True, "cpu"),
        ("cuda", "xpu", True, "cuda"),
        ("cpu", None, False, "cpu"),  # the host is there, whatever its module says
    ],
)
def test_requested_device_precedes_the_machines_and_that_the_simulator(
    machine, monkeypatch, requested, found, available, chosen
):
    monkeypatch.setitem(sys.modules, "torch_ext.sim", types.ModuleType("torch_ext.sim"))
    machine.found, machine.module = found, pretend_module(available=available)
    if requested is not None:
        monkeypatch.setenv(REQUESTED, requested)
    assert accelerator.device_type() == chosen
    assert accelerator.is_accelerator() == (chosen != "cpu")


def test_without_a_simulator_the_host_is_used_with_a_message(machine, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch_ext.sim", None)  # its import fails
    assert accelerator.device_type() == accelerator.device_type() == "cpu"
    assert not accelerator.is_accelerator()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "tests run on plain cpu: " in lines[0] and "torch_ext.sim" in lines[0]
    assert re.search(r"[^.]\. Until then, tests that need an accelerator are skipped", lines[0])
    monkeypatch.setenv(REQUESTED, "cuda")
    machine.found = "cuda"
    assert accelerator.device_type() == "cpu", "the first answer holds"


def test_error_for_a_refused_device_names_torch_and_a_remedy(monkeypatch):
    monkeypatch.setenv(REQUESTED, "abacus")
    with pytest.raises(accelerator.UnknownDeviceError) as raised:
        accelerator.device_type()
    text = str(raised.value)
    assert text.startswith(
        f"got the device abacus (--device or {REQUESTED}): torch {torch.__version__} cannot provide this device ("
    )
    assert "device type" in text.partition("(")[2]  # the words of torch itself
    assert text.endswith("Ask for no device to let the machine decide, or install the device's package.")
    monkeypatch.setenv(REQUESTED, "cpu")
    assert accelerator.device_type() == "cpu"


def test_a_known_type_without_devices_is_refused(machine, monkeypatch):
    machine.module = pretend_module(available=False)
    monkeypatch.setenv(REQUESTED, "cuda")
    with pytest.raises(accelerator.UnknownDeviceError, match=r"^got the device cuda .* finds no such device on this"):
        accelerator.device_type()


def test_the_package_that_registers_a_device_is_imported_first(machine, monkeypatch):
    monkeypatch.setitem(accelerator._PROVIDERS, "xpu", "provider_of_xpu")
    monkeypatch.setitem(sys.modules, "provider_of_xpu", None)  # its import fails
    monkeypatch.setenv(REQUESTED, "xpu")
    with pytest.raises(accelerator.UnknownDeviceError, match="provider_of_xpu"):
        accelerator.device_type()
    monkeypatch.setitem(sys.modules, "provider_of_xpu", types.ModuleType("provider_of_xpu"))
    assert accelerator.device_type() == "xpu"


def choose(kind, monkeypatch):
    monkeypatch.setattr(accelerator, "_chosen", kind)


def test_host_is_one_device_over_gloo_that_cannot_sleep(monkeypatch):
    choose("cpu", monkeypatch)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: pytest.fail("there is no such device"))
    monkeypatch.setattr(torch.cpu, "request_devices", lambda count: pytest.fail("asked"), raising=False)
    accelerator.set_device_index(1)
    accelerator.request_devices(6)
    assert accelerator.device_module() is torch.cpu
    assert accelerator.device_count() == 1
    assert accelerator.backend() == "gloo"
    assert not accelerator.can_sleep()
    assert [accelerator.current_device(rank) for rank in (0, 3)] == [torch.device("cpu")] * 2


def test_ranks_take_devices_in_turn(machine, monkeypatch):
    choose("cuda", monkeypatch)
    assert (accelerator.device_count(), accelerator.backend()) == (2, "nccl")
    made_current = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", made_current.append)
    assert [accelerator.current_device(rank).index for rank in range(4)] == [0, 1, 0, 1]
    for rank in (1, 2):
        accelerator.set_device_index(rank)
    assert made_current == [1, 0]


@pytest.mark.parametrize(("names", "sleeps"), [({}, False), ({"_sleep": object}, True)])
def test_ability_to_sleep_comes_from_the_device_module(machine, monkeypatch, names, sleeps):
    choose("xpu", monkeypatch)
    machine.module = pretend_module(**names)
    assert accelerator.can_sleep() is sleeps


def test_devices_are_requested_from_modules_that_can_make_them(machine, monkeypatch):
    choose("xpu", monkeypatch)
    asked = []
    machine.module = pretend_module(count=8, request_devices=asked.append)
    accelerator.request_devices(6)
    assert asked == [6]
    assert accelerator.default_world_size() == 4  # the host serves all ranks
    machine.module = pretend_module(count=8)
    accelerator.request_devices(6)
    assert asked == [6]
    assert accelerator.default_world_size() == 8
