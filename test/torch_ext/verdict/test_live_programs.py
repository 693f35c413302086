"""The engine ends no program whose actor may still act, and proves a hang of nearly every one without an actor.

A hang is proven after two seconds here, and actors act after one to eight. ``--long`` draws 500 programs.
"""

import pytest

from test.torch_ext.verdict.live_programs import draw, source_of
from test.torch_ext.world.programs import reports_hang
from test.torch_ext.world.suites import suite_of
from torch_ext import cache

NUMBER, NUMBER_OF_LONG = 16, 500
# At least this many of the dead programs are proven to hang; waits for a pipe or a child are not.
PROVEN = 0.85


@pytest.fixture(scope="module")
def drawn(request):
    is_long = request.config.getoption("--long")
    return draw(seed=27, number=NUMBER_OF_LONG if is_long else NUMBER)


@pytest.fixture(scope="module")
def run(drawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    with suite_of(folder, source_of(drawn)) as suite:
        slots = str(2 * min(2 * len(drawn), 24))
        variables = {"TORCH_EXT_HANG_AFTER": "2", "TORCH_EXT_CACHE": str(cache.folder())}
        started = suite.start_runner("--device", "sim", "--slots", slots, extra=variables)
        yield suite.finish(started, deadline_s=60 + 12 * len(drawn))


def test_program_with_a_thread_that_may_act_is_not_ended(drawn, run):
    ended = {
        f"{number}: {program}": run.text.get(f"test_live_{number:03}", str(run)[-3000:])
        for number, program in enumerate(drawn)
        if run.status.get(f"test_live_{number:03}") != "passed"
    }
    assert not ended, "\n\n".join(f"{program}\n{text}" for program, text in ended.items())


def test_program_without_a_thread_that_may_act_is_proven_to_hang(drawn, run):
    proven = [reports_hang(run.text.get(f"test_dead_{number:03}", "")) for number in range(len(drawn))]
    missed = [
        f"{number}: {program}\n{run.text.get(f'test_dead_{number:03}', '?')}"
        for number, program in enumerate(drawn)
        if program.must_be_proven and not proven[number]
    ]
    print(f"{sum(proven)} of {len(proven)} dead programs were proven to hang")
    assert not missed, "\n\n".join(missed)
    if len(proven) >= NUMBER_OF_LONG:  # a small draw may hold many programs without a proof
        assert sum(proven) >= PROVEN * len(proven), f"{sum(proven)} of {len(proven)}"
