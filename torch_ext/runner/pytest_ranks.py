"""Items of pytest that run in forks: ``@pytest.mark.ranks(4)`` in ranks, ``--forked-warm`` each in one process. Runs in
pytest's process, which waits for the ranks, judges them and reports. See Note [Items in ranks] in ``pytest_rank``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from _pytest.runner import CallInfo

from torch_ext.world import files, provider, settings, verdict, wording
from torch_ext.world.follow import start_world
from torch_ext.world.outcome import Outcome, may_be_expected
from torch_ext.world.protocol import Receipt
from torch_ext.world.settings import Limits, launcher_variables, seconds_of
from torch_ext.world.start import RankTask, ZygoteLostError
from torch_ext.world.tree import ZygoteCopy, ZygoteDiedError
from torch_ext.world.verdict import Judgement, WorldReport, render

# The module of the other side.
SIDE = "torch_ext.testing._internal._distributed.pytest_rank"
# Seconds that a process without peers has for its teardown after a failure.
_TEARDOWN_S = 60.0
_LOST = (
    "the process that makes fixtures wider than a function, for tests in ranks, ended during this test, by such a "
    "fixture or by a signal; the next test gets a new one, which makes these fixtures again"
)
_PHASES = ("setup", "call", "teardown")


def ranks_of(item: pytest.Item) -> int:
    """Return the number of ranks that the mark of ``item`` asks for; 0 without a mark. Raises ValueError."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return 0
    number = mark.args[0] if len(mark.args) == 1 and not set(mark.kwargs).difference({"timeout"}) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        given = ", ".join([*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())])
        raise ValueError(f"got pytest.mark.ranks({given}), expected a number of ranks above 0, and at most timeout=S")
    bases = getattr(getattr(item, "cls", None), "__mro__", ())
    if any(base.__module__.startswith("torch_ext.testing.") for base in bases):
        raise ValueError("pytest.mark.ranks is for functions and plain classes; this class starts its own ranks")
    return number


def _limit_s(item: pytest.Item) -> float:
    """Return the time limit of ``item`` in seconds; infinite without ranks, unless its mark has one."""
    ranks, warm = item.get_closest_marker("ranks"), item.get_closest_marker("forked_warm")
    own = next((mark.kwargs["timeout"] for mark in (ranks, warm) if mark and "timeout" in mark.kwargs), None)
    usual = settings.TIMEOUT_DEFAULT if ranks else float("inf")
    return settings.time_limit_s() or (usual if own is None else seconds_of(own, f"the timeout of {item.nodeid}"))


class Forks:
    """Runs ``items`` of ``session`` in forks of its process. Make it before any test has run. ``harmless``: threads of
    this process that forks can do without.
    """

    def __init__(self, session: pytest.Session, items: Collection[pytest.Item], harmless: Collection[int]) -> None:
        self._session = session
        self._index = {item: index for index, item in enumerate(session.items)}
        self._items = set(items)
        self._holder: ZygoteCopy | None = None
        self._is_unsafe = False  # the holder cannot be forked any more
        side: Any = importlib.import_module(SIDE)
        side.session, self._side = session, side
        if factory := getattr(session.config, "_tmp_path_factory", None):
            factory.getbasetemp()  # one for all processes
        if settings.wants_interpreter():
            self._why = "TORCH_EXT_START_METHOD asks for interpreters, which have collected no test"
        else:
            self._why = provider.prepare(SIDE, harmless)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def close(self) -> None:
        """End the holder, with the fixtures that it still has."""
        if self._holder is not None:
            with contextlib.suppress(ZygoteDiedError):
                self._holder.call(f"{SIDE}:tear_down", None)
            self._holder.close()

    def run(self, item: Any, following: pytest.Item | None) -> None:
        """Run ``item`` and report it as pytest reports the items that it runs itself."""
        hook, session = item.ihook, self._session
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        *reports, down = self._reports(item)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        if session.shouldfail or session.shouldstop:
            following = None
        downs = [down, self._tear_down(item, following)]
        call = CallInfo.from_call(lambda: session._setupstate.teardown_exact(following), "teardown")
        downs.append(hook.pytest_runtest_makereport(item=item, call=call))
        made = sorted((each for each in downs if each is not None), key=lambda each: (not each.failed, each.passed))
        report = made[0]
        report.sections += [("another teardown", each.longreprtext) for each in made[1:] if not each.passed]
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    # The parts of an item's life

    def _reports(self, item: Any) -> list[Any]:
        """Return the reports of the phases. The last report is the teardown's, None if no rank made one."""
        try:
            if self._why:
                raise ValueError(f"pytest's process cannot be forked, after importing the tests: {self._why}")
            size = ranks_of(item)
            if self._holder is None:
                self._holder = ZygoteCopy(provider.zygote_for(SIDE))
                self._holder.wait_loaded()
            records = pickle.loads(self._holder.call(f"{SIDE}:set_up", self._index[item]))
            self._is_unsafe = ("unsafe", None) in records
            if reports := self._replay(item, records):
                return [*reports, None]
            return self._run(self._holder, item, size)
        except (ZygoteDiedError, ZygoteLostError):
            self._holder = None
            return [_made(item, "setup", _LOST), None]
        except (ValueError, OSError) as error:
            return [_made(item, "setup", str(error)), None]

    def _tear_down(self, item: Any, following: pytest.Item | None) -> Any:
        """Tear down what the holder has and the next item in forks does not share."""
        if self._holder is None:
            return None
        later = [] if following is None or self._is_unsafe else self._session.items[self._index[following] :]
        index = next((self._index[each] for each in later if each in self._items), None)
        try:
            records = pickle.loads(self._holder.call(f"{SIDE}:tear_down", index))
        except ZygoteDiedError:
            self._holder = None
            return _made(item, "teardown", _LOST)
        if self._is_unsafe:
            self._holder.close()
            self._holder = None
        return next(iter(self._replay(item, records)), None)

    def _run(self, holder: ZygoteCopy, item: Any, size: int) -> list[Any]:
        number = max(1, size)
        limits = Limits(_limit_s(item), hang_s=settings.hang_after_s(), grace_s=1.0 if number > 1 else _TEARDOWN_S)
        show = settings.show_output() or item.config.getoption("capture", "fd") == "no"
        folder = tempfile.mkdtemp(dir=files.folder())

        def task(rank: int, port: int) -> RankTask:
            variables = launcher_variables(rank, number, port) if size else {}
            own = {name: value for name, value in variables.items() if not name.startswith("TORCHELASTIC")}
            return RankTask(self._side.run, (self._side.Place(rank, number, folder),), environment=own)

        try:
            with self._side.reserved_port() as port:
                tasks = [task(rank, port) for rank in range(number)]
                with start_world(holder, tasks, show=show, test=item.nodeid) as world:
                    outcomes = world.wait(limits)
                    took_s = world.took_s
            written = [list(_written(os.path.join(folder, str(rank)))) for rank in range(number)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return _judged(item, outcomes, [self._replay(item, records) for records in written], took_s)

    def _replay(self, item: Any, records: Sequence[tuple[str, Any]]) -> list[Any]:
        """Repeat here what a fork has recorded; return its reports. Raises what ends pytest."""
        reports, config = [], self._session.config
        for kind, what in records:
            if kind == "report":
                reports.append(config.hook.pytest_report_from_serializable(config=config, data=what))
            elif kind == "warning":
                warning, file, line, nodeid = what
                message = warnings.WarningMessage(warning, type(warning), file, line)
                told = {"warning_message": message, "when": "runtest", "nodeid": nodeid, "location": None}
                item.ihook.pytest_warning_recorded.call_historic(kwargs=told)
            elif kind == "leave":
                is_interrupt, text = what
                raise (KeyboardInterrupt if is_interrupt else pytest.exit.Exception)(text)
        return reports


def _written(path: str) -> Iterator[tuple[str, Any]]:
    """Yield what a rank has written, but for a record that its death cut short."""
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            yield pickle.load(file)


def _made(item: Any, when: Any, text: str, took_s: float = 0.0) -> Any:
    """Return a report of a failure that no test raised itself."""
    keywords: Any = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, "failed", text, when, duration=took_s)


def _judged(item: Any, outcomes: list[Outcome], by_rank: list[list[Any]], took_s: float) -> list[Any]:
    """Return the reports of the world: those of the guilty rank, with its peers below its failure."""
    found = verdict.judge(outcomes)
    has_failed = found.judgement is Judgement.FAILED
    lead = next(iter((*found.culprits, *found.victims)), 0)
    reports = by_rank[lead]
    expected = [each for each in by_rank if any(one.skipped and hasattr(one, "wasxfail") for one in each)]
    if has_failed and expected and may_be_expected(outcomes):
        reports = expected[0]
    elif has_failed:
        reports = _blamed(item, WorldReport(tuple(outcomes), found, took_s), lead, reports)
    if outcomes[lead].output and not (has_failed and len(outcomes) > 1):  # else the block has all output
        title = "Captured stdout" + f" of rank {lead}" * (len(outcomes) > 1)
        shown = sorted(reports, key=lambda each: (not each.failed, each.when != "call"))
        shown[0].sections.append((title, outcomes[lead].output))
    down = next((each for each in reports if each.when == "teardown"), None)
    return [*(each for each in reports if each is not down), down]


def _blamed(item: Any, report: WorldReport, lead: int, reports: list[Any]) -> list[Any]:
    failure = next((each for each in reports if each.failed), None)
    if failure is None:
        done = [each.when for each in reports]
        when = next((each.when for each in reports if each.skipped), "call" if len(done) == 3 else _PHASES[len(done)])
        made = {**{each.when: each for each in reports}, when: _made(item, when, render(report), report.took_s)}
        return [made[each] for each in _PHASES if each in made]
    if len(report.outcomes) > 1:
        shown = report.outcomes[lead].receipt
        block = render(replace(report, outcomes=tuple(_told_once(each, shown) for each in report.outcomes)))
        if hasattr(failure.longrepr, "addsection"):
            failure.longrepr.addsection(f"ranks of {item.name}", block)
        else:
            failure.longrepr = f"{failure.longreprtext}\n\n{block}"
    return reports


def _told_once(outcome: Outcome, shown: Receipt | None) -> Outcome:
    """Return ``outcome`` without a traceback that ``shown``, which pytest shows, has as well."""
    receipt = outcome.receipt
    if not receipt or not shown or wording.without_ranks(receipt.trace) != wording.without_ranks(shown.trace):
        return outcome
    return replace(outcome, receipt=replace(receipt, trace=""))
