"""pytest's plugin: ``pytest --slots auto test/distributed`` runs distributed tests as ``run_test.py`` does, and
``@pytest.mark.ranks(4)`` runs a function or a class of pytest in ranks (see ``pytest_ranks``).

pytest collects, selects and reports. Tests of our base classes run in class processes and ranks on slots. All other
tests, those that need a fixture or mark of pytest, and all without ``--slots`` or the ini option ``torch_ext_slots``
run in pytest's own process.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torch_ext.results import Event, Remark, RunEnded, Stalled, Status, TestName, TestResult

if TYPE_CHECKING:
    from torch_ext.runner.names import TestFile

_OFF, _AUTO = "off", "auto"
# Package of the base classes whose tests run in ranks.
_BASES = "torch_ext.testing._internal._distributed."
# Marks that work only in pytest's own process.
_MARKS = ("skip", "skipif", "xfail", "usefixtures")
# Fixtures in which pytest wraps unittest's own setup.
_UNITTEST = ("_unittest_", "_xunit_", "unittest_", "xunit_", "request")
# The module that runs items in ranks; see Note [Items in ranks] there. Loaded in processes that do so alone.
_SIDE = "torch_ext.testing._internal._distributed.pytest_rank"
_FORKS = pytest.StashKey[Any]()
# Threads of pytest-xdist in this process, which its forks can do without.
_harmless: set[int] = set()
_MARKERS = (
    "ranks(n, timeout=120): run the test in n ranks, fresh processes with the fixtures rank, world_size, device, mesh",
    "forked_warm(timeout=None): run the test in a fork of a process that has imported what its file imports",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run distributed tests in fresh processes, as many at a time as their ranks fit into N slots"
    parser.getgroup("torch_ext").addoption("--slots", metavar="N|auto|off", default="", help=text)
    parser.addini("torch_ext_slots", f"{text}; off by default", default=_OFF)
    text = "run each test without ranks in a fork of a process that has imported what its file imports"
    parser.getgroup("torch_ext").addoption("--forked-warm", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use pytest-xdist's ``-n N`` as the number of concurrent classes, before xdist starts processes."""
    _slots_value(config)  # a usage error comes first
    processes = config.getoption("numprocesses", None, skip=True) if config.pluginmanager.has_plugin("xdist") else None
    if _is_on(config) and processes:
        config.option.torch_ext_jobs = int(processes)
        config.option.numprocesses = None
        config.option.dist = "no"
        config.option.tx = []


def pytest_configure(config: pytest.Config) -> None:
    """Exclude pytest-xdist's threads, which start before any test, from hang detection and from the check of forks."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    if hasattr(config, "workerinput"):
        from torch_ext.world._os import threads_of
        from torch_ext.world.threads import leave_out

        leave_out(others=True)
        _harmless.update(threads_of() - {threading.get_native_id()})


# Tests in ranks


def _fixture(name: str, what: str) -> Any:
    def value(request: pytest.FixtureRequest) -> Any:
        return _of_place(name, request)

    value.__doc__ = f"{what}, in a test with ``@pytest.mark.ranks(n)``."
    return pytest.fixture(name=name)(value)


_rank = _fixture("rank", "The number of this rank")
_world_size = _fixture("world_size", "The number of ranks")
_device = _fixture("device", "The ``torch.device`` of this rank, which is current")
_mesh = _fixture("mesh", "A device mesh of all ranks, with its process group")


def _of_place(name: str, request: pytest.FixtureRequest) -> Any:
    try:
        return request.getfixturevalue(name)  # another plugin's fixture of that name, which was loaded before
    except pytest.FixtureLookupError as error:
        if error.argname != name:
            raise
    place = getattr(sys.modules.get(_SIDE), "place", None)
    if place is None:
        pytest.fail(f"the fixture {name!r} of torch_ext is for tests with @pytest.mark.ranks(n)", pytrace=False)
    return getattr(place, name)


def _prepare_forks(session: pytest.Session) -> None:
    """Fork the zygote of tests in ranks, before the first test runs."""
    option = session.config.option
    if any(getattr(option, name, False) for name in ("collectonly", "setuponly", "setupplan")):
        return
    wanted = [item for item in session.items if _wants_fork(item)]
    if wanted:
        from torch_ext.runner.pytest_ranks import Forks

        session.stash[_FORKS] = Forks(session, wanted, _harmless)


def _wants_fork(item: pytest.Item) -> bool:
    if item.get_closest_marker("ranks"):
        return True
    asks = item.config.getoption("--forked-warm") or item.get_closest_marker("forked_warm")
    return bool(asks) and isinstance(item, pytest.Function) and not _runs_in_ranks(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run an item in forks. In the forks, ``pytest_rank`` has this hook."""
    forks = item.session.stash.get(_FORKS, None)
    if forks is None or item not in forks:
        return None
    forks.run(item, nextitem)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the process that holds fixtures of tests in ranks."""
    if forks := session.stash.get(_FORKS, None):
        forks.close()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Explain the meaning of ``-n`` with and without ``--slots``."""
    jobs = getattr(config.option, "torch_ext_jobs", None)
    if jobs:
        return f"torch_ext: -n {jobs} runs at most {jobs} classes at a time on slots; no process of pytest-xdist starts"
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return "torch_ext: -n starts processes that know nothing of each other's ranks; --slots auto shares the cores"
    return None


def _slots_value(config: pytest.Config) -> str:
    """Return ``"off"``, ``"auto"`` or a number; raise UsageError for another value."""
    value = str(config.getoption("--slots", "") or config.getini("torch_ext_slots") or _OFF)
    if value not in (_OFF, _AUTO) and not (value.isdecimal() and int(value)):
        raise pytest.UsageError(f"got --slots {value!r}, expected a number above 0, auto or off")
    return value


def _is_on(config: pytest.Config) -> bool:
    stops = any(config.getoption(name, False) for name in ("usepdb", "trace", "collectonly", "setuponly", "setupplan"))
    return _slots_value(config) != _OFF and not stops and not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the distributed tests, then the rest of ``session.items`` as pytest does."""
    _prepare_forks(session)
    if not _is_on(session.config) or (session.testsfailed and not session.config.option.continue_on_collection_errors):
        return None  # pytest explains why no test runs
    ranked = [item for item in session.items if isinstance(item, pytest.Function) and _runs_in_ranks(item)]
    inside = {item: why for item in ranked if (why := _pytest_feature(item))}
    eligible = [item for item in ranked if item not in inside]
    if inside:
        first, why = next(iter(inside.items()))
        warning = f"{len(inside)} distributed tests run in pytest's process, such as {first.nodeid}, which {why}"
        session.config.issue_config_time_warning(pytest.PytestWarning(warning), stacklevel=2)
    if not eligible:
        return None
    _Run(session, eligible).run()
    # pytest's own loop would count the failures so far as collection errors.
    rest = [item for item in session.items if item not in set(eligible)]
    for item, following in zip(rest, [*rest[1:], None], strict=False):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        _stop_if_requested(session)
    return True


def _stop_if_requested(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _runs_in_ranks(item: pytest.Function) -> bool:
    cls = getattr(item, "cls", None)
    return cls is not None and any(base.__module__.startswith(_BASES) for base in cls.__mro__)


def _pytest_feature(item: pytest.Function) -> str:
    """Describe a feature of pytest that ``item`` needs; empty if none."""
    for mark in _MARKS:
        if item.get_closest_marker(mark) is not None:
            return f"has the mark {mark!r}"
    fixtures = [name for name in item.fixturenames if not name.startswith(_UNITTEST)]
    return f"uses the fixture {fixtures[0]!r}" if fixtures else ""


class _Run:
    """Runs ``items`` and reports each under its own name. Handles the runner's events as a reporter."""

    def __init__(self, session: pytest.Session, items: Sequence[pytest.Function]) -> None:
        from torch_ext.runner.names import describe

        self._session = session
        self._files: dict[Path, TestFile] = {}
        self._items: dict[TestName, pytest.Function] = {}
        for item in items:
            file = self._files.setdefault(item.path, describe(item.path, session.config.rootpath))
            self._items[TestName(file.name, item.cls.__name__, item.originalname)] = item
        self._left = dict(self._items)

    def run(self) -> None:
        """Run the items; report them in the order of collection, those without a result as failures."""
        from torch_ext.runner.execute import open_executor
        from torch_ext.runner.options import RunOptions
        from torch_ext.runner.reporters.tally import InOrder
        from torch_ext.runner.schedule import make_plan

        config = self._session.config
        value, jobs = _slots_value(config), getattr(config.option, "torch_ext_jobs", None)
        # With --maxfail=1, a class must stop at its first failure too.
        failfast = config.getoption("maxfail", 0) == 1
        slots, command = None if value == _AUTO else int(value), "python -m pytest"
        options = RunOptions(config.rootpath, failfast=failfast, jobs=jobs or 0, slots=slots, command=command)
        with contextlib.closing(open_executor(options)) as executor:
            collected = list(executor.collect(list(self._files.values())))
            needs = {test: need for one in collected for test, need in zip(one.tests, one.needs, strict=False)}
            broken = {one.file.name: one.error for one in collected if one.error}
            tests = [test for test in self._items if test.file not in broken]
            plan = make_plan(list(self._files.values()), tests, needs)
            for name, error in broken.items():
                self._report_error(name, error)
            ordered = InOrder(plan, self)
            try:
                executor.run(plan, ordered)
            except KeyboardInterrupt:
                ordered(RunEnded())  # release the results of classes that ended out of order
                raise
            ordered(RunEnded())
            _stop_if_requested(self._session)
        for test, item in list(self._left.items()):
            missing = Remark("The test did not run: its class or file ended before it began.")
            self._report(item, TestResult(test, Status.FAILED, 0.0, (missing,)))

    def __call__(self, event: Event) -> None:
        """Report a result as pytest reports the tests that it runs itself."""
        if isinstance(event, Stalled):
            self._session.config.get_terminal_writer().line(f"\n{event.test.id}: {event.text}")
        if not isinstance(event, TestResult):
            return
        if item := self._left.pop(event.test, None):
            self._report(item, event)
        else:
            from torch_ext.runner.reporters.text import describe_failure

            self._report_error(event.test.id, describe_failure(event))
        _stop_if_requested(self._session)

    def _report(self, item: pytest.Function, result: TestResult) -> None:
        hook, now_s = item.ihook, time.time()
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for when in ("setup", "call", "teardown"):
            report = pytest.TestReport(
                item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "passed", None, when,
                duration=result.duration_s if when == "call" else 0.0, start=now_s - result.duration_s, stop=now_s,
            )  # fmt: skip
            if when == "call":
                self._fill(report, item, result)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _fill(self, report: pytest.TestReport, item: pytest.Function, result: TestResult) -> None:
        from torch_ext.runner.reporters.text import describe_failure

        if result.status is Status.SKIPPED:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {result.reason}")
        elif result.status is Status.XFAIL:
            report.outcome, report.wasxfail = "skipped", "expectedFailure"
        elif result.status.counted is Status.FAILED:
            report.outcome = "failed"
            rerun = f"rerun: python -m pytest {shlex.quote(item.nodeid)}"
            report.longrepr = f"{describe_failure(result)}\n{rerun}"
        if result.warnings:
            report.sections = [("torch_ext", "\n".join(result.warnings))]

    def _report_error(self, name: str, text: str) -> None:
        """Report the failure of a file or a class, which is no test."""
        file, _, cls = name.partition("::")
        location = (file, 0, cls or file)
        report = pytest.TestReport(name, location, {}, "failed", text, "setup")
        hook = self._session.config.hook
        hook.pytest_runtest_logstart(nodeid=name, location=location)
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=name, location=location)
