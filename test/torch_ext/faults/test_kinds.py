"""Each kind of fault happens at its point, in the ranks of a program."""

import json

import pytest
import torch

from test.torch_ext.program.commands import run

# A step has a forward, a backward, an all_reduce of ones and a transfer; rank 1 prints what it has received.
PROGRAM = """
import json, sys, torch, torch.distributed as dist
from torch_ext.testing._internal.fault_plan import phase
dist.init_process_group()
rank, device = dist.get_rank(), sys.argv[1]
if device == "sim":
    torch.sim.set_device(rank)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
got = []
for step in range(3):
    net(torch.ones(2, 4, device=device)).sum().backward()
    with phase("update"):
        optimizer.step()
    x, y = torch.ones(2, device=device), torch.full((2,), step + 1.0, device=device)
    dist.all_reduce(x)
    (dist.send if rank == 0 else dist.recv)(y, 1 - rank)
    assert rank == 1 or y.tolist() == [step + 1.0] * 2, "a sender keeps what it has"
    got += [x.tolist(), y.tolist()]
if rank == 1:
    print(json.dumps(got))
"""
RIGHT = [[2, 2], [1, 1], [2, 2], [2, 2], [2, 2], [3, 3]]


@pytest.mark.costly
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("plan", "device", "code", "said"),
    [
        ("rank 1: kill at all_reduce #2", "sim", 137, "rank 1 was killed by SIGKILL in all_reduce"),
        ("rank 1: raise ValueError at backward of 0 #2", "sim", 1, "rank 1 raised ValueError"),
        ("rank 1: fail allocation #30", "sim", 1, "rank 1 raised torch.OutOfMemoryError at program.py"),
        ("rank 1: hang at all_reduce #3", "sim", 1, "rank 1 never called all_reduce, which rank 0 waited in"),
        ("rank 0: exit 7 at phase update #2", "cpu", 7, "rank 0 exited with code 7"),
        ("rank 1: drop at all_reduce #3", "cpu", 1, "can drop calls of simccl only, but all_reduce of group 0 goes to"),
        ("rank 1: fail allocation #3", "cpu", 1, "allocations fail on the simulated accelerator only"),
    ],
)
def test_a_fault_that_ends_a_rank(plan, device, code, said, tmp_path):
    (tmp_path / "plan").write_text(plan)
    ended = run(f"-n 2 --hang end --device {device} --faults plan", PROGRAM, device, folder=tmp_path)
    assert ended.returncode == code and said in ended.stderr, ended.stderr


INFINITE, CUT = float("inf"), torch.tensor(3.0).view(torch.int32).bitwise_xor(1 << 30).view(torch.float32).item()


@pytest.mark.parametrize(
    ("plan", "device", "changed"),
    [
        ("rank 0: corrupt element 1 bit 31 at all_reduce #2+; rank 0: duplicate at send #1", "sim",
         {2: [2, 0], 4: [2, 0], 3: [1, 1], 5: [2, 2]}),
        ("rank 0: corrupt at all_reduce #2; rank 0: corrupt element 1 at send #3; rank 1: slow 1.5x; "
         "rank 1: delay 10ms at recv #2; rank 0: exit at step #9", "cpu", {2: [INFINITE, 2], 5: [3, CUT]}),
    ],
)  # fmt: skip
def test_a_fault_that_changes_a_call(plan, device, changed, tmp_path):
    (tmp_path / "plan").write_text(plan)
    ended = run(f"-n 2 --device {device} --faults plan", PROGRAM, device, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    printed = next(line for line in ended.stdout.splitlines() if "[[" in line).removeprefix("[rank 1] ")
    assert json.loads(printed) == [changed.get(at, right) for at, right in enumerate(RIGHT)]
    told = [line for line in ended.stdout.splitlines() if "a planted fault: " in line]
    assert len(told) == plan.count(";") + 1 - plan.count("#9")  # each once
    assert ("step #9 has not happened: its call was reached 3 times" in ended.stdout) == ("step #9" in plan)


def steps_begun(ended):
    return [float(each.split()[-1]) for each in ended.stdout.splitlines() if "[rank 1] at" in each]


def test_a_fault_at_a_virtual_time(tmp_path):
    """The first call at or after the time is found by the times that the program itself reads, run after run."""
    loop = "for step in range(3):"
    program = PROGRAM.replace(loop, f"import time\n{loop}\n    print('at', time.perf_counter_ns())")
    times = steps_begun(run("-n 2 --clock unit", program, "sim", folder=tmp_path))
    assert len(times) == 3
    for plan, left in ((f"{times[1]:g}ns", 2), (f"{times[2]:g}ns", 3)):
        (tmp_path / "plan").write_text(f"rank 1: kill at virtual time {plan}")
        ended = run("-n 2 --clock unit --faults plan", program, "sim", folder=tmp_path)
        assert ended.returncode == 137 and steps_begun(ended) == times[:left], ended.stderr
    (tmp_path / "plan").write_text("rank 1: kill at virtual time 9s")
    ended = run("-n 2 --clock unit --faults plan", program, "sim", folder=tmp_path)
    assert ended.returncode == 0 and "virtual time 9s has not happened: no call came then or later" in ended.stdout


def test_a_module_of_no_program_is_named_at_its_first_call(tmp_path):
    (tmp_path / "plan").write_text("rank 1: kill at forward of 1.O #2")
    ended = run("-n 2 --faults plan", PROGRAM, "sim", folder=tmp_path)
    said = "torch_ext: no module is called '1.O' yet; there are '1.0', '1', '0'"
    assert ended.returncode == 0 and ended.stdout.index(said) < ended.stdout.index("[["), ended.stdout


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("nothing", "the fault 'nothing' is not one; expected RANK: KIND at POINT"),
        ("rank 1: kill at virtual time 5ms", "there is no virtual time; add --clock MODEL, such as unit"),
        ("rank 2: kill", "expected ranks among ranks 0, 1"),
    ],
)
def test_a_wrong_plan_is_a_usage_error(plan, said, tmp_path):
    (tmp_path / "plan").write_text(plan)
    ended = run("-n 2 --faults plan", PROGRAM, folder=tmp_path)
    assert ended.returncode == 2 and said in ended.stderr


def test_a_clock_that_a_test_lacks_is_named(tmp_path):
    given = {"TORCH_EXT_FAULTS": "rank 1: kill at virtual time 5ms"}
    ended = run("-n 2", PROGRAM, "sim", folder=tmp_path, **given)
    assert ended.returncode == 1 and "there is no virtual time; add --clock MODEL, such as unit" in ended.stderr
