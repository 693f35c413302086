"""Every state of the collectives' handshake is visited, and every mistake that is planted in it is found."""

from __future__ import annotations

import pytest

from test.torch_ext.sim.handshake_model import FAULTS, Protocol, explore

SMALL = {
    "two ranks": Protocol(ranks=2, collectives=4),
    "two ranks, one dies": Protocol(ranks=2, collectives=3, deaths=True),
    "shared reduction": Protocol(ranks=2, collectives=2, pieces=2),
    "shared reduction, one dies": Protocol(ranks=2, collectives=1, pieces=2, deaths=True),
}
LARGE = {
    "three ranks": Protocol(ranks=3, collectives=2, slots=1),
    "three ranks, one dies": Protocol(ranks=3, collectives=1, deaths=True),
    "three ranks, shared reduction": Protocol(ranks=3, collectives=1, pieces=2),
}


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_all_states_are_sound(name: str, request: pytest.FixtureRequest) -> None:
    if name in LARGE and not request.config.getoption("--long", default=False):
        pytest.skip("takes minutes; pytest --long runs it")
    states, why = explore({**SMALL, **LARGE}[name])
    assert why == ""
    assert states > 100


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_mistakes_are_found(fault: str) -> None:
    pieces = 2 if "piece" in FAULTS[fault] else 0
    deaths = fault == "look around last"
    slots = 1 if fault in ("no wait for the slot", "finished early") else 2  # ranks that wait are one ahead at most
    assert explore(Protocol(ranks=2, collectives=3, slots=slots, pieces=pieces, deaths=deaths))[1] == ""
    _, why = explore(Protocol(ranks=2, collectives=3, slots=slots, pieces=pieces, deaths=deaths, fault=fault))
    assert why
