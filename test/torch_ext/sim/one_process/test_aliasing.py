"""Tensors of a device and the host tensors that its kernels see share memory: in-place, views, resizing, moving."""

import torch
from torch import nn

SIM = torch.get_device_module("sim")


def test_in_place_view_and_out_write_the_device_memory():
    x = torch.zeros(2, 3, device="sim")
    x.t()[0].add_(1)
    assert x.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    out = torch.empty(0, device="sim")
    returned = torch.add(x, 1, out=out)
    assert returned is out and out.shape == (2, 3) and out.device == x.device
    one, two = x.view(6).split(3)
    assert two.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() == x.data_ptr()


def test_conjugate_and_negative_views_resolve_on_the_device():
    x = torch.tensor([1 + 2j, 3 - 1j], device="sim")
    assert x.conj().resolve_conj().tolist() == [1 - 2j, 3 + 1j]
    assert x.conj().imag.resolve_neg().tolist() == [-2.0, 1.0]
    assert x.conj().cpu().tolist() == [1 - 2j, 3 + 1j]
    assert torch.vdot(x, x).item() == 15
    # A kernel may leave its output lazily conjugated.
    a, b = torch.randn(3, 3, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    factors, pivots = torch.linalg.lu_factor(a)
    expected = torch.linalg.lu_solve(factors, pivots, b, left=False, adjoint=True)
    got = torch.linalg.lu_solve(factors.to("sim"), pivots.to("sim"), b.to("sim"), left=False, adjoint=True)
    assert expected.is_conj() and torch.equal(got.cpu(), expected)


def test_storage_resize_frees_and_brings_back():
    x = torch.ones(1000, device="sim")
    before = SIM.memory_allocated()
    x.untyped_storage().resize_(0)
    assert SIM.memory_allocated() == before - 4096
    x.untyped_storage().resize_(4000)
    assert SIM.memory_allocated() == before and x.fill_(2).sum().item() == 2000


def test_data_assignment_moves_a_parameter_between_device_and_host():
    parameter = nn.Parameter(torch.ones(3, device="sim"))
    parameter.data = parameter.data.cpu()
    assert parameter.device.type == "cpu"
    parameter.data = parameter.data.to("sim:1")
    assert parameter.device == torch.device("sim:1")
