"""Groups of gloo and fake groups with ``sim`` tensors. The threaded group is in test_conformance.py."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from test.torch_ext.sim import ranks
from test.torch_ext.sim.ranks import full, store

SIM = torch.get_device_module("sim")


# --- gloo ---


def _check_gloo(rank, world_size, config):
    assert dist.get_backend() == "gloo" or ":" in config
    assert str(dist.get_backend_config()) == (config if ":" in config else "cpu:gloo,cuda:gloo")
    x, parts = full(rank + 1.0), [full() for _ in range(world_size)]
    dist.all_reduce(x)
    dist.all_gather(parts, x * (rank + 1))
    assert x.tolist() == [3.0] * 3 and [part[0].item() for part in parts] == [3.0, 6.0]
    dist.send(full(5.0), 1) if rank == 0 else dist.recv(x, 0)
    assert rank == 0 or x.tolist() == [5.0] * 3
    bits = torch.tensor([1 << rank, 3], device="sim")
    dist.all_reduce(bits, dist.ReduceOp.BOR)  # which NCCL lacks
    assert bits.tolist() == [3, 3]
    assert functional.all_reduce(full(), "sum", dist.group.WORLD).tolist() == [2.0] * 3
    mesh = init_device_mesh("sim", (world_size,), mesh_dim_names=("dp",))
    assert functional.all_reduce(full(), "sum", mesh.get_group()).tolist() == [2.0] * 3
    if "cpu" in str(dist.get_backend_config()):
        host = torch.ones(3)
        dist.all_reduce(host)
        dist.monitored_barrier(dist.new_group(backend="gloo"))
        assert host.tolist() == [2.0] * 3
    else:
        with pytest.raises(NotImplementedError, match=r"NCCL does not support all_reduce with sparse tensors, .*gloo"):
            dist.all_reduce(torch.eye(2, device="sim").to_sparse())


@pytest.mark.parametrize("config", ["gloo", "sim:gloo", "cpu:gloo,sim:gloo"])
def test_group_of_gloo_serves_device_tensors(config):
    ranks.run(2, _check_gloo, config, backend=config)


@ranks.world_of(2, backend="gloo")
def test_detail_mode_finds_a_device_call_against_a_host_call(rank, world_size):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend="gloo")
    with pytest.raises(RuntimeError, match=r"Detected mismatch(.|\n)*OpType=(REDUCE|BARRIER)"):
        if rank == 0:
            dist.reduce(full(), 0, group=group)
        else:
            group._get_backend(torch.device("cpu")).barrier().wait()
    ranks.leave()


def _own_gloo(rank, world_size, name):
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store()), rank, world_size, timeout=ranks.GROUP_TIMEOUT)


@ranks.world_of(2, backend="cpu:gloo")
def test_own_backend_of_gloo_serves_device_tensors(rank, world_size):
    gloo = _own_gloo(rank, world_size, "own")
    x, host, parts = full(rank + 1.0), torch.full((3,), rank + 1.0), [[full() for _ in range(world_size)]]
    gloo.allreduce([x]).wait()
    gloo.allreduce(host).wait()
    gloo.allgather(parts, [x * (rank + 1)]).wait()
    assert x.tolist() == host.tolist() == [3.0] * 3 and [part[0].item() for part in parts[0]] == [3.0, 6.0]
    gloo.barrier().wait()
    options = dist.ReduceOptions()
    options.rootRank = 1
    future = gloo.reduce([x], options).get_future()
    assert future.wait()[0].device.type == "sim" and (rank == 0 or x.tolist() == [6.0] * 3)
    if rank == 0:
        gloo.send([full(5.0)], 1, 0).wait()
    else:
        gloo.recv([x], 0, 0).wait()
        assert x.tolist() == [5.0] * 3
    sparse = torch.tensor([rank == 0, rank == 1, True]).float().to_sparse().to("sim")
    reduced = gloo.allreduce([sparse]).get_future().wait()[0]
    assert reduced.is_sparse and reduced.to_dense().tolist() == [1.0, 1.0, 2.0]
    gloo.allreduce(sparse).wait()
    gloo.allreduce(tensor=sparse).wait()
    assert sparse.to_dense().tolist() == [4.0, 4.0, 8.0]
    with pytest.raises(RuntimeError, match="unsupported device type meta"):
        gloo.allreduce([torch.ones(3, device="meta")])


@ranks.world_of(2, backend="cpu:gloo")
def test_wrapper_around_an_own_backend_compares_calls_of_both_halves(rank, world_size):
    gloo = _own_gloo(rank, world_size, "own")
    meeting = dist.PrefixStore("wrapper", store())
    wrapper = dist.distributed_c10d._create_process_group_wrapper(gloo, "own", meeting, rank, world_size)
    del gloo
    x, host = full(rank + 1.0), torch.ones(3)
    works = [wrapper.allreduce([x]) for _ in range(3)]
    for work in works:
        work.wait()
    wrapper.allreduce([host]).wait()
    assert x.tolist() == [12.0] * 3 and host.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match=r"Detected mismatch(.|\n)*OpType=(REDUCE|ALLREDUCE)"):
        if rank == 0:
            wrapper.allreduce([host])
        else:
            wrapper.reduce([x])
    ranks.leave()


@ranks.world_of(2, backend="gloo")
def test_group_of_gloo_reduces_sparse_gradients(rank, world_size):
    x = torch.tensor([rank == 0, rank == 1, True, False]).float().to_sparse().to("sim")
    dist.all_reduce(x)
    assert x.is_sparse and x.to_dense().tolist() == [1.0, 1.0, 2.0, 0.0]
    dist.all_reduce(x, async_op=True).wait()
    assert x.to_dense().tolist() == [2.0, 2.0, 4.0, 0.0]
    weight = torch.nn.Embedding(4, 2, sparse=True, device="sim", _weight=torch.ones(4, 2, device="sim"))
    model = torch.nn.parallel.DistributedDataParallel(weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([rank, 2], device="sim")).sum().backward()
        optimizer.step()
    gradient = weight.weight.grad
    assert gradient.is_sparse
    assert gradient.to_dense()[:, 0].tolist() == [0.5, 0.5, 1.0, 0.0]
    assert weight.weight[:, 0].tolist() == [0.0, 0.0, -1.0, 1.0]


@pytest.mark.usefixtures("transport")
@ranks.world_of(2, backend="gloo")
def test_ranks_of_gloo_may_use_one_device(rank, world_size):
    SIM.set_device(0)
    x = full()
    dist.all_reduce(x)
    assert x.device == torch.device("sim", 0) and x.tolist() == [2.0] * 3


@ranks.world_of(2, backend="cpu:gloo")
def test_group_of_gloo_for_the_host_alone_refuses_device_tensors(rank, world_size):
    with pytest.raises(RuntimeError, match="No backend type associated with device type sim"):
        dist.all_reduce(full())


# --- the fake group ---


@ranks.world_of(1)
def test_fake_group_takes_device_tensors(rank, world_size):
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    x, whole = full(), full(numel=12)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(x, whole)
    dist.broadcast(x, 0)
    dist.all_to_all_single(full(numel=4), full(numel=4))
    dist.barrier()
    half = dist.new_group([0, 1])
    dist.all_reduce(x, group=half)
    assert x.shape == (3,)  # fakes say nothing of values
    model = torch.nn.Linear(4, 4, device="sim")
    fully_shard(model, mesh=init_device_mesh("sim", (4,)))
    model(torch.ones(2, 4, device="sim")).sum().backward()
    assert model.weight.grad.to_local().shape == (1, 4)
    assert dist.Backend.default_device_backend_map["sim"] == "simccl"
