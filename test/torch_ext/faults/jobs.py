"""Programs of the shapes of reported hangs and losses, most with a mistake of their own. As in :mod:`.mistakes`, a
program is a function of its rank and the number of ranks, which is two; its docstring names the report, if one has it.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import rpc
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from test.torch_ext.faults.laboratory import DEVICE, DIED, checkpointed, finish, full, phase, shared_folder
from test.torch_ext.faults.mistakes import EACH, OTHERS, _loss, _model, _replicated, _sharded

_MANY = 1 << 22  # elements; fewer fit the buffers of a connection


def _store():
    return dist.distributed_c10d._get_default_store()


# Pipelines


def both_send_first(rank, size):
    """pytorch#172668: each stage sends before it receives, and no send is over before its receive."""
    got = full(numel=_MANY)
    dist.send(full(numel=_MANY), 1 - rank)
    dist.recv(got, 1 - rank)
    got.sum().item()


def warms_up_too_little(rank, size):
    """torchtitan#775: the last stage wants two micro-batches before a gradient, the first sends one."""
    if rank == 0:
        dist.send(full(), 1)
        dist.recv(gradient := full(), 1)
        gradient.sum().item()
        dist.send(full(), 1)
    else:
        batches = [full() for _ in range(2)]
        for each in batches:
            dist.recv(each, 0)
        sum(batches).sum().item()
        dist.send(full(), 0)


def crosses_its_transfers(rank, size):
    """pytorch#127332: a looped pipeline batches the next activation with a gradient that still needs one from it."""
    held = [full() for _ in range(2)]
    if rank == 0:  # stages 0 and 2
        batch = dist.P2POp(dist.isend, held[0], 1), dist.P2POp(dist.irecv, held[1], 1)
        for each in dist.batch_isend_irecv(list(batch)):
            each.wait()
        held[1].sum().item()
        dist.send(held[0], 1)
    else:  # stages 1 and 3
        for each in held:
            dist.recv(each, 0)
        held[1].sum().item()
        dist.send(held[1], 0)


def _schedule(rank, size, batches):
    torch.manual_seed(0)
    stage = PipelineStage(nn.Linear(8, 8).to(DEVICE), rank, size, torch.device(DEVICE))
    return Schedule1F1B(stage, batches, loss_fn=lambda output, target: (output - target).square().mean())


def _run(schedule, rank, samples=4):
    data = torch.ones(samples, 8, device=DEVICE)
    if rank == 0:
        schedule.step(data)
    else:
        schedule.step(target=data)


def scheduled(rank, size):
    """A step of 1F1B with four micro-batches."""
    _run(_schedule(rank, size, 4), rank)
    finish()
    dist.barrier()


def cuts_other_batches(rank, size):
    """Stages cut a batch into two and four micro-batches."""
    _run(_schedule(rank, size, 2 + 2 * rank), rank)
    finish()
    dist.barrier()


# Experts and micro-batches


def skips_an_empty_step(rank, size):
    """vllm#43547: a rank without tokens skips what coordinates a step, and is one call behind from then on."""
    for step in range(6):
        if rank == 1 and step == 2:
            continue  # no request is scheduled
        dist.all_reduce(full(), op=dist.ReduceOp.MAX)
        if step % 3 == 2:  # a layer of experts
            dist.reduce_scatter_tensor(full(), full(numel=4 * size))
    finish()


def counts_batches_alone(rank, size):
    """verl#5591: each rank cuts its own tokens into micro-batches, so that their numbers differ."""
    model = _sharded()
    for _ in range(-(-(300 + 200 * rank) // 200)):
        _loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    finish()


def reduces_what_it_has(rank, size):
    """Megatron-LM#1444: ranks reduce the statistics of their experts, and the first stage has none."""
    statistics = {"load balance": full()} if rank else {}
    for each in statistics.values():
        dist.all_reduce(each)
        each.sum().item()
    dist.barrier()


def splits_disagree(rank, size):
    """Ranks exchange tokens without telling each other how many."""
    sent, got = ([3, 1], [3, 2]) if rank == 0 else ([2, 2], [2, 2])
    dist.all_to_all_single(full(numel=sum(got)), full(numel=sum(sent)), got, sent)
    finish()


# Sharded and tensor-parallel models


def shards_are_uneven(rank, size):
    """pytorch#115310: a DTensor of local shards that are not those of its shape."""
    mesh = init_device_mesh(DEVICE, (size,))
    DTensor.from_local(full(numel=4 + rank), mesh, [Shard(0)]).full_tensor()
    finish()


class _Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 16)])

    def forward(self, batch):
        return self.experts[dist.get_rank()](batch)


def reaches_other_experts(rank, size):
    """pytorch#158719: a mixture in one FSDP group, whose ranks have gradients of different experts."""
    torch.manual_seed(0)
    fully_shard(mixture := _Mixture().to(DEVICE))
    mixture(torch.ones(2, 8, device=DEVICE)).sum().backward()
    finish()


def finds_nothing_to_redistribute(rank, size):
    """pytorch#172924: a rank skips a redistribution because it takes its placements for the wanted ones."""
    mesh = init_device_mesh(DEVICE, (size,))
    placed = DTensor.from_local(full(), mesh, [Replicate() if rank else Partial()], run_check=False)
    placed.redistribute(mesh, [Replicate()]).to_local().sum().item()
    dist.barrier()


def clips_if_its_loss_is_large(rank, size):
    """A rank clips gradients when its own loss asks for it, and the norm is a reduction."""
    model = _sharded()
    for _ in range(2):
        loss = _loss(model, 1.0 + 9 * rank)
        loss.backward()
        if loss.item() > 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    finish()


def tensor_parallel(rank, size):
    """Three steps of a tensor-parallel layer."""
    model = parallelize_module(
        _model(), init_device_mesh(DEVICE, (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    for _ in range(3):
        _loss(model).backward()
    finish()


def leaves_its_group(rank, size):
    """A rank destroys a group that its peer still uses."""
    group = dist.new_group(group_desc="tp")
    dist.all_reduce(full(), group=group)
    finish()
    if rank == 1:
        dist.destroy_process_group(group)
    else:
        dist.all_reduce(got := full(), group=group)
        got.sum().item()
    dist.barrier()


# Checkpoints


def loads_on_rank_0(rank, size):
    """pytorch#157781: to load a full state dict is a call of all ranks."""
    model, options = _sharded(), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if rank == 0:
        set_model_state_dict(model, _model().state_dict(), options=options)
    dist.barrier()


def checkpoints_on_rank_0(rank, size):
    """Only one rank saves a distributed checkpoint, and plans it with peers that are elsewhere."""
    folder = shared_folder(rank)
    if rank == 0:
        dcp.save(_sharded().state_dict(), checkpoint_id=folder)
    dist.barrier()


def gathers_states_it_has(rank, size):
    """Megatron-LM#4910: before a save, ranks describe their parts of each optimizer state, and one has no such part."""
    states = {"exp_avg": full()} if rank == 0 else {}
    for each in states.values():
        dist.all_gather_object([None] * size, tuple(each.shape))
    dist.all_reduce(step := full())
    step.sum().item()


def fails_before_its_barrier(rank, size):
    """Model-Optimizer#2166: what only rank 0 writes raises, while its peers are in the barrier after it."""
    folder = shared_folder(rank)
    if rank == 0:
        torch.save(_model().state_dict(), os.path.join(folder, "step_1", "model.pt"))
    dist.barrier()


def finds_another_newest(rank, size):
    """A rank does not see the newest checkpoint yet, and goes on from the one before."""
    folder = shared_folder(rank)
    for step in (1, 2) if rank == 0 else ():
        torch.save({"step": step}, os.path.join(folder, f"{step}.pt"))
    dist.barrier()
    seen = sorted(os.listdir(folder))[: 2 - rank]
    step = torch.load(os.path.join(folder, seen[-1]))["step"]
    dist.all_gather(held := [full() for _ in range(size)], full(float(step)))
    assert all(bool((each == step).all()) for each in held), "ranks go on from different steps"


def saves_to_a_path(rank, size):
    """Rank 0 saves the model by torch.save, and the others wait in a barrier."""
    folder = shared_folder(rank)
    with phase("save"):
        if rank == 0:
            torch.save(_model(64).state_dict(), os.path.join(folder, "model.pt"))
    dist.barrier()


# Data


class _Rows(Dataset):
    """Rows of a data set whose worker meets ``trouble`` at the third."""

    def __init__(self, trouble):
        self._trouble = trouble

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            self._trouble()
        return torch.ones(8)


def _reads(rank, trouble):
    model = _replicated()
    for batch in DataLoader(_Rows(trouble if rank == 1 else int), num_workers=1, timeout=2):
        model(batch.to(DEVICE)).sum().backward()
    finish()


def loses_a_worker(rank, size):
    """The kernel kills a data loader's worker that holds too much memory."""
    _reads(rank, lambda: time.sleep(0.3) or os.kill(os.getpid(), signal.SIGKILL))


class _Reset(ConnectionError):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGCHLD)
        return "Connection reset by peer"


def loses_a_worker_as_it_reads(rank, size):
    """The connection breaks first, and torch's handler of the worker's death raises while the error is reported."""
    signal.signal(signal.SIGCHLD, lambda *_: 1 // 0)
    if rank == 1:
        raise _Reset
    dist.barrier()


def waits_for_a_worker(rank, size):
    """A data loader's worker waits for a file system that never answers, and the loader has a limit."""
    _reads(rank, lambda: threading.Event().wait())


def waits_for_a_lock(rank, size):
    """A thread that logs holds a lock, and waits for what only the main thread could do."""
    held, done, lock = threading.Event(), threading.Event(), threading.Lock()

    def log():
        with lock:
            held.set()
            done.wait()

    if rank == 1:
        threading.Thread(target=log, daemon=True).start()
        held.wait()
        with lock:
            done.set()
    dist.all_reduce(got := full())
    got.sum().item()


# Stores, RPC, and the end


def counts_a_rank_too_many(rank, size):
    """A barrier of its own by a counter in the store, for a job that had a rank more."""
    if _store().add("arrived", 1) == size + 1:
        _store().set("all arrived", "")
    _store().wait(["all arrived"], timedelta(hours=1))


def _never():
    threading.Event().wait()


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _calls(rank, size, function):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{shared_folder(rank)}/rpc", _transports=["uv"], rpc_timeout=0
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        rpc.rpc_sync("worker1", function)
    rpc.shutdown()


def calls_what_never_returns(rank, size):
    """A remote call without a limit, of a function that waits for ever."""
    _calls(rank, size, _never)


def calls_what_dies(rank, size):
    """A remote call of a function that ends its process."""
    _calls(rank, size, _die)


def is_preempted(rank, size):
    """A cluster's manager asks a rank to end, and its handler of the signal ends it with success."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for step in range(4):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        dist.all_reduce(full())
        finish()


# Program, the fault if it holds none, and parts of the line of the report.
PROGRAMS = [
    (both_send_first, "", "deadlock on a GPU: this rank called send at ...jobs.py:...before recv, and rank "),
    (warms_up_too_little, "", f"{EACH}recv (jobs.py:...rank 1 in recv (jobs.py:"),
    (crosses_its_transfers, "", f"{EACH}recv (jobs.py:...rank 1 in recv (jobs.py:"),
    (scheduled, "rank 1: kill at send #2", DIED),
    (scheduled, "rank 0: hang at recv #2", "rank 0 kept rank 1 waiting in recv"),
    (cuts_other_batches, "", f"{EACH}barrier (jobs.py:...rank 1 in recv (jobs.py:"),
    (
        skips_an_empty_step,
        "",
        f"{OTHERS}_reduce_scatter_base(SUM)...jobs.py:...rank 1 called all_reduce(MAX)...jobs.py:",
    ),
    (counts_batches_alone, "", f"{OTHERS}all_reduce(SUM)...jobs.py:...rank 1 called _all_gather_base"),
    (reduces_what_it_has, "", f"{EACH}barrier (jobs.py:...rank 1 in all_reduce (jobs.py:"),
    (splits_disagree, "", f"{OTHERS}all_to_all of [3, 1, 3, 2]...jobs.py:...rank 1 called all_to_all of [2, 2, 2, 2]"),
    (shards_are_uneven, "", f"{OTHERS}all_gather_into_tensor_coalesced of [4, 4]...rank 1 called...of [5, 5]"),
    (
        reaches_other_experts,
        "",
        f"{OTHERS}_reduce_scatter_base(AVG) of [36, 36] x Float at jobs.py:...rank 1 called...of [72, 72] x Float",
    ),
    (finds_nothing_to_redistribute, "", f"{EACH}all_reduce (jobs.py:...rank 1 in barrier (jobs.py:"),
    (clips_if_its_loss_is_large, "", f"{OTHERS}_all_gather_base...rank 1 called all_reduce(SUM)...jobs.py:"),
    (tensor_parallel, "rank 1: kill at all_reduce #2", DIED),
    (leaves_its_group, "", "rank 1 destroyed the process group at jobs.py:...while rank 0 was in all_reduce (jobs.py:"),
    (loads_on_rank_0, "", f"{OTHERS}broadcast...jobs.py:...rank 1 called barrier() at jobs.py:"),
    (checkpoints_on_rank_0, "", f"{OTHERS}all_gather...jobs.py:...rank 1 called barrier() at jobs.py:"),
    (gathers_states_it_has, "", f"{EACH}all_gather (jobs.py:...rank 1 in all_reduce (jobs.py:"),
    (fails_before_its_barrier, "", "rank 0 raised RuntimeError at jobs.py:...step_1 does not exist"),
    (finds_another_newest, "", "ranks 0, 1 raised AssertionError at jobs.py:...go on from different steps"),
    (checkpointed, "rank 0: fill disk at phase save", "CheckpointException ranks:dict_keys([0])"),
    (saves_to_a_path, "rank 0: fill disk after 5000 at phase save", "rank 0 raised RuntimeError at jobs.py:"),
    (loses_a_worker, "", "rank 1 raised RuntimeError at jobs.py:...DataLoader worker (pid"),
    (loses_a_worker_as_it_reads, "", "rank 1 raised test.torch_ext.faults.jobs._Reset at jobs.py:...reset by peer"),
    (waits_for_a_worker, "", "rank 1 raised RuntimeError at jobs.py:...DataLoader timed out after 2 seconds"),
    (waits_for_a_lock, "", "rank 1 never called all_reduce, which rank 0 waited in (jobs.py:...it was at jobs.py:"),
    (counts_a_rank_too_many, "", "ranks 0, 1 hung at jobs.py:"),
    (
        calls_what_never_returns,
        "",
        "rank 1 kept rank 0 waiting in rpc_sync (jobs.py:...a function that an RPC had called was at jobs.py:",
    ),
    (calls_what_dies, "", "rank 1 was killed by SIGKILL at jobs.py:"),
    (is_preempted, "", "rank 1 exited with code 0 at jobs.py:...before its test was over"),
]
