"""RPC with device maps: the device of tensors on arrival, both ways and in each kind of call, and the errors."""

import pytest
import torch
from torch.distributed import rpc

from test.torch_ext.sim import ranks

# Torch's own agent warns about the group that it makes.
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend")


def _join(rank, folder, maps, **more):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'store'}", rpc_timeout=60, **more)
    for to, map_ in maps.items():
        options.set_device_map(to, map_)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def _swap(x, y, where):
    assert (str(x.device), str(y.device)) == (where, "cpu")
    return (x * 2).view(2, 2).t(), y + 1, torch.full((3,), 7.0, device="sim:0")


@ranks.world_of(2)
def test_device_tensors_follow_the_map_and_results_its_reverse(rank, world_size, tmp_path):
    other = f"worker{1 - rank}"
    _join(rank, tmp_path, {other: {"sim:0": "sim:1", 1: 0}})
    x = torch.arange(4.0, device="sim:0", requires_grad=True)
    doubled, host, full = rpc.rpc_sync(other, _swap, (x.detach(), torch.zeros(2), "sim:1"))
    assert [str(each.device) for each in (doubled, host, full)] == ["sim:0", "cpu", "sim:1"]
    assert doubled.tolist() == [[0, 4], [2, 6]] and host.tolist() == [1, 1] and full.tolist() == [7, 7, 7]
    # An operator of torch, which no Python code pickles; a future; a value that stays with its owner; no tensor at all.
    added = rpc.rpc_async(other, torch.add, (x.detach(), 1)).wait()
    assert added.tolist() == [1, 2, 3, 4] and added.device == torch.device("sim:0")
    remote = rpc.remote(other, torch.mul, (x.detach(), 3))
    assert remote.to_here().tolist() == [0, 3, 6, 9] and remote.rpc_sync().add(1).device == torch.device("sim:0")
    assert rpc.rpc_sync(other, len, ("three",)) == 5
    with torch.distributed.autograd.context() as context:
        squared = rpc.rpc_sync(other, torch.mul, (x, x)).sum()
        torch.distributed.autograd.backward(context, [squared])
        gradient = torch.distributed.autograd.get_gradients(context)[x]
    assert gradient.tolist() == [0, 2, 4, 6] and gradient.device == torch.device("sim:0")
    rpc.shutdown()


def _on_host(x):
    assert x.device == torch.device("sim:1")
    return x + 1


@ranks.world_of(2)
def test_maps_of_one_side_and_devices_outside_them(rank, world_size, tmp_path):
    """Only rank 0 has a map, from the host, and lets its worker use a device that no map names."""
    _join(
        rank, tmp_path, {"worker1": {"cpu": "sim:1"}} if rank == 0 else {}, devices=["sim:1", "sim:2"] if rank else None
    )
    if rank == 0:
        answer = rpc.rpc_sync("worker1", _on_host, (torch.zeros(2),))
        assert answer.tolist() == [1, 1] and answer.is_cpu
        with pytest.raises(RuntimeError, match="Request device mapping is not available for destination worker1"):
            rpc.rpc_sync("worker1", _on_host, (torch.zeros(2, device="sim:0"),))
        with pytest.raises(RuntimeError, match="Response device mapping is not available for destination worker0 for"):
            rpc.rpc_sync("worker1", torch.ones, ((2,),), kwargs={"device": torch.device("sim:2")})
    else:
        with pytest.raises(RuntimeError, match=r"only supports CPU tensors by default.*set_device_map"):
            rpc.rpc_sync("worker0", torch.neg, (torch.zeros(2, device="sim:0"),))
    rpc.shutdown()


@ranks.world_of(2)
def test_device_that_does_not_exist_is_refused_on_every_rank(rank, world_size, tmp_path):
    other = f"worker{1 - rank}"
    with pytest.raises(ValueError, match="has target devices with invalid indices in its device map"):
        _join(rank, tmp_path, {other: {"sim:0": f"sim:{torch.get_device_module('sim').device_count()}"}})


def test_group_of_no_fixed_size_is_refused(tmp_path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path / 'store'}", devices=["sim:0"])
    with pytest.raises(ValueError, match="device maps for 'sim' need a group of fixed size: pass world_size"):
        rpc.init_rpc("worker0", rank=0, rpc_backend_options=options)


def test_devices_of_other_kinds_are_refused_as_by_torch():
    with pytest.raises(ValueError, match="expect a list of CUDA devices, but got device type cpu"):
        rpc.TensorPipeRpcBackendOptions(devices=["cpu"])


class Held:
    def __init__(self):
        self.event, self.tensor = torch.get_device_module("sim").Event(), torch.ones(2, device="sim")


def test_future_holds_an_event_beside_its_tensors():
    future = torch.futures.Future(devices=["sim:0"])
    future.set_result(Held())
    assert future.wait().tensor.sum().item() == 2
