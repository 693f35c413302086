"""Schedules: a race shows its wrong number, a program without one computes the same, and a seed runs again."""

import re

import pytest
import torch

from test.torch_ext.interpreter import python
from test.torch_ext.sim.races.stage import SIM, Stage
from torch_ext.sim import _native, races

SCHEDULES = ["early", "late", *(f"random:{seed}" for seed in range(4))]


def _written_again(x, y):
    x.fill_(3)
    SIM.synchronize()
    return x


# The side stream's work on a tensor of ones, and the next read or write.
READ_AFTER_WRITE = (lambda x: x.fill_(2), lambda x, y: x.mul(3))
FRESH = (lambda x: x.mul(2), lambda x, y: y)
WRITE_AFTER_WRITE = (lambda x: x.fill_(2), _written_again)  # of two late writes the second still comes last


def _run(program, schedule, *, fixed):
    on, result = Stage(), 0.0
    x = on.tensor(4)
    try:
        with races.check(schedule=schedule):
            with on.on(on.side):
                y = program[0](x)
            if fixed:
                on.main.wait_stream(on.side)
            result = float(program[1](x, y).sum().item())
            trace = _native.schedule_trace()
    except races.RaceError as error:
        return result, str(error), trace
    return result, "", trace


@pytest.mark.parametrize(
    ("program", "right", "wrong"),
    [(READ_AFTER_WRITE, 24.0, 12.0), (FRESH, 8.0, float("nan")), (WRITE_AFTER_WRITE, 12.0, 12.0)],
    ids=["read after write", "fresh", "write after write"],
)
def test_a_race_shows_its_wrong_number(program, right, wrong):
    early, message, _ = _run(program, "early", fixed=False)
    assert early == right and "1 race" in message and "replay" not in message
    late, message, trace = _run(program, "late", fixed=False)
    assert late == pytest.approx(wrong, nan_ok=True)
    assert f"replay with TORCH_EXT_SCHEDULE=late; its trace is {trace:016x}" in message
    drawn = {_run(program, f"random:{seed}", fixed=False)[0] == right for seed in range(32)}
    assert drawn == {True, False}
    for schedule in SCHEDULES:
        assert _run(program, schedule, fixed=True)[:2] == (right, "")


def _training(on):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)).to(on.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    x, target = torch.randn(16, 8).to(on.device), torch.randint(3, (16,)).to(on.device)
    losses = []
    for _ in range(3):
        on.side.wait_stream(on.main)
        with on.on(on.side):
            scaled = x * 2
            columns = torch.cat([scaled[:, :4], scaled[:, 4:].flip(0)], dim=1)
        on.main.wait_stream(on.side)
        columns.record_stream(on.main)
        scaled.record_stream(on.main)
        loss = torch.nn.functional.cross_entropy(net(columns), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_ordered_program_computes_the_same_on_every_schedule_and_leaves_its_results():
    expected = _training(Stage())
    for schedule in SCHEDULES:
        x = Stage().tensor(4)
        with races.check(schedule=schedule):
            assert _training(Stage()) == expected, schedule
            x.fill_(5)
        assert x.sum().item() == 20, schedule


def test_a_replay_is_the_same_execution():
    on = Stage()

    def run(schedule):
        with races.check(schedule=schedule):
            return _training(on), _native.schedule_trace()

    assert run("random:5") == run("random:5")
    assert run("random:5")[1] != run("random:6")[1]


@pytest.mark.costly
def test_the_line_that_a_program_prints_replays_it():
    program = "import torch, torch_ext.sim\nside = torch.sim.Stream()\nx = torch.ones(8, device='sim')\n"
    program += "torch.sim.synchronize()\nwith torch.sim.stream(side):\n    x.fill_(2)\nprint(x.mul(3).sum().item())"
    runs = [python("-c", program, TORCH_EXT_RACES="report", TORCH_EXT_SCHEDULE="late") for _ in range(2)]
    assert [run.stdout for run in runs] == ["24.0\n"] * 2
    lines = [re.findall("replay with TORCH_EXT_SCHEDULE=late; its trace is [0-9a-f]{16}", run.stderr) for run in runs]
    assert lines[0] == lines[1] and len(lines[0]) == 1


def test_an_error_of_the_body_says_how_to_replay():
    with pytest.raises(ZeroDivisionError) as caught, races.check(schedule="random:3"):
        _ = 1 // 0
    assert "replay with TORCH_EXT_SCHEDULE=random:3" in caught.value.__notes__[0]


@pytest.mark.parametrize("text", ["sometimes", "late:1", "random:x", "random:-1"])
def test_an_unknown_schedule_is_refused(text, monkeypatch):
    with (
        pytest.raises(ValueError, match=r"Got the schedule .*, expected early, late, or random"),
        races.check(schedule=text),
    ):
        pass
    monkeypatch.setenv("TORCH_EXT_SCHEDULE", text)
    with pytest.raises(ValueError, match=f"TORCH_EXT_SCHEDULE={text}"), races.check():
        pass
