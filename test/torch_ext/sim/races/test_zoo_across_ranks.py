"""The zoo of programs that race across ranks. Each race is reported with the lines of both ranks, by the rank that
comes second, whichever that is; the mended programs are silent.
"""

import time

import pytest
import torch.distributed as dist

from test.torch_ext.sim import ranks
from test.torch_ext.sim.races import zoo_across_ranks as zoo
from torch_ext.sim import races


def _checked(program, mended, is_late):
    """Return the races that this rank reports, as sets of (rank, operator, line), and their text."""
    races.start()
    try:
        place = zoo.Place()
        place.handle.barrier(channel=7)
        time.sleep(0.02 if is_late else 0)
        program(place, mended)
        zoo.SIM.synchronize()
    finally:
        found = races.stop()
    both = [(race.earlier, race.later) for race in found]
    assert all(at.place.file == zoo.__file__ for pair in both for at in pair), races.render(found)
    sides = [frozenset((at.rank, at.operator.removeprefix("aten::"), at.place.line) for at in pair) for pair in both]
    return sides, races.render(found) if found else ""


def _is_between_ranks(sides):
    """Whether a race is one of two ranks. A program may have another one of a single rank with the same cause."""
    return len({rank for rank, *_ in sides}) == 2


@pytest.mark.parametrize("late", [0, 1])
@ranks.world_of(2)
def test_races_are_reported_with_the_lines_of_both_ranks_and_mended_programs_are_silent(rank, world_size, late):
    zoo.on_the_host()
    wrong = []
    for name, (program, expected) in zoo.PROGRAMS.items():
        for mended in (False, True):
            everyone = [None] * world_size
            dist.all_gather_object(everyone, _checked(program, mended, rank == late))
            found = {sides for each, _ in everyone for sides in each if mended or _is_between_ranks(sides)}
            if found != (set() if mended else {expected}):
                texts = "\n".join(text for _, text in everyone)
                what = "mended" if mended else "racy"
                wrong.append(f"{name}, {what}: expected {sorted(expected)}, found {found}\n{texts}")
    assert len(zoo.PROGRAMS) >= 20
    assert not wrong, "\n\n".join(wrong)
