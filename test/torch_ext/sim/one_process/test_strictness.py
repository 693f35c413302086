"""The simulated devices refuse what GPUs refuse, in the same words; naive aliasing would let it succeed."""

import pytest
import torch
from torch import nn

SIM = torch.get_device_module("sim")


MIXED_CALLS = {
    "mm with host": lambda device, host, other: torch.mm(device, host),
    "add with host": lambda device, host, other: device + host,
    "host in place": lambda device, host, other: host.add_(device),
    "cat over devices": lambda device, host, other: torch.cat([device, other]),
    "mm over devices": lambda device, host, other: torch.mm(device, other),
    "out on host": lambda device, host, other: torch.mul(device, device, out=torch.empty(3, 3)),
    "out on another device": lambda device, host, other: torch.mul(
        device, device, out=torch.empty(3, 3, device="sim:1")
    ),
    "host module": lambda device, host, other: nn.Linear(3, 3)(device),
    "host convolution": lambda device, host, other: nn.Conv2d(1, 1, 1)(device[None, None]),
    "host batch norm": lambda device, host, other: nn.BatchNorm1d(3)(device),
    "host embedding": lambda device, host, other: nn.Embedding(3, 3)(torch.tensor([0], device="sim")),
    "set_ over devices": lambda device, host, other: torch.empty(0, device="sim:1").set_(device),
    "sparse on host": lambda device, host, other: torch.mm(device.to_sparse(), host),
    "where": lambda device, host, other: torch.where(device > 0, device, host),
    "index on another device": lambda device, host, other: device[torch.tensor([0], device="sim:1")],
}


@pytest.mark.parametrize("name", MIXED_CALLS)
def test_mixed_devices_in_one_operator_are_an_error(name):
    device, host, other = (torch.ones(3, 3, device=where) for where in ("sim:0", "cpu", "sim:1"))
    with pytest.raises(RuntimeError, match="same device"):
        MIXED_CALLS[name](device, host, other)


def test_zero_dim_host_tensors_and_host_indices_are_accepted():
    x = torch.arange(6.0, device="sim").view(2, 3)
    assert (x + torch.tensor(1.0)).device == x.device
    assert x[torch.tensor([1])].tolist() == [[3.0, 4.0, 5.0]]
    x[torch.tensor([0])] = 7.0
    assert x[0].tolist() == [7.0, 7.0, 7.0]


def test_numpy_is_refused_and_cpu_copies():
    x = torch.ones(2, device="sim")
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        x.numpy()
    y = x.cpu()
    y.zero_()
    assert x.tolist() == [1.0, 1.0]


def test_device_index_out_of_range_is_an_error():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device=f"sim:{SIM.device_count()}")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        SIM.set_device(SIM.device_count())


def test_missing_operator_names_operator_and_device():
    with pytest.raises(NotImplementedError, match=r"aten::_cudnn_init_dropout_state.* sim:0"):
        torch.ops.aten._cudnn_init_dropout_state(0.5, True, 1, device="sim")
