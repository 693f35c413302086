"""The report on each program of the laboratory has its line."""

import time
from datetime import timedelta

import pytest

from test.torch_ext.faults.page import PROGRAMS, name_of
from test.torch_ext.sim import ranks
from torch_ext.world import provider
from torch_ext.world.follow import start_world
from torch_ext.world.settings import Limits
from torch_ext.world.start import RankTask
from torch_ext.world.verdict import Judgement, WorldReport, judge, render

SIZE = 2
LIMITS = Limits(test_s=60.0, hang_s=2.0)


def report_of(program, plan, folder):
    """Run the program in ranks under the plan; return whether it passed, and the report."""
    options = {"timeout": timedelta(hours=1)}
    where = (program.__module__, program.__name__)
    tasks = [
        RankTask(
            ranks._in_group,
            (rank, SIZE, str(folder), where, (), dict(options)),
            environment={"TORCH_EXT_FAULTS": plan},
        )
        for rank in range(SIZE)
    ]
    with start_world(provider.zygote_for(program.__module__), tasks) as world:
        outcomes = world.wait(LIMITS)
        verdict = judge(outcomes)
        report = render(WorldReport(tuple(outcomes), verdict, time.monotonic() - world.started_s))
    return verdict.judgement is Judgement.PASSED, report


@pytest.mark.drawn(24)
@pytest.mark.parametrize(("program", "plan", "said"), [pytest.param(*each, id=name_of(*each[:2])) for each in PROGRAMS])
def test_report_has_the_line(program, plan, said, tmp_path):
    passed, report = report_of(program, plan, tmp_path)
    assert passed == (not said), report
    assert all(part in report.splitlines()[0] for part in said.split("...")), report
