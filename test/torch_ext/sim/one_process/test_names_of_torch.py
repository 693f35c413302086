"""Names and functions by which torch, and programs written for other devices, use an accelerator."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import DeviceType

SIM = torch.get_device_module("sim")


def test_device_guards_put_the_device_back():
    SIM.set_device(0)
    with SIM._DeviceGuard(1):
        assert SIM.current_device() == 1
    assert SIM.current_device() == 0
    assert SIM._exchange_device(1) == 0
    assert SIM._maybe_exchange_device(-1) == 1
    assert SIM._exchange_device(0) == 1


def test_eager_flex_attention_matches_the_hosts():
    from torch.nn.attention.flex_attention import flex_attention

    host = torch.randn(1, 2, 4, 8)
    device = host.to("sim").requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention warns that it is not compiled
        expected = flex_attention(host, host, host)
        result = flex_attention(device, device, device)
    torch.testing.assert_close(result.detach().cpu(), expected)
    result.sum().backward()
    assert device.grad is not None


@pytest.mark.skipif("LOCAL_RANK" in os.environ, reason="a launcher has chosen the device")
@pytest.mark.parametrize("requires_grad", [True, False])
def test_causal_attention_of_dtensors_matches_that_of_tensors(group, requires_grad):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.randn(2, 4, 8, 8, device="sim")
    sharded = distribute_tensor(whole, init_device_mesh("sim", (1,)), [Shard(1)]).requires_grad_(requires_grad)
    expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
    result = F.scaled_dot_product_attention(sharded, sharded, sharded, is_causal=True)
    torch.testing.assert_close(result.full_tensor().detach(), expected)
    assert result.placements == (Shard(1),)
    if requires_grad:
        result.sum().backward()
        assert sharded.grad is not None
    with pytest.raises(RuntimeError, match="mixed"):  # other operators refuse plain tensors as before
        sharded + whole


def test_profilers_see_collectives_with_their_shapes(group):
    tensor = torch.ones(3, 2, device="sim")
    with torch.profiler.profile(record_shapes=True) as profiler:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    seen = [event for event in profiler.events() if event.name == "simccl:all_reduce"]
    of_host, of_device = ([e for e in seen if (e.device_type == DeviceType.CPU) is host] for host in (True, False))
    assert [(event.is_async, event.input_shapes) for event in of_host] == [(True, [[3, 2]])] * 2 and len(of_device) == 2


def test_ddp_logs_times_of_the_device(group):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2, device="sim"), device_ids=[0])
    for _ in range(3):  # logging begins with the second
        model(torch.ones(1, 2, device="sim")).sum().backward()
    logged = model._get_ddp_logging_data()
    assert logged["avg_forward_compute_time"] > 0
    assert logged["avg_backward_compute_time"] > 0
