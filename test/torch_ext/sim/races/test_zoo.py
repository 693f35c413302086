"""The zoo: each program with a race is reported with the two places that race and no other, and its twin is silent."""

import pytest

from test.torch_ext.sim.races import zoo_copies, zoo_memory, zoo_orders, zoo_patterns, zoo_streams
from test.torch_ext.sim.races.stage import pairs_of, run
from torch_ext.sim.races._schedule import VARIABLE

PAIRS = pairs_of(zoo_streams, zoo_orders, zoo_memory, zoo_copies, zoo_patterns)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_race_is_reported_with_both_places(pair):
    assert run(pair, fixed=False) == [pair.expected]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_twin_is_silent(pair):
    assert run(pair, fixed=True) == []


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["late", "random:1", "random:2", "random:3"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_no_schedule_changes_the_verdict(pair, schedule, monkeypatch):
    monkeypatch.setenv(VARIABLE, schedule)
    assert (run(pair, fixed=False), run(pair, fixed=True)) == ([pair.expected], [])
