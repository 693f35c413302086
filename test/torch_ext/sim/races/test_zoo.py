"""The zoo: each program with a race is reported with the two places that race, and its twin is silent."""

from __future__ import annotations

import pytest

from test.torch_ext.sim.races import zoo_memory, zoo_streams
from test.torch_ext.sim.races.stage import PAIRS, Pair, Stage
from torch_ext.sim import races

_ROOMS = {room.__file__ for room in (zoo_memory, zoo_streams)}


def _found(pair: Pair, *, fixed: bool) -> list[races.Race]:
    stage = Stage()
    races.start()
    try:
        pair.program(stage, fixed)
    finally:
        found = races.stop()
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_race_is_reported_with_both_places(pair: Pair) -> None:
    found = _found(pair, fixed=False)
    sides = [{"earlier": race.earlier, "later": race.later} for race in found]
    places = [
        {which: (side.operator, side.place.line if side.place else None) for which, side in each.items()}
        for each in sides
    ]
    expected = {which: (f"aten::{operator}", line) for which, (operator, line) in pair.expected.items()}
    assert places == [expected]
    assert all(side.place is None or side.place.file in _ROOMS for each in sides for side in each.values())


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_twin_is_silent(pair: Pair) -> None:
    assert _found(pair, fixed=True) == []
