"""Programs of two ranks that train, with a wait missing around DDP, FSDP, DTensor or compiled code."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from test.torch_ext.sim.races.stage import SIM, pair, rows


def _linear(on):
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False).to(on.device)
    SIM.synchronize()
    return layer


def _local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _fsdp(layer):
    return FSDP(layer, device_id=SIM.current_device())


def _hybrid(layer):
    return fully_shard(layer, mesh=init_device_mesh("sim", (2, 1), mesh_dim_names=("replicate", "shard")))


# The last operation of a gradient in backward, and how the layer is wrapped.
GRADIENTS = {
    "gradient of DDP": (("copy_", None), DDP),
    "gradient of FSDP": (("_reduce_scatter_base", None), _fsdp),
    "gradient of fully_shard": (("_reduce_scatter_base", None), fully_shard),
    "gradient of hybrid fully_shard": (("all_reduce", None), _hybrid),
}
# The first operation of a parameter in forward.
PARAMETERS = {
    "parameter of FSDP": (("_all_gather_base", lambda model, x: model(x)), _fsdp),
    "parameter of fully_shard": (("copy_", lambda model, x: model(x)), fully_shard),
}


@rows(GRADIENTS, "earlier")
def read_on_the_side(on, fixed, wrap):
    model = wrap(_linear(on))
    model(on.tensor(4, 16)).sum().backward()
    if fixed:
        on.side.wait_stream(on.main)
    with on.on(on.side):
        _local(next(model.parameters()).grad).mul(3)  # later: mul


@rows(PARAMETERS, "later")
def written_on_the_side(on, fixed, call, wrap):
    model, x = wrap(_linear(on)), on.tensor(4, 16)
    with on.on(on.side), torch.no_grad():
        _local(next(model.parameters())).add_(1)  # earlier: add
    on.join(fixed)
    call(model, x)


@pair
def hook_of_ddp_that_does_not_wait(on, fixed):
    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)  # earlier: all_reduce
        if fixed:
            work.wait()
        done = torch.futures.Future()
        done.set_result(bucket.buffer().div_(2))  # later: div
        works.append(work)
        return done

    works = []
    model = DDP(_linear(on), gradient_as_bucket_view=True)
    model.register_comm_hook(None, hook)
    model(on.tensor(4, 16)).sum().backward()
    for work in works:
        work.wait()


@pair
def event_after_the_optimizer_recorded_before_it(on, fixed):
    model, x = fully_shard(_linear(on)), on.tensor(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    too_early = on.main.record_event()
    optimizer.step()  # earlier: add
    model.set_post_optim_event(on.main.record_event() if fixed else too_early)
    model(x)  # later: copy_


@pair
def unsharded_ahead_and_not_waited_for(on, fixed):
    model = fully_shard(_linear(on))
    handle = model.unshard(async_op=True)
    handle.wait()  # earlier: copy_
    if fixed:
        on.side.wait_stream(on.main)
    with on.on(on.side):
        next(model.parameters()).mul(3)  # later: mul


@pair
def offloaded_parameter_written_while_it_is_copied(on, fixed):
    layer = nn.Linear(16, 16, bias=False)
    model = fully_shard(layer, mesh=init_device_mesh("sim", (2,)), offload_policy=CPUOffloadPolicy())
    model(on.tensor(4, 16))  # earlier: copy_
    if fixed:
        SIM.synchronize()
    with torch.no_grad():
        model.reshard()
        _local(next(model.parameters())).add_(1)  # later: add_


@pair
def redistributed_and_read_raw(on, fixed):
    # As in pytorch#162749.
    mesh = init_device_mesh("sim", (2,))
    rows = DTensor.from_local(on.tensor(4, 4), mesh, [Shard(0)])
    everywhere = [Replicate()]
    whole = rows.redistribute(mesh, everywhere, async_op=True)  # earlier: all_gather_into_tensor_coalesced
    whole = whole.to_local()
    if fixed:
        whole.wait()
    whole.elem.mul(3)  # later: mul
    whole.wait()
