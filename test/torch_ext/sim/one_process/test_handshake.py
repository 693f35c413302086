"""Every state of the collectives' handshake is visited, and every mistake that is planted in it is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from test.torch_ext.sim.handshake_model import FAULTS, Protocol, explore

SMALL = {
    "two ranks": Protocol(ranks=2, collectives=4),
    "two ranks, one dies": Protocol(ranks=2, collectives=3, deaths=True),
    "two ranks, one gives up": Protocol(ranks=2, collectives=3, limits=True),
    "shared reduction": Protocol(ranks=2, collectives=2, pieces=2),
    "shared reduction, one dies": Protocol(ranks=2, collectives=1, pieces=2, deaths=True),
}
LARGE = {
    "three ranks": Protocol(ranks=3, collectives=2, slots=1),
    "three ranks, one dies": Protocol(ranks=3, collectives=1, deaths=True),
    "three ranks, one gives up": Protocol(ranks=3, collectives=1, limits=True),
    "shared reduction, one gives up, one dies": Protocol(ranks=2, collectives=2, pieces=2, limits=True, deaths=True),
    "three ranks, shared reduction": Protocol(ranks=3, collectives=1, pieces=2),
}


@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.long) for name in LARGE)])
def test_all_states_are_sound(name: str) -> None:
    states, why = explore({**SMALL, **LARGE}[name])
    assert why == ""
    assert states > 100


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_mistakes_are_found(fault: str) -> None:
    pieces = 2 if "piece" in FAULTS[fault] else 0
    deaths, limits = fault == "look around last", "at its limit" in fault
    one_ahead = ("no wait for the slot", "finished early")  # ranks that wait are one ahead at most
    slots = 1 if limits or fault in one_ahead else 2
    protocol = Protocol(ranks=2, collectives=3, slots=slots, pieces=pieces, deaths=deaths, limits=limits)
    assert explore(protocol)[1] == ""
    assert explore(replace(protocol, fault=fault))[1]
