"""Times and volumes that one can work out by hand, to the nanosecond and the byte. In the model ``unit`` a byte takes a
nanosecond; ``_sleep`` stands for computing.
"""

import json
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from test.torch_ext.sim import ranks
from torch_ext.sim.clock import Step

SIM = torch.get_device_module("sim")
P = 4  # ranks, or stages of a pipeline


def links_of(folder, **constants):
    """Return a model of links: bytes per nanosecond, and nanoseconds of a collective and of each message."""
    path = folder / "links.json"
    sourced = {name: {"value": value, "source": "definition"} for name, value in constants.items()}
    path.write_text(json.dumps({"about": "", "validated": False, "constants": sourced}))
    return str(path)


@ranks.world_of(P)
def test_ring_all_reduce_sends_each_part_twice_to_the_next_rank(rank, world_size):
    x = torch.ones(1000, device="sim")
    with SIM.clock.measure("unit") as trace:
        dist.all_reduce(x)
    assert trace.time == trace.sent("all_reduce") == 2 * (P - 1) * x.nbytes // P
    assert trace.exposed("all_reduce") == trace.time


@ranks.world_of(P)
def test_collectives_take_a_latency_for_each_step_of_the_ring_and_the_bytes_at_the_rate(rank, world_size):
    """Alpha and beta: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH."""
    x = torch.ones(1000, device="sim")
    constants = {"link": 4, "collective": 1000, "message": 70}
    with tempfile.TemporaryDirectory() as folder, SIM.clock.measure(links_of(Path(folder), **constants)) as trace:
        dist.all_reduce(x)
    steps, nbytes = 2 * (P - 1), 2 * (P - 1) * x.nbytes // P
    assert trace.time == 1000 + steps * 70 + nbytes // 4


def _nanoseconds(model, call):
    with SIM.clock.measure(model) as trace:
        call()
    works = trace.select("collective") + trace.select("transfer")
    return sum(work.end - work.start for work in works)


@ranks.world_of(P)
def test_traffic_between_nodes_goes_through_their_adapters(rank, world_size):
    """Nodes of two ranks. A ring of all has two edges between nodes, and each of its bytes leaves a node through one of
    two adapters."""
    groups = {members: dist.new_group(members) for members in ((0, 1), (0, 2), (0, 1, 2))}
    constants = {"node": 2, "link": 4, "network": 1, "collective": 1000, "message": 70, "network_message": 500}
    x = torch.ones(300, device="sim")  # 1,200 bytes

    def all_reduce(members, near, far, ns):
        if rank in members:
            took = _nanoseconds(model, lambda: dist.all_reduce(x, group=groups.get(members)))
            assert took == 1000 + near * 70 + far * 500 + ns

    def all_to_all():
        dist.all_to_all_single(torch.empty(P * 100, device="sim"), torch.ones(P * 100, device="sim"))

    def gather():
        dist.gather(x, [torch.empty_like(x) for _ in range(P)] if rank == 1 else None, 1)

    def pass_on(source, to):
        if rank in (source, to):
            dist.send(x, to) if rank == source else dist.recv(x, source)

    with tempfile.TemporaryDirectory() as folder:
        model = links_of(Path(folder), **constants)
        all_reduce(tuple(range(P)), near=4, far=2, ns=2 * 900 // 2)
        all_reduce((0, 1), near=2, far=0, ns=1200 // 4)
        all_reduce((0, 2), near=0, far=2, ns=1200)  # one adapter a node
        all_reduce((0, 1, 2), near=2, far=2, ns=2 * 800)  # the smaller node has one
        assert _nanoseconds(model, all_to_all) == 1000 + 500 + 2 * 400  # 400 bytes through the link meanwhile
        assert _nanoseconds(model, gather) == 1000 + 500 + 2 * 1200
        assert _nanoseconds(model, lambda: pass_on(0, 1)) == (1000 + 70 + 1200 // 4 if rank < 2 else 0)
        assert _nanoseconds(model, lambda: pass_on(1, 2)) == (1000 + 500 + 1200 if rank in (1, 2) else 0)


@ranks.world_of(2)
def test_works_have_their_limits_in_virtual_time_where_that_is_asked(rank, world_size):
    group = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=600), group)
    x = torch.ones(10, device="sim")

    def be_late():
        SIM._sleep(0 if rank else 900 * 10**9)
        SIM.synchronize()

    def all_reduce():
        be_late()
        dist.all_reduce(x, group=group)

    def receive():
        be_late()
        dist.recv(x, 0, group=group) if rank else dist.send(x, 1, group=group)

    with SIM.clock.measure("unit"):
        all_reduce()
    late = (
        r"timed out in virtual time: rank 1 launched it 900001 ms before its end, rank 0 was ready last, .* 600000 ms"
    )
    with pytest.raises(dist.DistBackendError, match=late), SIM.clock.measure("unit", limits=True):
        all_reduce()
    expected = pytest.raises(dist.DistBackendError, match=late) if rank else nullcontext()
    with expected, SIM.clock.measure("unit", limits=True):
        receive()
    with SIM.clock.measure("unit"):
        all_reduce()


@ranks.world_of(2)
def test_collectives_that_nobody_waits_for_take_time_and_have_limits(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=600))
    x = torch.ones(10, device="sim")
    with SIM.clock.measure("unit") as trace:
        dist.all_reduce(x, group=group, async_op=True)
        SIM.current_stream().synchronize()
        assert SIM.clock.now_ns() == 0
        SIM.synchronize()
        assert SIM.clock.now_ns() == x.nbytes
        dist.all_reduce(x, group=group, async_op=True)
    assert trace.time == trace.exposed("all_reduce") == 2 * x.nbytes
    with pytest.raises(dist.DistBackendError, match="timed out in virtual time"):
        with SIM.clock.measure("unit", limits=True):
            SIM._sleep(0 if rank else 900 * 10**9)
            for late in (True, False):
                dist.all_reduce(x, group=group, async_op=True)
                SIM.synchronize() if late else None


@ranks.world_of(2)
def test_ranks_with_different_models_are_refused(rank, world_size):
    x = torch.ones(10, device="sim")
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "recv": lambda: dist.recv(x, 0) if rank else dist.send(x, 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        own = links_of(Path(folder), link=1 + rank)
        for models in (("unit", "h100-sxm"), (own, own)):
            for name, call in calls.items():
                unlike = (
                    r"different cost models: rank 0 by (unit|links \(.*\)), rank 1 by (h100-sxm|links \(.*\))\. Give"
                )
                expected = pytest.raises(dist.DistBackendError, match=unlike)
                with expected if rank or name == "all_reduce" else nullcontext(), SIM.clock.measure(models[rank]):
                    call()
    with SIM.clock.measure("unit"):
        calls["all_reduce"]()


@ranks.world_of(3)
def test_an_all_to_all_lasts_as_long_as_its_busiest_link(rank, world_size):
    """Ranks 1 and 2 send 40 bytes each to rank 0."""
    sent, received = [10 * (rank > 0), 0, 0], [0, *[10 * (rank == 0)] * 2]
    with SIM.clock.measure("unit") as trace:
        to, source = (torch.empty(sum(sizes), device="sim") for sizes in (received, sent))
        dist.all_to_all_single(to, source, received, sent)
    assert trace.time == trace.busy("all_to_all") == 80


@ranks.world_of(P)
def test_batches_count_what_they_send(rank, world_size):
    x = torch.ones(100, device="sim")
    others = [peer for peer in range(P) if peer != rank]
    sends = [dist.P2POp(dist.isend, x, peer) for peer in others]
    receives = [dist.P2POp(dist.irecv, torch.empty_like(x), peer) for peer in others]
    for transfers in (sends + receives, receives + sends):
        with SIM.clock.measure("unit") as trace:
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        assert trace.sent("send") == trace.sent("transfer") == len(others) * x.nbytes


@ranks.world_of(P)
def test_transfers_of_a_batch_are_launched_once(rank, world_size):
    sent, got = torch.ones(100, device="sim"), torch.empty(100, device="sim")
    transfers = [dist.P2POp(dist.isend, sent, (rank + 1) % P), dist.P2POp(dist.irecv, got, (rank - 1) % P)]
    with SIM.clock.measure("unit", launch_ns=10):
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        assert SIM.clock.now_ns() == 10


@ranks.world_of(P)
def test_critical_path_names_the_rank_that_is_late(rank, world_size):
    x = torch.ones(100, device="sim")
    with SIM.clock.measure("unit") as trace:
        SIM._sleep(1000 if rank == 2 else 10)
        dist.all_reduce(x)
    late = [Step("sleep", 1000)] if rank == 2 else [Step("sleep", 10), Step("rank 2", 990)]
    assert trace.critical_path() == [*late, Step("all_reduce", 600)]
    assert trace.select("all_reduce")[0].peer == 2


@ranks.world_of(P)
def test_every_collective_moves_the_bytes_of_its_algorithm(rank, world_size):
    def ones(parts=1):
        return torch.ones(100 * parts, device="sim")

    def lists():
        return [ones() for _ in range(P)]

    is_root = rank == 1
    calls = {
        "all_reduce": (lambda: dist.all_reduce(ones()), 600, 600),
        "all_gather": (lambda: dist.all_gather(lists(), ones()), 1200, 1200),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(ones(), ones(P)), 1200, 1200),
        "all_to_all": (lambda: dist.all_to_all(lists(), lists()), 1200, 1200),
        "broadcast": (lambda: dist.broadcast(ones(), 1), 400, 400),
        "reduce": (lambda: dist.reduce(ones(), 1), 400, 400),
        "gather": (lambda: dist.gather(ones(), lists() if is_root else None, 1), 1200, 1200 if is_root else 400),
        "scatter": (lambda: dist.scatter(ones(), lists() if is_root else None, 1), 1200, 1200 if is_root else 400),
    }
    calls["barrier"] = (lambda: dist.barrier(device_ids=[rank]), 0, 0)
    for name, (call, time, moved) in calls.items():
        assert SIM.clock.Trace().busy(name) == 0, "a question about an operation that did not occur"
        with SIM.clock.measure("unit") as trace:
            call()
        (work,) = trace.select("collective")
        assert (work.name, work.end - work.start, work.bytes) == (name, time, moved)


def train_forward(layers, compute_ns, is_prefetched):
    """Gather the weights of each layer and compute with them; prefetched: gather the next layer's meanwhile."""
    shards = [torch.ones(25, device="sim") for _ in range(layers)]
    wholes = [torch.empty(25 * dist.get_world_size(), device="sim") for _ in range(layers)]
    works = {}

    def gather(layer):
        works[layer] = dist.all_gather_into_tensor(wholes[layer], shards[layer], async_op=True)

    with SIM.clock.measure("unit") as trace:
        gather(0)
        for layer in range(layers):
            works.pop(layer).wait()
            if is_prefetched and layer + 1 < layers:
                gather(layer + 1)
            SIM._sleep(compute_ns)
            if not is_prefetched and layer + 1 < layers:
                gather(layer + 1)
    return trace


@ranks.world_of(P)
def test_prefetch_hides_all_gathers_behind_the_layers_before(rank, world_size):
    layers, gather_ns = 5, (P - 1) * 100
    for compute_ns in (1000, 300, 120):
        alone = train_forward(layers, compute_ns, is_prefetched=False)
        assert (alone.time, alone.exposed("all_gather")) == (layers * (compute_ns + gather_ns), layers * gather_ns)
        ahead = train_forward(layers, compute_ns, is_prefetched=True)
        exposed = gather_ns + (layers - 1) * max(0, gather_ns - compute_ns)
        assert (ahead.time, ahead.exposed("all_gather")) == (layers * compute_ns + exposed, exposed)
        assert ahead.overlap("all_gather", "kernel") == layers * gather_ns - exposed


class Layer(nn.Linear):
    def forward(self, x):
        SIM._sleep(100_000)
        return super().forward(x)


def model_of(layers, width):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width, width, bias=False, device="sim") for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@ranks.world_of(P)
def test_fsdp_moves_the_volume_of_zero_3(rank, world_size):
    layers, width = 3, 64
    model, x = model_of(layers, width), torch.ones(2, width, device="sim", requires_grad=True)
    with SIM.clock.measure("unit") as trace:
        model(x).sum().backward()
    weights = layers * width * width * 4
    assert trace.sent("all_gather") == 2 * weights * (P - 1) // P
    assert trace.sent("reduce_scatter") == weights * (P - 1) // P
    assert trace.sent("collective") == 3 * weights * (P - 1) // P


@ranks.world_of(P)
def test_gradient_accumulation_reduces_once(rank, world_size):
    layers, width, batches = 2, 32, 4
    model, x = model_of(layers, width), torch.ones(2, width, device="sim")
    assert isinstance(model, FSDPModule)
    with SIM.clock.measure("unit") as trace:
        for batch in range(batches):
            model.set_requires_gradient_sync(batch == batches - 1)
            model(x).sum().backward()
    weights = layers * width * width * 4
    assert trace.sent("reduce_scatter") == weights * (P - 1) // P
    assert len(trace.select("reduce_scatter")) == layers


@ranks.world_of(P)
def test_fsdp_exposes_the_first_all_gather_alone(rank, world_size):
    layers, width = 4, 64
    model, x = model_of(layers, width), torch.ones(2, width, device="sim")
    with SIM.clock.measure("unit") as trace:
        model(x)
    gather_ns = width * width * 4 * (P - 1) // P
    # Under the first all-gather runs one kernel, the copy of the second layer's shard.
    assert trace.exposed("all_gather") == gather_ns - 1
    assert trace.overlap("all_gather", "kernel") == (layers - 1) * gather_ns + 1


def run_pipeline(rank, order, forward_ns, backward_ns):
    """Run the steps of ``order``, pairs of "F" or "B" and a batch, of stage ``rank``."""
    x = torch.ones(1, device="sim")
    for what, _ in order:
        source, to = (rank - 1, rank + 1) if what == "F" else (rank + 1, rank - 1)
        if 0 <= source < P:
            dist.irecv(x, source).wait()
        SIM._sleep(forward_ns if what == "F" else backward_ns)
        if 0 <= to < P:
            dist.isend(x, to)


def gpipe(_rank, batches):
    return [("F", batch) for batch in range(batches)] + [("B", batch) for batch in range(batches)]


def one_forward_one_backward(rank, batches):
    warm = min(P - 1 - rank, batches)
    order = [("F", batch) for batch in range(warm)]
    for batch in range(batches - warm):
        order += [("F", warm + batch), ("B", batch)]
    return order + [("B", batch) for batch in range(batches - warm, batches)]


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@ranks.world_of(P)
def test_bubble_of_a_pipeline(rank, world_size, schedule):
    batches, forward_ns, backward_ns = 8, 100, 200
    with tempfile.TemporaryDirectory() as folder, SIM.clock.measure(links_of(Path(folder), link=1e30)) as trace:
        run_pipeline(rank, schedule(rank, batches), forward_ns, backward_ns)
        dist.barrier(device_ids=[rank])
    work = batches * (forward_ns + backward_ns)
    assert trace.busy("kernel") == work
    assert trace.idle(SIM.default_stream()) / work == (P - 1) / batches


@ranks.world_of(1)
def test_offload_is_as_slow_as_the_slower_of_copies_and_computing(rank, world_size):
    layers, floats = 5, 250
    host = [torch.ones(floats, pin_memory=True) for _ in range(layers)]
    device = [torch.empty(floats, device="sim") for _ in range(layers)]
    copies = SIM.Stream()
    for compute_ns in (400, 1000, 2500):
        with SIM.clock.measure("unit") as trace:
            for layer in range(layers):
                with SIM.stream(copies):
                    device[layer].copy_(host[layer], non_blocking=True)
                SIM.current_stream().wait_stream(copies)
                SIM._sleep(compute_ns)
        copy_ns = floats * 4
        assert trace.time == copy_ns + (layers - 1) * max(copy_ns, compute_ns) + compute_ns
        assert trace.exposed("copy") == copy_ns + (layers - 1) * max(0, copy_ns - compute_ns)
