"""Full disks, points at writes, and checkpoints that are interrupted at each write."""

import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import test.torch_ext.faults.test_disk as own
from test.torch_ext.sim import ranks
from torch_ext.faults.plan import parse
from torch_ext.faults.points import Armament
from torch_ext.testing._internal.fault_plan import nothing_lost
from torch_ext.world import provider
from torch_ext.world.follow import start_world
from torch_ext.world.settings import Limits
from torch_ext.world.start import RankTask
from torch_ext.world.verdict import WorldReport, judge, render

STATE = {"w": torch.arange(3000.0)}


def to_file(path, write):
    with open(path, "wb") as file:
        write(file)


def by_descriptor(path):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, b"x" * 100)
    finally:
        os.close(descriptor)


WRITERS = {
    "torch.save to a path": lambda path: torch.save(STATE, path),
    "torch.save to a file": lambda path: to_file(path, lambda file: torch.save(STATE, file)),
    "a file": lambda path: to_file(path, lambda file: file.write(b"x" * 10**5)),
    "a buffered file": lambda path: to_file(path, lambda file: file.write(b"x")),
    "a descriptor": by_descriptor,
    "pathlib": lambda path: Path(path).write_text("x"),
}


def error_of(write, path):
    """Return what a writer raises, without the numbers, which depend on the length of the path."""
    try:
        write(path)
    except Exception as error:
        return type(error), re.sub(r"\d+", "", str(error)), getattr(error, "errno", None)
    return None


def fills(rank, size, folder):
    """The kernel's full device is the oracle. The other rank, and other folders, have room."""
    full, other = os.path.join(folder, "full"), os.path.join(folder, f"other {rank}")
    for each in (full, other):
        os.makedirs(each, exist_ok=True)
    armament = Armament(parse(f"rank 1: fill disk at write to {full} #1"), rank, tell=lambda _: None)
    for name, write in WRITERS.items():
        assert error_of(write, os.path.join(other, "file")) is None, name
        found = error_of(write, os.path.join(full, f"{rank} {name}"))
        assert found == (error_of(write, "/dev/full") if rank == 1 else None), (name, found)
        assert found is None or os.path.getsize(os.path.join(full, f"1 {name}")) == 0, name
    armament.disarm()
    WRITERS["torch.save to a path"](os.path.join(full, "again"))


def fills_later(rank, size, folder):
    """What the disk takes stays, and the rest fails."""
    paths = [os.path.join(folder, f"{rank} {name}") for name in "ab"]
    armament = Armament(parse(f"rank 1: fill disk after 5000 at write to {folder} #2"), rank, tell=lambda _: None)
    by_descriptor(paths[0])
    for name in ("torch.save to a path", "a file"):
        error = error_of(WRITERS[name], paths[1])
        assert (error is not None) == (rank == 1)
        assert rank == 0 or os.path.getsize(paths[1]) == (5000 if name.startswith("torch") else 0)
    assert armament.missed() == []
    armament.disarm()


def saves_twice(rank, size, folder):
    for step in (1, 2):
        state = {f"rank {rank}": STATE["w"] + step, "all": torch.full((8,), float(step))}
        dcp.save(state, checkpoint_id=os.path.join(folder, str(step)))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("body", [fills, fills_later])
def test_writes_on_a_full_disk(body, tmp_path):
    ranks.run(2, body, str(tmp_path))


def outcome_of(body, plan, folder):
    """Run a body of two ranks under a plan; return how many writes each rank made, and the report."""
    where, options = (own.__name__, body.__name__), {"timeout": timedelta(minutes=5)}
    tasks = [
        RankTask(
            ranks._in_group,
            (rank, 2, str(folder), where, (str(folder / "saved"),), dict(options)),
            environment={"TORCH_EXT_FAULTS": plan.format(folder / "saved")},
        )
        for rank in range(2)
    ]
    with start_world(provider.zygote_for(own.__name__), tasks) as world:
        outcomes = world.wait(Limits(test_s=60.0, hang_s=2.0))
        report = render(WorldReport(tuple(outcomes), judge(outcomes), time.monotonic() - world.started_s))
    return outcomes, report


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["kill", "fill disk", "fill disk after 700"])
def test_a_save_that_is_interrupted_at_any_write(kind, tmp_path):
    """The second of two checkpoints is whole, or the first one still is."""
    lost = 0
    for rank in (0, 1):
        number, is_over = 0, False
        while not is_over:
            number += 1
            folder = tmp_path / f"{rank}_{number}"
            folder.mkdir()
            outcomes, report = outcome_of(saves_twice, f"rank {rank}: {kind} at write to {{}}/2 #{number}", folder)
            is_over = "has not happened" in outcomes[rank].output
            newest = nothing_lost(folder / "saved")["all"].tolist()
            assert newest in ([1.0] * 8, [2.0] * 8), report
            assert newest == [2.0] * 8 or not is_over, report
            lost += newest == [1.0] * 8
        assert number > 1 + (rank == 0)  # rank 0 writes the metadata too
    assert lost > 2
