"""The part of the zoo that needs ranks: collectives and transfers. All programs share one world of two ranks."""

from __future__ import annotations

from test.torch_ext.sim import ranks
from test.torch_ext.sim.races import zoo_collectives, zoo_training
from test.torch_ext.sim.races.stage import SIM, pairs_of, run


@ranks.world_of(2)
def test_collectives_are_reported_with_both_places_and_their_twins_are_silent(rank: int, world_size: int) -> None:
    wrong = []
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
