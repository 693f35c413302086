"""The part of the zoo that needs ranks: collectives and transfers. All programs share one world of two ranks.

How late a peer is must not matter: the programs run under several schedules of the ranks, and each has one result.
"""

import random
from datetime import timedelta

import pytest

from test.torch_ext.sim import ranks
from test.torch_ext.sim.races import zoo_collectives, zoo_training
from test.torch_ext.sim.races.stage import SIM, pairs_of, run
from torch_ext.sim import faults

CALLS = 400  # of a group, in all programs


def _delay(rank, schedule):
    """Make the calls of this rank late: of every rank in turn, or by random times."""
    draw = random.Random(f"{schedule} {rank}")
    for at in range(1, CALLS + 1):
        late = draw.random() < 0.5 if schedule.startswith("random") else schedule == f"rank {rank} late"
        if late:
            faults.delay(at, timedelta(milliseconds=draw.randint(1, 10)))


@pytest.mark.parametrize(
    "schedule",
    [
        "",
        "rank 0 late",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("rank 1 late", "random 1", "random 2")),
    ],
)
@ranks.world_of(2)
def test_collectives_are_reported_with_both_places_and_their_twins_are_silent(rank, world_size, schedule):
    wrong = []
    _delay(rank, schedule)
    for pair in pairs_of(zoo_collectives, zoo_training):
        for fixed, expected in ((False, [pair.expected]), (True, [])):
            try:
                found = run(pair, fixed=fixed)
            except Exception as error:
                wrong.append(f"{pair.name}: {error!r}")
                continue
            if found != expected:
                wrong.append(f"{pair.name}, {'twin' if fixed else 'racy'}: expected {expected}, found {found}")
            SIM.synchronize()
    assert not wrong, "\n".join(wrong)
