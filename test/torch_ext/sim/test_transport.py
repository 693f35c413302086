"""The transports of ``simccl``: how ranks choose one, the order of its operations, and a closed group's leftovers."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from test.torch_ext.sim import ranks
from test.torch_ext.sim.ranks import full, store
from torch_ext.sim import _native

SIM = torch.get_device_module("sim")
NUMBER_OF_SLOTS = 256  # kSlots in csrc/transport/segment.h


def _transport(group=None):
    backend = (group or c10d._get_default_group())._get_backend(torch.device("sim"))
    return backend.transport


# --- which one ---


@ranks.world_of(3)
def test_transport_is_shared_memory_unless_one_rank_cannot_share(rank, world_size):
    assert _transport() == "shared"
    if rank == 1:
        os.environ["TORCH_EXT_SIM_TRANSPORT"] = "gloo"  # emulates a rank on another machine
    group, x = dist.new_group(backend="simccl"), full()
    dist.all_reduce(x, group=group)
    assert _transport(group) == "gloo" and x.tolist() == [world_size] * 3


@ranks.world_of(2)
def test_differing_settings_of_ranks_are_reported(rank, world_size):
    os.environ["TORCH_EXT_SIM_REDUCE"] = "ring" if rank else "tree"
    with pytest.raises(ValueError, match=r"TORCH_EXT_SIM_REDUCE=(ring|tree), but rank . has TORCH_EXT_SIM_REDUCE="):
        dist.new_group(backend="simccl")
    ranks.leave()


# --- stream order ---


@ranks.world_of(2)
def test_inputs_are_read_at_launch_and_peers_need_no_wait(rank, world_size):
    mine, out = full(rank + 1.0), torch.zeros(3 * world_size, device="sim")
    x = full(rank + 1.0, 1 << 20)  # large enough that ranks share the work of reducing it
    works = [dist.all_gather_into_tensor(out, mine, async_op=True), dist.all_reduce(x, async_op=True)]
    mine.fill_(-1)
    if rank == 1:
        store().wait(["other is through"])  # rank 0 needs no more data from this rank
    for work in works:
        work.wait()
    assert x.eq(3.0).all().item() and out.tolist() == [1.0] * 3 + [2.0] * 3
    store().set("other is through", "")


# Operations of two ranks on a tensor and one of twice its size, and what rank 1 gets: a sum or elements of rank 0.
OPERATIONS = {
    "all_reduce": (lambda x, two: dist.all_reduce(x, async_op=True), 3.0),
    "broadcast": (lambda x, two: dist.broadcast(x, 0, async_op=True), 1.0),
    "reduce": (lambda x, two: dist.reduce(x, 1, async_op=True), 3.0),
    "all_gather": (lambda x, two: dist.all_gather_into_tensor(two, x, async_op=True), 1.0),
    "reduce_scatter": (lambda x, two: dist.reduce_scatter_tensor(x, two, async_op=True), 3.0),
    "all_to_all": (lambda x, two: dist.all_to_all_single(two, two.clone(), async_op=True), 1.0),
    "send": (lambda x, two: dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0), 1.0),
}


@ranks.world_of(2)
def test_memory_freed_after_a_wait_may_be_used_while_the_peer_is_late(rank, world_size, transport):
    assert _transport() == transport
    for name, (launch, expected) in OPERATIONS.items():
        x, two = full(rank + 1.0, 1 << 19), full(rank + 1.0, 1 << 20)
        if rank == 1:
            store().wait([f"{name} is freed"])
        launch(x, two).wait()
        if rank == 0:
            _native.set_poison(True)
            del x, two
            _native.set_poison(False)
            SIM.empty_cache()  # which must leave the memory that the operation writes to
            store().set(f"{name} is freed", "")
        else:
            got = two[: x.numel()] if name in ("all_gather", "all_to_all") else x
            assert (got == expected).all(), name
    SIM.synchronize()
    SIM.empty_cache()
    assert rank == 1 or SIM.memory_reserved() == 0


@ranks.world_of(2)
def test_more_collectives_under_way_than_there_are_slots_read_results_of_earlier_ones(rank, world_size):
    tensors = [full(float(i)) for i in range(NUMBER_OF_SLOTS)]
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3) for tensor in tensors]
    for work in works[-NUMBER_OF_SLOTS:]:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [8.0 * i for i in range(NUMBER_OF_SLOTS)]


# --- transfers ---


@ranks.world_of(2)
def test_messages_to_a_rank_itself_arrive_and_tags_change_no_order(rank, world_size):
    received, peer = full(0.0), 1 - rank
    backend = c10d._get_default_group()._get_backend(torch.device("sim"))
    backend.send([full(7.0)], rank, 0)
    backend.recv([received], rank, 0).wait()
    assert received.tolist() == [7.0] * 3
    for i in range(6):
        dist.send(full(float(i), 1), peer, tag=i % 2)
    received_in_turn = [full(0.0, 1) for _ in range(6)]
    for i, one in enumerate(received_in_turn):
        dist.recv(one, peer, tag=1 - i % 3)
    assert [one.item() for one in received_in_turn] == list(range(6))


# --- reductions ---


def _fold(rows):
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _check_order(rank, world_size, order, numel):
    rows = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    x = rows[rank].to("sim")
    dist.all_reduce(x)
    in_rank_order = _fold(rows)
    if order.startswith("random"):
        everyone = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(everyone, x)
        assert all(torch.equal(one, x) for one in everyone)
        assert torch.allclose(x.cpu(), in_rank_order, atol=1e-4)  # four numbers of about 1, in float32
        return
    parts = [row.tensor_split([numel * p // world_size for p in range(1, world_size)]) for row in rows]
    turns = [[(p + 1 + i) % world_size for i in range(world_size)] for p in range(world_size)]
    expected = {
        "rank": in_rank_order,
        "tree": (rows[0] + rows[1]) + (rows[2] + rows[3]),
        "ring": torch.cat([_fold([parts[r][p] for r in turns[p]]) for p in range(world_size)]),
    }
    assert torch.equal(x.cpu(), expected[order])
    assert [torch.equal(x.cpu(), each) for each in expected.values()].count(True) == 1  # the order can be seen


@pytest.mark.parametrize("numel", [1001, 1 << 18], ids=["each for itself", "shared out"])
@pytest.mark.parametrize("order", ["rank", "ring", "tree", "random:3"])
def test_reductions_use_the_requested_order(order, numel, monkeypatch):
    monkeypatch.setenv("TORCH_EXT_SIM_REDUCE", order)
    ranks.run(4, _check_order, order, numel)


# --- leftovers ---


@ranks.world_of(2)
def test_destroyed_groups_leave_neither_memory_nor_descriptors(rank, world_size):
    def own():
        files = len(os.listdir("/proc/self/fd"))
        return files, Path("/proc/self/maps").read_text().count("memfd:simccl")

    threads = len(os.listdir("/proc/self/task"))
    before = own()
    for _ in range(20):
        group = dist.new_group(backend="simccl")
        dist.all_reduce(full(numel=1 << 16), group=group)
        assert len(os.listdir("/proc/self/task")) == threads  # a group has no thread
        dist.destroy_process_group(group)
        del group
    assert own() == before
