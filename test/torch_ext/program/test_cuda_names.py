"""CUDA's names in training code, in programs that run with ``--cuda-as-sim``."""

import pytest

from test.torch_ext.program.commands import run

NAMES = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device(f"cuda:{rank}"))
x = torch.ones(4, 4).cuda()

# Automatic mixed precision, where torch means CUDA without saying so.
class OwnScaler(GradScaler):
    pass

assert isinstance(OwnScaler(), torch.cuda.amp.GradScaler) and OwnScaler().is_enabled()
assert ShardedGradScaler().is_enabled()
with autocast(dtype=torch.bfloat16) as context:
    assert isinstance(context, torch.cuda.amp.autocast) and torch.get_autocast_gpu_dtype() == torch.bfloat16
torch.set_autocast_gpu_dtype(torch.bfloat16)
assert torch.get_autocast_dtype("cuda") == torch.bfloat16

found = torch.cuda.get_device_properties("cuda")
assert (found.major, found.minor) == torch.cuda.get_device_capability()
assert found.warp_size == 32 and "Simulated" in found.name and torch.cuda._is_compiled()

# Submodules have names of their own.
torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=9)
torch.cuda.memory._dump_snapshot(f"snapshot{rank}.pickle")
torch.cuda.memory._record_memory_history(None)
assert torch.cuda.nccl.is_available([x]) and not torch.cuda.nccl.is_available([torch.ones(1)])
for call in (lambda: torch.cuda.jiterator._create_jit_fn('code')(x), torch.cuda.utilization):
    try:
        call()
    except NotImplementedError as error:
        assert "simulated accelerator" in str(error)
    else:
        raise AssertionError(call)

# Several devices in one process.
parallel = nn.DataParallel(nn.Linear(4, 2).cuda(), device_ids=[rank, 1 - rank])
plain = nn.Linear(4, 2).cuda()
plain.load_state_dict(parallel.module.state_dict())
rows = torch.arange(12.0).view(3, 4).cuda()
for model in (parallel, plain):
    model(rows).pow(2).sum().backward()
torch.testing.assert_close(parallel.module.weight.grad, plain.weight.grad)

# Groups.
assert dist.new_subgroups()[0].size() == 2
high = dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
dist.all_reduce(x, group=high)
assert x[0, 0].item() == 2.0

# A backend without a group.
meeting = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
own = dist.ProcessGroupNCCL(meeting, rank, 2, dist.ProcessGroupNCCL.Options())
mine, all_ranks = torch.full((1,), rank + 1.0).cuda(), torch.empty(2).cuda()
own._allgather_base(all_ranks, mine).wait()
own.allreduce(mine).wait()
assert all_ranks.tolist() == [1.0, 2.0] and mine.item() == 3.0
assert not hasattr(own, "comm_split_count") and not hasattr(own, "no_such_name")
try:
    own.comm_split_count()
except NotImplementedError as error:
    assert "ProcessGroupNCCL.comm_split_count: This calls NCCL itself" in str(error), error
else:
    raise AssertionError("comm_split_count")
dist.destroy_process_group()
"""

SPAWNING = """
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Job:
    device: str = "cuda"


def work(rank, job):
    assert torch.device("cuda").type == "cuda" and torch.ones(1).cuda().is_cuda
    x = torch.ones(2, device=f"{job.device}:{rank}")
    assert x.device.type == "cuda", x.device
    dist.init_process_group("nccl", init_method="file://" + FILE, rank=rank, world_size=2)
    dist.all_reduce(x)
    os.write(1, f"child {rank} {x.tolist()} {x.device}\\n".encode())  # in one piece
    dist.destroy_process_group()


FILE = os.path.abspath("meeting")

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (Job(),), nprocs=2)
"""


@pytest.mark.costly
def test_cuda_queries_of_training_code_are_answered(tmp_path):
    ended = run("-n 2 --cuda-as-sim --strict", NAMES, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    output = ended.stdout + ended.stderr
    assert "NCCL support" not in output and "CUDA is not available" not in output


@pytest.mark.costly
def test_children_that_are_spawned_use_the_simulated_device(tmp_path):
    ended = run("-n 1 --cuda-as-sim", SPAWNING, folder=tmp_path, TORCH_EXT_SIM_DEVICES="2")
    assert ended.returncode == 0, ended.stderr
    outputs = sorted(line.partition("child ")[2] for line in ended.stdout.splitlines() if "child " in line)
    assert outputs == ["0 [2.0, 2.0] cuda:0", "1 [2.0, 2.0] cuda:1"]
