"""``--audit-order``: runs each class on fresh and on shared ranks, and prints which tests depend on which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from torch_ext.runner.audit import Dependence, find_culprits, suspects
from torch_ext.runner.executor import PlanRunner
from torch_ext.runner.names import Collected
from torch_ext.runner.options import Options
from torch_ext.runner.reporters.rerun import rerun_on_shared_ranks
from torch_ext.runner.reporters.styled import StyledWriter
from torch_ext.runner.results import Began, Over, Status, TestName, TestResult, Tick
from torch_ext.runner.schedule import Batch, Plan

__all__ = ["audit_order"]


class _Runs:
    """Runs plans on fresh ranks, or on ranks that the tests of a class share."""

    def __init__(self, open_executor: Callable[[Options], PlanRunner], options: Options) -> None:
        each_fresh = replace(options, failfast=False, reuse="")
        self._options = {False: each_fresh, True: replace(each_fresh, reuse="class")}
        self._open = open_executor
        self._executors: dict[bool, PlanRunner] = {}
        self.number = 0

    def passed(self, plan: Plan, *, shared: bool) -> dict[TestName, bool]:
        """Run ``plan``; return which of its tests passed, or were skipped. What has no result is left out."""
        found: dict[TestName, bool] = {}
        self.number += 1

        def take(event: Began | Over | TestResult | Tick) -> None:
            if isinstance(event, TestResult):
                found[event.test] = event.status.counted is not Status.FAILED

        def renew(collected: Collected) -> Sequence[Batch]:
            return [batch for batch in plan if batch.file == collected.file]

        if shared not in self._executors:
            self._executors[shared] = self._open(self._options[shared])
        self._executors[shared].run(plan, take, renew)
        return found

    def close(self) -> None:
        """End every process."""
        for executor in self._executors.values():
            executor.close()


def audit_order(
    open_executor: Callable[[Options], PlanRunner], options: Options, plan: Plan, out: StyledWriter
) -> bool:
    """Audit ``plan`` and print what is found; return whether no test depends on another. See Note [Audit of order]."""
    with closing(_Runs(open_executor, options)) as runs:
        return _audit(runs, options, plan, out)


def _audit(runs: _Runs, options: Options, plan: Plan, out: StyledWriter) -> bool:
    backwards = Plan(tuple(batch._replace(tests=batch.tests[::-1]) for batch in plan))
    out.line(f"Audit of {len(plan.tests)} tests: on fresh ranks, on shared ones, and on shared ones in reverse")
    alone = runs.passed(plan, shared=False)
    found: dict[TestName, Dependence] = {}
    for each in (plan, backwards):
        shared = runs.passed(each, shared=True)
        for batch in each:
            for victim in batch.tests:
                if victim in found or victim not in alone or shared.get(victim, False) == alone[victim]:
                    continue
                before = suspects(batch.tests, shared, victim)

                def run_shared(tests: Sequence[TestName], batch: Batch = batch) -> dict[TestName, bool]:
                    return runs.passed(Plan((batch._replace(tests=tuple(tests)),)), shared=True)

                found[victim] = find_culprits(victim, alone[victim], before, run_shared)
                _tell(found[victim], options, out)
    failed = [test.id for test in plan.tests if not alone.get(test, False)]
    if failed:
        out.line(f"Failed on fresh ranks: {', '.join(failed)}")
    dependent = sum(one.steady for one in found.values())
    out.line(f"{runs.number} runs: {dependent} of {len(plan.tests)} tests depend on the tests before them")
    return not found and not failed


def _tell(dependence: Dependence, options: Options, out: StyledWriter) -> None:
    victim, culprits = dependence.victim, dependence.culprits
    how = "passes on fresh ranks and fails" if dependence.passes_alone else "fails on fresh ranks and passes"
    out.line(("victim", "bold red"), f"    {victim.id}")
    if not dependence.steady:
        out.line(f"          {how} on shared ones, but did not do so again: it is flaky, or the machine was busy")
        return
    if not culprits:
        out.line(f"          {how} on ranks that could be shared, even if it is the first on them")
    else:
        after = "this" if len(culprits) == 1 else f"these {len(culprits)}, but after no half of them"
        out.line(f"          {how} after {after}:")
        for culprit in culprits:
            out.line(("polluter" if dependence.passes_alone else "helper", "bold"), f"  {culprit.id}")
    out.line(f"rerun: {rerun_on_shared_ranks(options, (*culprits, victim))}")
