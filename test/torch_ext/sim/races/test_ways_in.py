"""The ways to ask for a check (a block, a whole program, a test of our harness), and the effect of a race in each."""

import pytest
import torch

from test.torch_ext.interpreter import python
from test.torch_ext.sim.races.stage import SIM, Stage
from torch_ext.sim import races

PROGRAM = """
import torch, torch_ext.sim
side = torch.sim.Stream()
x = torch.ones(8, device="sim")
torch.sim.synchronize()
with torch.sim.stream(side):
    x.fill_(2)
if {fixed}:
    torch.sim.current_stream().wait_stream(side)
print(x.mul(3).sum().item())
"""


def _race(on):
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)
    x.mul(3)


def test_check_raises_at_the_end_of_the_block():
    reached = False
    with (
        pytest.raises(races.RaceError, match=r"1 race: the default stream of sim:0 must wait") as caught,
        races.check(),
    ):
        _race(Stage())
        reached = True
    assert reached and len(caught.value.races) == 1
    with races.check():
        _ = torch.ones(3, device="sim") + 1  # the race before is forgotten


def test_an_error_of_the_block_itself_gets_the_races_as_a_note():
    with pytest.raises(ZeroDivisionError) as caught, races.check():
        _race(Stage())
        _ = 1 // 0
    assert "1 race" in caught.value.__notes__[0]


def test_report_prints_and_off_does_nothing(capfd):
    with races.check("off"):
        _race(Stage())
    assert capfd.readouterr().err == ""
    with races.check("report"):
        _race(Stage())
    assert "race 1: aten::fill_ writes what aten::mul reads" in capfd.readouterr().err


def test_an_unknown_mode_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="Got mode 'on', expected one of error, report, off"), races.check("on"):
        pass
    monkeypatch.setenv(races.VARIABLE, "yes")
    with pytest.raises(ValueError, match="TORCH_EXT_RACES=yes: expected one of error, report, off"):
        races.mode()


def test_a_block_within_a_check_is_part_of_it():
    with pytest.raises(races.RaceError), races.check():
        with races.check():
            _race(Stage())
        SIM.synchronize()


def test_equal_races_are_counted_once():
    on = Stage()
    x = on.tensor()
    with pytest.raises(races.RaceError, match=r"\(8 times\)") as caught, races.check():
        for _ in range(8):
            with on.on(on.side):
                x.fill_(2)
            x.mul(3)
            SIM.synchronize()
    assert [race.count for race in caught.value.races] == [8]


def test_fresh_and_freed_memory_is_poisoned_while_checking():
    with races.check():
        assert torch.empty(1000, device="sim").isnan().all().item()
    tensor = torch.ones(1000, device="sim")
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(1000, device="sim")
    assert again.data_ptr() == address and not again.isnan().any().item()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("mode", "fixed", "code"), [("error", False, 1), ("report", False, 0), ("error", True, 0)])
def test_a_whole_program(mode, fixed, code):
    done = python("-c", PROGRAM.format(fixed=fixed), TORCH_EXT_RACES=mode)
    assert done.stdout == "48.0\n", done.stderr
    assert done.returncode == code, done.stderr
    assert ("must wait for" in done.stderr) != fixed
