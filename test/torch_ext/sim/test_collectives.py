"""Features of ``simccl`` beyond the conformance suite (test_conformance.py), which tests its collectives by type,
reduction and size: gloo's bits, NCCL's scaled sums, lists of unequal sizes, and collectives in one call.
"""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional  # here, so that ranks need not load it

from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")
OPS = dist.ReduceOp


@ranks.world_of(2)
def test_unequal_sizes_of_types_that_gloo_lacks(rank, world_size):
    """Tensors travel as bytes, so sizes and splits change."""
    for dtype in (torch.bool, torch.complex64):
        rows = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]], dtype=dtype)
        listed = [torch.empty(r + 1, dtype=dtype, device="sim") for r in range(world_size)]
        dist.all_gather(listed, rows[rank][: rank + 1].to("sim"))
        assert [one.tolist() for one in listed] == [rows[r][: r + 1].tolist() for r in range(world_size)]
        splits = [1, 2] if rank == 0 else [2, 1]
        exchanged = torch.empty(3, 2, dtype=dtype, device="sim")
        dist.all_to_all_single(exchanged, torch.full((3, 2), rank, dtype=dtype, device="sim"), splits, splits)
        assert exchanged[:, 0].tolist() == [r for r, n in enumerate(splits) for _ in range(n)]
        if hasattr(dist, "gather_single"):  # torch 2.15
            whole = torch.empty(2, 4, dtype=dtype, device="sim")
            dist.gather_single(rows[rank].to("sim"), whole if rank == 0 else None, 0)
            assert rank != 0 or torch.equal(whole.cpu(), rows)


@ranks.world_of(2)
def test_types_and_reductions_that_nccl_lacks_are_refused(rank, world_size):
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        x = torch.empty(2, dtype=dtype, device="sim")
        for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0), lambda x: dist.send(x, 1 - rank)):
            with pytest.raises(TypeError, match="data type is not supported for NCCL process group: "):
                call(x)
    one, two = torch.ones(2, device="sim"), torch.ones(4, dtype=torch.float64, device="sim")
    with pytest.raises(TypeError, match="same type"):
        dist.all_gather_into_tensor(two, one)
    with pytest.raises(TypeError, match="same type"):
        dist.reduce_scatter_tensor(one, two)
    for name in ("BAND", "BOR", "BXOR"):
        with pytest.raises(ValueError, match=f"Cannot use ReduceOp.{name} with NCCL"):
            dist.all_reduce(torch.ones(1, device="sim", dtype=torch.int32), getattr(OPS, name))
    with pytest.raises(TypeError, match=r"Cannot use ReduceOp.AVG with boolean inputs"):
        dist.all_reduce(torch.ones(1, device="sim", dtype=torch.bool), OPS.AVG)
    with pytest.raises(TypeError, match="PreMulSum Data type"):
        dist.all_reduce(torch.ones(1, device="sim", dtype=torch.int32), dist._make_nccl_premul_sum(2.0))
    fnuz = torch.ones(1, device="sim", dtype=torch.float8_e4m3fnuz)
    with pytest.raises(RuntimeError, match="Unsupported Float8 type for NCCL reduction"):
        dist.all_reduce(fnuz)
    dist.broadcast(fnuz, 0)
    for call in (dist.broadcast, dist.reduce):
        with pytest.raises(dist.DistBackendError, match=r"invalid root 2 \(root should be in the 0..2 range\)"):
            call(torch.ones(1, device="sim"), 2)


@ranks.world_of(2)
def test_premultiplied_sum_scales_and_keeps_its_input(rank, world_size):
    for factor in (0.25, torch.tensor([0.25], device="sim")):
        op = dist._make_nccl_premul_sum(factor)
        x = torch.full((2,), float(rank + 1), device="sim")
        dist.all_reduce(x, op)
        assert x.tolist() == [0.75, 0.75]
        given = torch.full((4,), float(rank + 1), device="sim")
        part = torch.empty(2, device="sim")
        dist.reduce_scatter_tensor(part, given, op)
        assert part.tolist() == [0.75, 0.75] and given.tolist() == [float(rank + 1)] * 4


# Collectives whose tensors ProcessGroupNCCL hands to NCCL as they are, on one with other strides and on another.
IN_MEMORY_ORDER = {
    "all_reduce": lambda x, other: dist.all_reduce(x),
    "broadcast": lambda x, other: dist.broadcast(x, 0),
    "reduce": lambda x, other: dist.reduce(x, 0),
    "all_gather": lambda x, other: dist.all_gather([other, other.clone()], x),
    "all_gather_into_tensor": lambda x, other: dist.all_gather_into_tensor(other.new_empty(8, 4), x),
    "gather": lambda x, other: dist.gather(x, [other, other.clone()] if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda x, other: dist.reduce_scatter(x, [other, other]),
    "all_to_all": lambda x, other: dist.all_to_all([x, x], [other, other]),
    "all_to_all_single": lambda x, other: dist.all_to_all_single(other, x),
}


@ranks.world_of(2)
def test_strided_tensors_are_refused_or_copied_as_by_nccl(rank, world_size):
    whole = torch.arange(32.0, device="sim").view(4, 8) + 32 * rank
    transposed, holes = whole[:, :4].contiguous().t(), whole[:, ::2]
    for name, call in IN_MEMORY_ORDER.items():
        for strided in (transposed, holes):
            with pytest.raises(ValueError, match=r"contiguous.*, but got sizes \[4, 4\] with strides"):
                call(strided, torch.empty(4, 4, device="sim"))
                raise AssertionError(name)
    image = torch.full((2, 3, 4, 4), float(rank), device="sim").to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    assert (image == 1).all()
    # The tensors of a list are copied from and to one flat tensor.
    targets = [torch.zeros(4, 8, device="sim")[:, ::2], torch.zeros(4, 4, device="sim").t()]
    work = dist.all_gather(targets, holes.contiguous(), async_op=True)
    work.wait()
    assert all(torch.equal(one, holes + 32 * (r - rank)) for r, one in enumerate(targets))
    part = torch.empty(4, 4, device="sim")
    dist.reduce_scatter(part, [holes, transposed.contiguous().t().t()])
    both = [whole[:, ::2] + 32 * (r - rank) for r in range(2)] if rank == 0 else []
    assert rank == 1 or torch.equal(part, both[0] + both[1])
    dist.send(transposed, 1) if rank == 0 else dist.recv(transposed, 0)
    assert rank == 0 or torch.equal(transposed, whole[:, :4].t() - 32)
    with pytest.raises(NotImplementedError, match="ProcessGroupNCCL does not support recvAnysource"):
        dist.recv(part)
    with pytest.raises(RuntimeError, match="getDuration only works if timing was enabled"):
        work._get_duration()
    dist.group.WORLD._enable_collectives_timing()
    timed = dist.all_reduce(part, async_op=True)
    timed.wait()
    SIM.synchronize()
    assert 0 < timed._get_duration() < 60_000


def _values(rank, numel):
    return ((torch.arange(numel) + 3 * rank) % 4).float()


@ranks.world_of(2)
def test_coalesced_calls(rank, world_size):
    warnings.filterwarnings("ignore", ranks.COALESCED_WARNING, FutureWarning)
    every = [torch.stack([_values(r, n) for r in range(world_size)]) for n in (3, 4)]
    mine = [each[rank].to("sim") for each in every]
    group = dist.group.WORLD
    default = group._get_backend(torch.device("sim"))

    for op, divisor in ((OPS.SUM, 1), (OPS.AVG, world_size)):
        summed = [one.clone() for one in mine]
        dist.all_reduce_coalesced(summed, op)
        assert all(torch.equal(a.cpu(), b.sum(0) / divisor) for a, b in zip(summed, every, strict=True))
    lists = [[torch.empty_like(one) for one in mine] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, mine)
    for r, row in enumerate(lists):
        assert all(torch.equal(a.cpu(), b[r]) for a, b in zip(row, every, strict=True))

    sums = functional.all_reduce_coalesced(mine, "sum", group)
    assert all(torch.equal(a.cpu(), b.sum(0)) for a, b in zip(sums, every, strict=True))
    wholes = functional.all_gather_into_tensor_coalesced(mine, group)
    assert all(torch.equal(a.cpu(), b.flatten()) for a, b in zip(wholes, every, strict=True))
    parts = functional.reduce_scatter_tensor_coalesced(list(wholes), "sum", [0, 0], group)
    assert all(torch.equal(a.cpu(), world_size * b[rank]) for a, b in zip(parts, every, strict=True))

    together = [torch.empty_like(whole) for whole in wholes]
    with dist._coalescing_manager(device=torch.device("sim", rank)):
        for whole, one in zip(together, mine, strict=True):
            dist.all_gather_into_tensor(whole, one)
    scattered = [torch.empty_like(one) for one in mine]
    with dist._coalescing_manager(device=torch.device("sim", rank)):
        for part, whole in zip(scattered, together, strict=True):
            dist.reduce_scatter_tensor(part, whole)
    assert all(torch.equal(a, b) for a, b in zip([*together, *scattered], [*wholes, *parts], strict=True))

    copies = [one.clone() for one in mine]
    dist._broadcast_coalesced(group, copies, 1 << 20, 1)
    assert all(torch.equal(a.cpu(), b[1]) for a, b in zip(copies, every, strict=True))
    assert default.supports_coalescing and default.supports_splitting


# --- unequal sizes ---


@ranks.world_of(3)
def test_all_to_all_of_unequal_sizes(rank, world_size):
    def block(sender, receiver):
        return _values(sender, (sender + 2 * receiver) % 4)  # some are empty

    outputs = [torch.empty_like(block(r, rank), device="sim") for r in range(world_size)]
    dist.all_to_all(outputs, [block(rank, r).to("sim") for r in range(world_size)])
    for r, output in enumerate(outputs):
        assert torch.equal(output.cpu(), block(r, rank))


@ranks.world_of(2)
def test_gather_and_scatter_of_unequal_sizes_are_refused_at_the_root(rank, world_size):
    # NCCL refuses these too, at the root, which alone sees all sizes.
    unequal = [torch.ones(r + 1, device="sim") for r in range(world_size)]
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"invalid tensor size at index 1 \(expected \(1\), got \(2\)\)"):
            dist.gather(unequal[0], unequal, 0)
        with pytest.raises(RuntimeError, match=r"invalid tensor size at index 1 \(expected \(1\), got \(2\)\)"):
            dist.scatter(unequal[0].clone(), unequal, 0)
        store.set("seen", "yes")
    else:
        store.wait(["seen"])
    ranks.leave()


# --- point to point ---


@ranks.world_of(2)
def test_transfer_without_a_wait_completes(rank, world_size):
    received = torch.empty(1, device="sim")
    work = dist.irecv(received, 1, tag=7) if rank == 0 else None
    dist.barrier()
    assert work is None or not work.is_completed()
    dist.barrier()  # the receiver has polled before its peer sends
    if work is None:
        dist.send(torch.ones(1, device="sim"), 0, tag=7)
        return
    deadline = time.monotonic() + 20
    while not work.is_completed():  # polls alone: the state changes without a wait
        assert time.monotonic() < deadline
    assert work.is_success() and received.item() == 1


def _exchange(kind, rank, numel):
    """Swap a tensor of the rank's number with the peer, and return the one that came."""
    peer, mine, came = 1 - rank, torch.full((numel,), float(rank), device="sim"), torch.empty(numel, device="sim")
    if kind == "batched":
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, came, peer)]):
            work.wait()
        return came
    first = {"send": True, "recv": False, "in turn": rank == 0}[kind]
    works = [dist.isend(mine, peer) if is_send else dist.irecv(came, peer) for is_send in (first, not first)]
    for work in reversed(works):
        work.wait()
    return came


LARGE = (4 << 20) // 4 + 1  # elements: more than NCCL buffers


def _check_exchange(rank, world_size, kind, numel, error):
    _exchange("batched", rank, LARGE)
    for _ in range(2):  # an exchange before is none of this one's business
        _exchange("in turn", rank, LARGE)
        if not error:
            assert (_exchange(kind, rank, numel) == 1 - rank).all()
            continue
        with pytest.raises(RuntimeError, match=error.replace("PEER", str(1 - rank))):
            _exchange(kind, rank, numel)[0].item()


@pytest.mark.parametrize(
    ("kind", "numel", "error"),
    [
        ("send", LARGE, r"deadlock on a GPU: this rank called send at .*\d before recv, and rank PEER as well"),
        ("recv", 1, r"deadlock on a GPU: this rank called recv at .*\d before send, and rank PEER as well"),
        ("send", LARGE - 1, ""),
        ("in turn", LARGE, ""),
        ("batched", LARGE, ""),
    ],
    ids=["both send first", "both receive first", "both send little first", "in turn", "batched"],
)
def test_transfers_that_block_each_other_on_a_gpu_are_refused(transport, kind, numel, error, monkeypatch):
    ranks.run(2, _check_exchange, kind, numel, error)
    if error and transport == "shared":
        monkeypatch.setenv("TORCH_EXT_SIM_P2P", "buffered")
        ranks.run(2, _check_exchange, kind, numel, "")
