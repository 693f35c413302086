"""Programs that hold a mistake of their own, of the shapes that hang or fail jobs, and the line that the report must
have. No fault is planted. A program is a function of its rank and the number of ranks, which is two.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from test.torch_ext.faults.laboratory import DEVICE, finish, full


def _model(size=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)).to(DEVICE)


def _sharded():
    model = _model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def _replicated(**options):
    return nn.parallel.DistributedDataParallel(_model(), **options)


def _loss(model, value=1.0):
    return model(torch.full((2, 8), value, device=DEVICE)).square().mean()


def evaluates_on_rank_0(rank, size):
    model = _sharded()
    if rank == 0:
        _loss(model).item()  # gathers parameters, for which the others are needed
    dist.barrier()


def saves_on_rank_0(rank, size):
    model = _sharded()
    if rank == 0:
        torch.save({name: each.full_tensor().cpu() for name, each in model.state_dict().items()}, "/dev/null")
    dist.barrier()


def stops_early(rank, size):
    model = _replicated()
    for step in range(4):
        if rank == 1 and step == 2:
            break  # its own loss was good enough
        _loss(model).backward()
    dist.barrier()


def has_another_batch(rank, size):
    model = _replicated()
    for _ in range(2 + rank):
        _loss(model).backward()
    finish()


def skips_a_bad_batch(rank, size):
    model = _sharded()
    for step in range(3):
        loss = _loss(model)
        if rank == 1 and step == 1:
            continue
        loss.backward()
    finish()


def shapes_differ(rank, size):
    dist.all_reduce(full(numel=4 + rank))


def types_differ(rank, size):
    dist.all_reduce(full().to(torch.float16 if rank else torch.float32))


def operations_differ(rank, size):
    dist.all_reduce(full(), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def roots_differ(rank, size):
    dist.broadcast(full(), src=rank)


def collectives_differ(rank, size):
    if rank == 0:
        dist.all_reduce(full())
    else:
        dist.broadcast(full(), src=0)


def groups_in_other_order(rank, size):
    one, other = (dist.new_group(group_desc=name) for name in ("dp", "tp"))
    for group in (one, other) if rank == 0 else (other, one):
        dist.all_reduce(full(), group=group)
    finish()


def makes_a_group_alone(rank, size):
    if rank == 0:
        dist.new_group([0, 1])
    dist.barrier()


def both_receive_first(rank, size):
    got = full()
    dist.recv(got, 1 - rank)
    got.sum().item()
    dist.send(got, 1 - rank)


def receives_once_more(rank, size):
    for _ in range(2 + rank):
        if rank == 0:
            dist.send(full(), 1)
        else:
            dist.recv(full(), 0)
    finish()


def waits_for_a_key(rank, size):
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["loaded 1"])
    dist.barrier()


def has_another_branch(rank, size):
    model = _replicated()
    for _ in range(2):
        hidden = model.module[0](torch.ones(2, 8, device=DEVICE)) if rank else model(torch.ones(2, 8, device=DEVICE))
        hidden.square().mean().backward()
    finish()


def accumulates_on_one_rank(rank, size):
    model = _replicated()
    with model.no_sync() if rank else contextlib.nullcontext():
        _loss(model).backward()
    finish()


def sends_what_has_no_pickle(rank, size):
    found = [None] * size
    dist.all_gather_object(found, (lambda: None) if rank else "fine")


def fails_to_load_data(rank, size):
    model = _sharded()
    for step in range(3):
        if rank == 1 and step == 1:
            raise OSError("shard 17 of the data is gone")
        _loss(model).backward()


def reads_on_one_rank(rank, size):
    total = full()
    if rank == 0:
        dist.all_reduce(total)
        print(total.sum().item())  # logs
    dist.barrier()


OTHERS = "ranks 0, 1 called different collectives: rank 0 called "
EACH = "ranks 0, 1 wait for each other: rank 0 in "
# Program, no fault, and parts of the line of the report.
PROGRAMS = [
    (evaluates_on_rank_0, "", f"{EACH}all_gather_into_tensor (mistakes.py:...rank 1 in barrier (mistakes.py:"),
    (saves_on_rank_0, "", f"{EACH}all_gather_into_tensor_coalesced (mistakes.py:...rank 1 in barrier (mistakes.py:"),
    (stops_early, "", f"{EACH}all_reduce...rank 1 in barrier (mistakes.py:"),
    (has_another_batch, "", "rank 0 kept rank 1 waiting in...; its test was over"),
    (skips_a_bad_batch, "", f"{OTHERS}_reduce_scatter_base(AVG)...mistakes.py:...rank 1 called _all_gather_base"),
    (shapes_differ, "", f"{OTHERS}all_reduce(SUM) of 4 x Float at mistakes.py:...rank 1 called all_reduce(SUM) of 5"),
    (types_differ, "", f"{OTHERS}all_reduce(SUM) of 4 x Float at mistakes.py:...of 4 x Half at mistakes.py:"),
    (operations_differ, "", f"{OTHERS}all_reduce(SUM)...rank 1 called all_reduce(MAX)"),
    (roots_differ, "", f"{OTHERS}broadcast...root 0 at mistakes.py:...root 1 at mistakes.py:"),
    (collectives_differ, "", f"{OTHERS}all_reduce(SUM)...rank 1 called broadcast"),
    (groups_in_other_order, "", f"{EACH}all_reduce (mistakes.py:...rank 1 in all_reduce (mistakes.py:"),
    (
        makes_a_group_alone,
        "",
        "rank 1 never called new_group, which rank 0 waited in (mistakes.py:...it was in barrier",
    ),
    (both_receive_first, "", f"{EACH}recv (mistakes.py:...rank 1 in recv (mistakes.py:"),
    (receives_once_more, "", "rank 0 destroyed the process group at...while rank 1 was in "),
    (waits_for_a_key, "", "rank 0 never called barrier, which rank 1 waited in (mistakes.py:...it was at mistakes.py:"),
    (has_another_branch, "", "rank 1 kept rank 0 waiting in...its test was over"),
    (accumulates_on_one_rank, "", "rank 1 kept rank 0 waiting in...its test was over"),
    (sends_what_has_no_pickle, "", "rank 1 raised AttributeError at mistakes.py:...pickle"),
    (fails_to_load_data, "", "rank 1 raised OSError at mistakes.py:...shard 17 of the data is gone"),
    (reads_on_one_rank, "", f"{EACH}all_reduce (mistakes.py:...rank 1 in barrier (mistakes.py:"),
]
