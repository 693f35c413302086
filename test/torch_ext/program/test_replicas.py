"""``run --check-replicas`` names the first replica whose bits differ between ranks, and nothing in programs that are
right."""

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test.torch_ext.program.commands import run
from torch_ext.replicas import compare, replicated

PROGRAM = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, empty
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_ext.replicas import replicated

fault = sys.argv[1]
dist.init_process_group()
torch.sim.set_device(rank := dist.get_rank())
device = torch.device("sim", rank)
torch.manual_seed(0)
mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))

def train(model, step, *, spoil=lambda number: None):
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for number in (1, 2, 3):
        step(number)
        spoil(number)
        optimizer.step()
        optimizer.zero_grad()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())

def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

def replica(tensor, mesh):
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

# DDP: a step without synchronization
ddp = nn.parallel.DistributedDataParallel(Net().to(device), device_ids=[rank])
def ddp_step(number):
    x = torch.randn(4, 8, device=device) + rank
    if fault == "ddp" and number == 2:
        with ddp.no_sync():
            ddp(x).sum().backward()
    else:
        ddp(x).sum().backward()
train(ddp, ddp_step)

# HSDP: one bit on one rank
hsdp = Net().to(device)
for part in (hsdp.up, hsdp.down, hsdp):
    fully_shard(part, mesh=mesh)
def flip(number):
    if fault == "hsdp" and (number, rank) == (3, 3):
        local(hsdp.up.weight.grad)[0, 0].add_(1e-6)
train(hsdp, lambda number: (hsdp(torch.randn(4, 8, device=device) + rank).sum().backward(),
                            nn.utils.clip_grad_norm_(hsdp.parameters(), 1.0)), spoil=flip)

# Tensor parallel: a norm whose gradient nobody reduces
tp = Net().to(device)
inner = mesh["shard"]
parallelize_module(tp, inner, {"up": ColwiseParallel(), "down": RowwiseParallel()})
for name in ("weight", "bias"):
    setattr(tp.norm, name, nn.Parameter(distribute_tensor(getattr(tp.norm, name).detach(), inner, [Replicate()])))
if fault == "tp":
    tp.norm.weight.register_hook(lambda gradient: replica(gradient.to_local() * (1 + rank % 2), inner))
def tp_step(number):
    x = replica(torch.arange(32.0, device=device).sin().view(4, 8), inner)
    local(tp(x)).pow(2).sum().backward()
train(tp, tp_step)

# An operation on a DTensor, and memory that nobody has written
value = replica(torch.full((2,), 1.0 + (fault == "operation" and rank == 2), device=device), mesh["replicate"])
value * 2
local(empty(3, device_mesh=inner)).fill_(rank)

# A plain tensor that the program declares
weight = replicated(nn.Parameter(torch.ones(8, device=device)), name="the scale")
optimizer = torch.optim.SGD([weight], 0.1)
weight.grad = torch.full((8,), 1.0 + (fault == "plain" and rank == 1), device=device)
optimizer.step()

# FSDP1: shards of two nodes, one of which misses a gradient
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
hybrid = FSDP(Net().to(device), (pairs[0][rank // 2], pairs[1][rank % 2]), ShardingStrategy.HYBRID_SHARD,
              device_id=device, use_orig_params=False)
def skip(number):
    if fault == "hybrid" and (number, rank) == (2, 2):
        hybrid._fsdp_wrapped_module._flat_param.grad.zero_()
train(hybrid, lambda number: hybrid(torch.randn(4, 8, device=device) + rank).sum().backward(), spoil=skip)
if fault == "raised":
    replicated(torch.tensor(float(rank)), name="the seed")
    raise RuntimeError("ends")

torch.compile(nn.Linear(4, 4).to(device), backend="eager")(torch.ones(2, 4, device=device))
"""


@pytest.mark.costly
@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("none", ""),
        ("ddp", "ranks 0-3 differ, first in the gradient of module.norm.weight before step 2 (program.py:"),
        ("hsdp", "ranks 1, 3 differ, first in the gradient of up.weight before step 6 (program.py:"),
        ("tp", "ranks 0, 1 differ, first in the gradient of norm.weight before step 7 (program.py:"),
        ("operation", "ranks 0, 2 differ, first in the result of aten.mul.Tensor (program.py:"),
        ("plain", "ranks 0-3 differ, first in the gradient of the scale before step 10 (program.py:"),
        (
            "hybrid",
            "ranks 0, 2 differ, first in the gradient of _fsdp_wrapped_module._flat_param before step 12 (program.py:",
        ),
        ("raised", "ranks 0-3 differ, first in the seed (program.py:"),
    ],
)
def test_the_first_difference_is_named(fault, said, tmp_path):
    ended = run("-n 4 --check-replicas", PROGRAM, fault, folder=tmp_path)
    assert ended.returncode == int(bool(said)), ended.stderr
    last = ended.stderr.strip().splitlines()[-1:] or [""]
    assert said in last[0], ended.stderr
    assert bool(ended.stderr) == bool(said), "no warning either"
    if fault == "hsdp":
        assert ": rank 1 against rank 3; " in last[0]


def test_a_declaration_costs_nothing_without_the_option():
    tensor = object()
    assert replicated(tensor) is tensor


@settings(max_examples=60)
@given(st.data())
def test_the_comparison_equals_one_by_hand(tmp_path_factory, data):
    """Against a search through all pairs of ranks, in the order of the lowest rank that has the record."""
    folder = tmp_path_factory.mktemp("files")
    size = data.draw(st.integers(2, 4))
    names = data.draw(st.lists(st.sampled_from("abc"), max_size=6))
    program = [(name, [0, 1] if name == "a" else list(range(size))) for name in names]
    wrong = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, size - 1)), max_size=3))
    ends = [data.draw(st.integers(0, len(program))) if data.draw(st.booleans()) else len(program) for _ in range(size)]
    held = [
        {n: f"{n, rank}" if (n, rank) in wrong else str(n) for n in range(ends[rank]) if rank in program[n][1]}
        for rank in range(size)
    ]
    for rank in range(size):
        lines = [json.dumps([*program[n], digest, f"p.py:{n}"]) for n, digest in held[rank].items()]
        (folder / str(rank)).write_text("".join(f"{line}\n" for line in lines))
    bits = defaultdict(set)
    for by_number in held:
        for n, digest in by_number.items():
            bits[n].add(digest)
    differing = [n for rank in range(size) for n in held[rank] if len(bits[n]) > 1]
    text = compare(folder / str(rank) for rank in range(size))
    assert bool(text) == bool(differing)
    if differing:
        assert f"first in {program[differing[0]][0]} (p.py:{differing[0]})" in text
        later = len(set(differing)) - 1
        assert (f"; {later} later one" in text) == (later > 0)
