"""``torch_ext run --restart``, and torchrun's agent with planted faults.

A run without faults is the oracle of recovery, and torchrun the oracle of its own contract.
"""

import re
import signal
import uuid

import pytest
import torch

import torch_ext.sim  # noqa: F401 - registers the device that checkpoints name
from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.program.commands import alive_with, run, start, torchrun
from test.torch_ext.world.faults import MARK

RECOVER = CHECKOUT / "examples" / "recover.py"
PLAN = "rank 1: kill at all_reduce #7"
LATE = "rank 1: delay 1s at call of torch.distributed.init_process_group #1 in generation 1"

# Prints its variables in each generation. Survivors go on, unless the first argument forbids that.
JOB = """
import os, sys, time, torch, torch.distributed as dist

def job():
    dist.init_process_group()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
    print("began", *(os.environ[name] for name in names), os.environ["MASTER_PORT"], flush=True)
    for _ in range(4):
        x = torch.ones(2, device="sim")
        dist.all_reduce(x)
        assert x[0].item() == dist.get_world_size()
    time.sleep(float(sys.argv[2]))

torch.sim.set_device(int(os.environ["LOCAL_RANK"]))
while True:
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    try:
        job()
        break
    except dist.DistError:
        if sys.argv[1] == "end":
            raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == generation:
        time.sleep(0.01)
"""


def began(ended):
    """Return what each rank printed: rank, world size, local rank, restart count, maximum, port."""
    found = re.findall(r"^(?:\[rank \d+\] )?began (.*)$", ended.stdout, re.MULTILINE)
    return sorted([*map(int, each.split())] for each in found)


def job(options, plan, *, folder, survivors="stay", sleep=0):
    return run(f"-n 3 {options}", JOB, survivors, str(sleep), folder=folder, TORCH_EXT_FAULTS=plan)


def weights(path):
    state = torch.load(path)
    assert state["step"] == 10
    return {name: value.cpu() for name, value in state["model"].items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    text = RECOVER.read_text()
    ended = run("-n 2", text, "checkpoint.pt", folder=folder)
    assert ended.returncode == 0, ended.stderr
    return weights(folder / "checkpoint.pt")


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("policy", ["world:1", "rank:1", "torchrun"])
def test_recovery_ends_with_the_same_bits(policy, undisturbed, tmp_path):
    if policy == "torchrun":
        # Without a store for each attempt, gloo may find the dead ranks of the first one: pytorch#135712.
        more = {"TORCH_EXT_SIM": "1", "TORCH_EXT_FAULTS": PLAN, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(RECOVER), "checkpoint.pt")
        ended = torchrun(*words, folder=tmp_path, **more)
    else:
        options = f"-n 2 --restart {policy}"
        plan = f"{PLAN}; {LATE}" if policy == "rank:1" else PLAN
        ended = run(options, RECOVER.read_text(), "checkpoint.pt", folder=tmp_path, TORCH_EXT_FAULTS=plan)
        assert (f"a planted fault: {LATE}" in ended.stderr + ended.stdout) is (policy == "rank:1")
        causes = [line for line in ended.stderr.splitlines() if line.startswith("torch_ext: generation")]
        assert re.match(r"torch_ext: generation 0: rank 1 was killed by SIGKILL in backward, called at ", causes[0])
        assert causes[1:] == ["torch_ext: generation 1: ended by itself"]
    assert ended.returncode == 0, ended.stderr
    assert f"a planted fault: {PLAN}" in ended.stdout + ended.stderr
    assert ended.stdout.count("step 6: loss") == 2  # both ranks came back
    found = weights(tmp_path / "checkpoint.pt")
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], undisturbed[name]) for name in found)


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("policy", "rank_again"),
    [("world", [(0, 3, 0), (1, 3, 1), (2, 3, 2)]), ("rank", [(0, 3, 0), (1, 3, 1), (2, 3, 2)]),
     ("shrink", [(0, 2, 0), (1, 2, 2)])],
)  # fmt: skip
def test_variables_are_those_of_the_generation(policy, rank_again, tmp_path):
    ended = job(f"--restart {policy}:2", "rank 1: exit 5 at all_reduce #3", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = began(ended)
    first, second = ([each for each in found if each[3] == count] for count in (0, 1))
    assert [tuple(each[:3]) for each in first] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert [tuple(each[:3]) for each in second] == rank_again
    assert len(found) == len(first) + len(second)
    assert {each[4] for each in found} == {2}
    assert len({each[5] for each in first}) == len({each[5] for each in second}) == 1
    assert first[0][5] != second[0][5]  # a store of its own


def test_a_fault_strikes_survivors_in_the_generation_that_it_names(tmp_path):
    plan = "rank 1: kill at all_reduce #3; rank 2: kill at all_reduce #2 in generation 1"
    ended = job("--restart rank", plan, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [sum(each[3] == count for each in began(ended)) for count in range(4)] == [3, 3, 3, 0]
    assert "generation 1: rank 2 was killed by SIGKILL" in ended.stderr


@pytest.mark.drawn(1)
@pytest.mark.parametrize("policy", ["world", "rank", "shrink"])
def test_restarts_run_out(policy, tmp_path):
    plan = "rank 1: exit 7 at all_reduce #2 in every generation"
    if policy == "shrink":
        plan += "; rank 0: exit 7 at all_reduce #2 in generation 1"
    ended = job(f"--restart {policy}:1", plan, folder=tmp_path)
    assert ended.returncode == 7, ended.stderr
    causes = re.findall(r"generation (\d): (rank \d) exited with code 7", ended.stderr)
    assert causes == [("0", "rank 1"), ("1", "rank 0" if policy == "shrink" else "rank 1")]
    assert "FAILED program.py" in ended.stderr


def test_ranks_that_end_because_of_a_loss_start_again_with_it(tmp_path):
    ended = job("--restart rank:1", "rank 1: raise ValueError at all_reduce #3", survivors="end", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "ranks 0-2 start again: restart 1 of 1" in ended.stderr
    assert re.search(r"generation 0: rank 1 raised ValueError at program.py:\d+: torch_ext: a planted", ended.stderr)
    assert len(began(ended)) == 6


def test_nobody_is_left_to_shrink_to(tmp_path):
    ended = job("--restart shrink", "rank 1: exit 7 at all_reduce #3", survivors="end", folder=tmp_path)
    assert ended.returncode == 7, ended.stderr
    assert "go on" not in ended.stderr


def test_a_time_limit_is_one_for_all_generations(tmp_path):
    ended = job("--restart world:9 --timeout 8", "", sleep=1000, folder=tmp_path)
    assert ended.returncode == 1
    assert "timed out" in ended.stderr and "start again" not in ended.stderr


def test_an_interrupt_ends_a_later_generation_too(tmp_path):
    plan, mark = "rank 1: exit 7 at all_reduce #3", uuid.uuid4().hex
    more = {"TORCH_EXT_FAULTS": plan, MARK: mark}
    with start("-n 3 --restart rank", JOB, "stay", "1000", folder=tmp_path, **more) as process:
        restarted = 0
        while restarted < 3:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            restarted += "began" in line and line.split()[-3] == "1"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=200)
    assert process.returncode == 130
    assert alive_with(mark) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [("--restart reboot", "got 'reboot', expected one of world, rank, shrink"), ("--restart rank:0", "got 'rank:0'"),
     ("--restart rank: ", "got 'rank:'"), ("--restart world --dry --world 4", "a dry run has no ranks to lose"),
     ("--restart rank --check-replicas", "use --restart world")],
)  # fmt: skip
def test_options_that_make_no_sense(options, words, tmp_path):
    ended = run(options, "", folder=tmp_path)
    assert ended.returncode == 2 and words in ended.stderr, ended.stderr
