"""Sparse tensors on the device: construction, parts, copies and computation, as on the host."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
_INDICES, _VALUES = ((0, 1, 1), (2, 0, 0)), (3.0, 4.0, 5.0)

# Torch warns once that its support of these layouts is not finished.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC)", "ignore:.*[Ss]parse invariant checks")


def _coo(device):
    return torch.sparse_coo_tensor(torch.tensor(_INDICES), torch.tensor(_VALUES), (2, 3), device=device)


def _csr(device):
    return torch.sparse_csr_tensor([0, 1, 2], [2, 0], [3.0, 9.0], (2, 3), device=device)


def _same(given, result):
    assert result is given
    return result


_CALLS = {
    "made of lists": lambda device: torch.sparse_coo_tensor(torch.tensor(_INDICES), list(_VALUES), device=device),
    "of given size": _coo,
    "empty": lambda device: torch.sparse_coo_tensor(torch.empty(2, 0), [], (2, 3), device=device),
    "without a value": lambda device: torch.empty(2, 3, layout=torch.sparse_coo, device=device),
    "coalesced": lambda device: _coo(device).coalesce(),
    "values": lambda device: _coo(device).coalesce().values(),
    "dense": lambda device: _coo(device).to_dense(),
    "scaled in place": lambda device: _same(x := _coo(device), x.mul_(2)),
    "added to dense": lambda device: _same(x := torch.ones(2, 3, device=device), x.add_(_coo(device))),
    "cleared": lambda device: _coo(device).zero_(),
    "cloned": lambda device: _coo(device).clone(),
    "product": lambda device: torch.sparse.mm(_coo(device), torch.ones(3, 2, device=device)),
    "transposed": lambda device: _coo(device).t(),
    "summed": lambda device: _coo(device).sum(),
    "product with a vector": lambda device: torch.mv(_coo(device), torch.ones(3, device=device)),
    "of another shape": lambda device: _coo(device).unsqueeze(0),
    "batched product": lambda device: torch.bmm(
        torch.stack([_coo(device), _coo(device)]), torch.ones(2, 3, 1, device=device)
    ),
    "compressed": _csr,
    "compressed, product": lambda device: _csr(device) @ torch.ones(3, 2, device=device),
    "compressed, product with a vector": lambda device: _csr(device) @ torch.ones(3, device=device),
    "compressed, product of two": lambda device: _csr(device) @ torch.eye(3, device=device).to_sparse_csr(),
    "compressed, product and sum": lambda device: torch.addmm(
        torch.ones(2, 2, device=device), _csr(device), torch.ones(3, 2, device=device)
    ),
    "compressed, sum": lambda device: _csr(device) + _csr(device),
    "compressed, scaled": lambda device: _csr(device) * 2,
    "compressed, sine": lambda device: _csr(device).sin(),
    "masked": lambda device: torch.ones(2, 3, device=device).sparse_mask(_coo(device).coalesce()),
}


@pytest.mark.parametrize("call", _CALLS)
def test_result_is_the_hosts_and_on_the_device(call):
    host, device = _CALLS[call]("cpu"), _CALLS[call]("sim")
    assert device.device == torch.device("sim:0") and device.layout == host.layout and device.shape == host.shape
    if host.layout == torch.sparse_coo:
        assert device.is_coalesced() == host.is_coalesced()
    torch.testing.assert_close(device.cpu(), host, rtol=0, atol=0)


@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
def test_moves_between_devices_and_back(layout):
    host = _coo("cpu").to_dense().to_sparse(layout=layout)
    there = host.to("sim:1")
    assert there.device == torch.device("sim:1") and there.values().device == torch.device("sim:1")
    torch.testing.assert_close(there.to("sim:0").cpu(), host, rtol=0, atol=0)


_BINARY = {
    "a + b": torch.add,
    "a + 3 b": lambda a, b: torch.add(a, b, alpha=3),
    "a += b": lambda a, b: a.add_(b),
    "a += 2 b": lambda a, b: a.add_(b, alpha=2),
    "out = a + b": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
    "a - b": torch.sub,
    "a - 2 b": lambda a, b: torch.sub(a, b, alpha=2),
    "a -= b": lambda a, b: a.sub_(b),
    "a * b": torch.mul,
    "a *= b": lambda a, b: a.mul_(b),
    "dense + b": lambda a, b: torch.add(a.to_dense(), b),
    "a and b in turn": lambda a, b: torch.cat([a, b]),
}


def _repeating(hybrid, seed):
    """Six values, or rows of two, at random places of nine: some places have several."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 3, (2, 6), generator=generator)
    values = torch.randint(1, 9, (6, 2) if hybrid else (6,), generator=generator).double()
    return torch.sparse_coo_tensor(indices, values, (3, 3, 2) if hybrid else (3, 3))


@pytest.mark.parametrize("call", _BINARY)
@pytest.mark.parametrize("hybrid", [False, True], ids=["scalars", "hybrid"])
def test_operators_on_two_sparse_tensors_match_the_host(call, hybrid):
    # The same entries, in the same order: which of them a sum of uncoalesced tensors joins is part of the result.
    for coalesced in ((False, False), (False, True), (True, False), (True, True)):
        pair = [_repeating(hybrid, seed) for seed in (1, 2)]
        pair = [each.coalesce() if done else each for each, done in zip(pair, coalesced, strict=True)]
        device = _BINARY[call](*(each.to("sim") for each in pair))
        host = _BINARY[call](*(each.clone() for each in pair))
        assert device.device.type == "sim" and device.layout == host.layout
        if host.layout == torch.strided:
            assert torch.equal(device.cpu(), host)
            continue
        assert device.is_coalesced() == host.is_coalesced()
        assert device._indices().tolist() == host._indices().tolist()
        assert device._values().tolist() == host._values().tolist()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients_train_as_on_the_host(optimizer, kind):
    trained = []
    for device in ("cpu", "sim"):
        torch.manual_seed(0)
        layer = kind(5, 3, sparse=True).to(device)
        steps = optimizer(layer.parameters(), lr=0.1)
        for _ in range(2):
            steps.zero_grad()
            layer(torch.tensor([[1, 2, 2]], device=device)).square().sum().backward()
            assert layer.weight.grad.is_sparse
            steps.step()
        trained.append(layer.weight.detach().cpu())
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)


@pytest.mark.parametrize("reduce", ("sum", "mean", "amax", "amin"))
def test_reduced_products_have_the_gradients_of_the_host(reduce):
    gradients = []
    for device in ("cpu", "sim"):
        dense = torch.arange(12.0, device=device).reshape(3, 4).requires_grad_()
        product = torch.sparse.mm(_csr(device), dense, reduce)
        gradients.append(torch.autograd.grad(product.square().sum(), [dense])[0].cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_future_holds_a_sparse_tensor():
    future = torch.futures.Future(devices=["sim:0"])
    future.set_result([_coo("sim").coalesce()])
    assert future.wait()[0].to_dense().sum().item() == 12


def test_collectives_of_sparse_tensors_are_refused():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(NotImplementedError, match=r"neither does simccl.*backend='gloo'"):
            dist.all_reduce(_coo("sim"))
        with pytest.raises(NotImplementedError, match=r"c10d::broadcast_' .* sparse layout on the device sim"):
            dist.broadcast(_coo("sim"), 0)
    finally:
        dist.destroy_process_group()
