"""Programs of two ranks that train: what a program must wait for around DDP, FSDP, DTensor and compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from test.torch_ext.sim.races.stage import SIM, Program, Stage, add, pair


def _linear(on: Stage) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False).to(on.device)
    SIM.synchronize()
    return layer


def _local(parameter: torch.Tensor | None) -> torch.Tensor:
    assert parameter is not None
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# How a layer is wrapped, the last operation of its gradient in backward, and the first of its parameter in forward.
WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], str, str]] = {
    "DDP": (lambda layer: DDP(layer), "copy_", ""),
    "FSDP": (lambda layer: FSDP(layer, device_id=SIM.current_device()), "_reduce_scatter_base", "_all_gather_base"),
    "fully_shard": (lambda layer: fully_shard(layer), "_reduce_scatter_base", "copy_"),
    "hybrid fully_shard": (lambda layer: fully_shard(layer, mesh=_replicas()), "all_reduce", ""),
}


def _replicas() -> Any:
    return init_device_mesh("sim", (2, 1), mesh_dim_names=("replicate", "shard"))


def _gradient_read(wrap: Callable[[nn.Module], nn.Module]) -> Program:
    def program(on: Stage, fixed: bool) -> None:
        model = wrap(_linear(on))
        model(on.tensor(4, 16)).sum().backward()
        if fixed:
            on.side.wait_stream(on.main)
        with on.on(on.side):
            _local(next(model.parameters()).grad).mul(3)  # later: mul

    return program


def _parameter_written(wrap: Callable[[nn.Module], nn.Module]) -> Program:
    def program(on: Stage, fixed: bool) -> None:
        model, x = wrap(_linear(on)), on.tensor(4, 16)
        with on.on(on.side), torch.no_grad():
            _local(next(model.parameters())).add_(1)  # earlier: add
        if fixed:
            on.main.wait_stream(on.side)
        _call(model, x)

    return program


_call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: model(x)  # noqa: E731 - a place of one line

for name, (wrap, in_backward, in_forward) in WRAPPED.items():
    add(_gradient_read(wrap), f"gradient of {name} read on the side", earlier=(in_backward, None))
    if in_forward:
        add(_parameter_written(wrap), f"parameter of {name} written on the side", later=(in_forward, _call))


@pair
def hook_of_ddp_that_does_not_wait(on: Stage, fixed: bool) -> None:
    def hook(state, bucket):  # type: ignore[no-untyped-def] - DDP refuses annotations that are strings
        work = dist.all_reduce(bucket.buffer(), async_op=True)  # earlier: all_reduce
        if fixed:
            work.wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().div_(2))  # later: div
        works.append(work)
        return done

    works: list[Any] = []
    model = DDP(_linear(on), gradient_as_bucket_view=True)
    model.register_comm_hook(None, hook)
    model(on.tensor(4, 16)).sum().backward()
    for work in works:
        work.wait()


@pair
def event_after_the_optimizer_recorded_before_it(on: Stage, fixed: bool) -> None:
    model, x = fully_shard(_linear(on)), on.tensor(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    too_early = on.main.record_event()
    optimizer.step()  # earlier: add
    model.set_post_optim_event(on.main.record_event() if fixed else too_early)
    model(x)  # later: copy_


@pair
def unsharded_ahead_and_not_waited_for(on: Stage, fixed: bool) -> None:
    model = fully_shard(_linear(on))
    handle = model.unshard(async_op=True)
    assert handle is not None
    handle.wait()  # earlier: copy_
    if fixed:
        on.side.wait_stream(on.main)
    with on.on(on.side):
        next(model.parameters()).mul(3)  # later: mul


@pair
def offloaded_parameter_written_while_it_is_copied(on: Stage, fixed: bool) -> None:
    layer = nn.Linear(16, 16, bias=False)
    model = fully_shard(layer, mesh=init_device_mesh("sim", (2,)), offload_policy=CPUOffloadPolicy())
    model(on.tensor(4, 16))  # earlier: copy_
    if fixed:
        SIM.synchronize()
    with torch.no_grad():
        model.reshard()
        _local(next(model.parameters())).add_(1)  # later: add_


@pair
def redistributed_and_read_raw(on: Stage, fixed: bool) -> None:
    # As in pytorch#162749.
    mesh = init_device_mesh("sim", (2,))
    rows = DTensor.from_local(on.tensor(4, 4), mesh, [Shard(0)])
    everywhere = [Replicate()]
    whole: Any = rows.redistribute(mesh, everywhere, async_op=True)  # earlier: all_gather_into_tensor_coalesced
    whole = whole.to_local()
    if fixed:
        whole.wait()
    whole.elem.mul(3)  # later: mul
    whole.wait()
