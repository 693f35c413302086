"""Runs an item of pytest in its ranks, and the item's wider fixtures in the process that the ranks are forked from. The
runner's ``pytest_ranks`` is the side of pytest's own process.

Note [Items in ranks]
~~~~~~~~~~~~~~~~~~~~~
Before the first test, pytest's process forks a zygote, which therefore has the collected items. The *holder*, a copy of
that zygote, makes the fixtures that are wider than a function and tears them down when pytest would; it runs no test.
Ranks are forks of the holder: they have these fixtures and run everything else by pytest's own hooks, each for itself.
Each rank writes its reports into a file as soon as they are there, so that a rank that is killed has reported too.
Fixtures of plain tests stay in pytest's process: a wider fixture that both kinds of tests use is made twice.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest import capture, skipping, tmpdir
from _pytest.runner import CallInfo, call_and_report
from _pytest.scope import Scope

from torch_ext import accelerator
from torch_ext.testing._internal._distributed import receipts
from torch_ext.testing._internal._distributed.helpers import reserved_port as reserved_port  # for pytest_ranks
from torch_ext.world import _os
from torch_ext.world import rank as world_rank
from torch_ext.world.child import reason_not_to_fork
from torch_ext.world.protocol import Part, RankStatus, Receipt

__tracebackhide__ = True  # pytest: its frames say nothing to users

# Plugins that would act for pytest's own process: a watchdog's thread, a debugger without a terminal.
_ABSENT = ("faulthandler", "pdbinvoke")
# What ends pytest rather than a test.
_LEAVE = (pytest.exit.Exception, KeyboardInterrupt)


@dataclass(frozen=True)
class Place:
    """One rank of the item that the holder has set up."""

    rank: int
    world_size: int
    folder: str  # for the reports of the ranks, and the file where their process group meets

    @property
    def device(self) -> torch.device:
        """The rank's device, which is current from now on."""
        accelerator.request_devices(self.world_size)
        accelerator.set_device_index(self.rank)
        return accelerator.current_device(self.rank)

    @property
    def mesh(self) -> Any:
        """A mesh of all ranks in one dimension. Initializes the default process group unless the test has done so."""
        device = self.device
        if not dist.is_initialized():
            store = dist.FileStore(os.path.join(self.folder, "store"), self.world_size)
            dist.init_process_group(accelerator.backend(), store=store, rank=self.rank, world_size=self.world_size)
            receipts.end_group_unless_released()
        return dist.device_mesh.init_device_mesh(device.type, (self.world_size,))


@dataclass
class _Held:
    """What the holder has set up, as its forks inherit it."""

    item: Any = None
    tmp_path: Path | None = None  # the same for all ranks
    began: tuple[dict[str, str], str] | None = None  # environment and directory at the begin
    changes: dict[str, str | None] = field(default_factory=dict)  # of the environment, by wider fixtures
    directory: str = ""


session: Any = None  # of pytest's process, in its forks
place: Place | None = None  # of this rank
_held = _Held()
_action: Callable[[pytest.Item], None] | None = None  # what the holder or rank does with an item
_records: list[tuple[str, Any]] = []  # of the holder, for pytest's process
_errors: dict[str, BaseException] = {}  # by phase
_kept: list[Any] = []  # captures of other processes, whose files would warn if they were collected


# Hooks: the holder and ranks register this module as a plugin


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    """Do this process's part of an item within the wrappers around it, such as filters of warnings."""
    if _action is not None:
        _action(item)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """In a rank, check the body for races. The body fails with an error of the check."""
    is_over = False
    try:
        with receipts.race_check():
            try:
                yield
            except BaseException as error:
                blamed = accelerator.blame_races(error, is_skip=isinstance(error, pytest.skip.Exception))
                if blamed is error:
                    raise
                raise blamed
            is_over = True
    except Exception as error:
        # The check's own frames say nothing; its text names the user's lines.
        raise error.with_traceback(None if is_over else error.__traceback__)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Keep the error of a phase."""
    if call.excinfo is not None:
        _errors[call.when] = call.excinfo.value


def pytest_warning_recorded(warning_message: warnings.WarningMessage, nodeid: str) -> None:
    """Record a warning for the summary of pytest's process, of the holder or rank 0."""
    warning = warning_message.message
    try:
        pickle.loads(pickle.dumps(warning))
    except Exception:  # a class of the test's own, with arguments that it does not keep
        warning = UserWarning(str(warning))
    if place is None or place.rank == 0:
        _record("warning", (warning, warning_message.filename, warning_message.lineno, nodeid))


def _record(kind: str, what: Any) -> None:
    if place is None:
        _records.append((kind, what))
        return
    with open(os.path.join(place.folder, str(place.rank)), "ab") as file:
        pickle.dump((kind, what), file)


# In the holder


def _become_holder(config: pytest.Config) -> None:
    if _held.began is not None:
        return
    _held.began = dict(os.environ), os.getcwd()
    manager = config.pluginmanager
    manager.register(sys.modules[__name__])
    # The plugin of a worker of pytest-xdist owns a connection.
    workers = [each for each in manager.get_plugins() if hasattr(each, "sendevent")]
    for plugin in filter(None, [*map(manager.get_plugin, _ABSENT), *workers]):
        manager.unregister(plugin)
    if capturing := manager.get_plugin("capturemanager"):  # other files, since those of pytest's process are shared
        _kept.append(capturing._global_capturing)
        capturing._global_capturing = None
        capturing.start_global_capturing()
        capturing.suspend_global_capture()


def set_up(index: int) -> bytes:
    """Make the fixtures of the item that are wider than a function; return the pickled records."""
    global _action
    _held.item = item = session.items[index]
    _become_holder(item.config)
    before, stack = _os.threads_of(), item.session._setupstate

    def make() -> None:
        skipping.pytest_runtest_setup(item)
        stack.teardown_exact(item.parent)
        if not item._request:
            item._initrequest()
        stack.setup(item.parent)
        stack.stack[item] = ([], None)  # fixtures belong to an active item
        try:
            for name in item.fixturenames:
                definition = next(reversed(item._request._arg2fixturedefs.get(name) or ()), None)
                if definition and definition._scope is not Scope.Function:
                    item._request._get_active_fixturedef(name)
                    _refuse_if_unsafe(f"the {definition._scope.value} fixture {name!r}", before)
        finally:
            del stack.stack[item]
        if {"device", "mesh"}.intersection(item.fixturenames):
            accelerator.device_type()  # loads the device once for all ranks

    _action = lambda _: _report_failure("setup", make)  # noqa: E731
    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    factory = getattr(item.config, "_tmp_path_factory", None)
    _held.tmp_path = factory and tmpdir._mk_tmp(item._request, factory)
    environment, _ = _held.began or ({}, "")
    now = {name: os.environ.get(name) for name in {*environment, *os.environ}}
    _held.changes = {name: value for name, value in now.items() if value != environment.get(name)}
    _held.directory = os.getcwd()
    if reason_not_to_fork(before):
        _record("unsafe", None)
    return _taken()


def _taken() -> bytes:
    found = pickle.dumps(_records)
    _records.clear()
    return found


def _refuse_if_unsafe(what: str, threads: set[int]) -> None:
    if why := reason_not_to_fork(threads):
        pytest.fail(
            f"{what} cannot be shared by forks: once it is made, {why.replace('it ', 'its process ', 1)}. Make it a "
            "fixture of function scope, so that each process makes its own.",
            pytrace=False,
        )


def tear_down(following: int | None) -> bytes:
    """Tear down the wider fixtures that the item ``following`` does not share; all if it is None."""
    if _held.item is None:  # interrupted before it had one
        return _taken()
    parent = None if following is None else session.items[following].parent
    _report_failure("teardown", lambda: _held.item.session._setupstate.teardown_exact(parent))
    return _taken()


def _report_failure(when: Any, run: Callable[[], None]) -> None:
    item = _held.item
    capturing = item.config.pluginmanager.get_plugin("capturemanager")
    try:
        with capturing.item_capture(when, item) if capturing else nullcontext():
            call = CallInfo.from_call(run, when, reraise=_LEAVE)
    except _LEAVE as error:
        _record("leave", (isinstance(error, KeyboardInterrupt), str(error)))
        return
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        _record("report", item.config.hook.pytest_report_to_serializable(config=item.config, report=report))


# In a rank


def run(here: Place) -> None:
    """The task of a rank."""
    global place, _action
    place, item = here, _held.item
    if item is None:
        raise RuntimeError("the process that has collected this test cannot be forked: a message above says why")
    for name, value in _held.changes.items():
        os.environ[name] = value or ""
        if value is None:
            del os.environ[name]
    if _held.began and _held.directory != _held.began[1]:
        os.chdir(_held.directory)
    if capturing := item.config.pluginmanager.get_plugin("capturemanager"):
        _kept.append(capturing._global_capturing)
        capturing._global_capturing = capture._get_multicapture("no")  # the world captures, also of a rank that dies
        capturing._global_capturing.start_capturing()
        if capturing.is_globally_capturing():
            sys.stdin = capture.DontReadFromInput()
    for finalizers, _ in item.session._setupstate.stack.values():
        finalizers.clear()  # the holder's
    tmpdir._mk_tmp = _shared_path
    _action = _run_phases
    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)


def _shared_path(request: Any, factory: Any) -> Any:
    factory._retention_policy = "all"  # one rank must not remove what another still uses
    return _held.tmp_path


def _run_phases(item: Any) -> None:
    rank = world_rank.this_rank()
    reports: list[Any] = []
    try:
        for when in ("setup", "call"):
            if not reports or reports[0].passed:
                reports.append(_report(item, when))
        receipt = _receipt(reports)
        if receipt.status is RankStatus.FAILED and not receipt.is_expected:
            rank.submit(receipt)  # now: a teardown may wait for peers
        reports.append(_report(item, "teardown", nextitem=None))
        receipt = _receipt(reports)
    except _LEAVE as error:
        _record("leave", (isinstance(error, KeyboardInterrupt), str(error)))
        receipt = world_rank.failure(error)
    if not rank.submitted and not rank.submit(receipt):
        receipts.end_group()


def _report(item: Any, when: Any, **arguments: Any) -> Any:
    report = call_and_report(item, when, log=False, **arguments)
    _record("report", item.config.hook.pytest_report_to_serializable(config=item.config, report=report))
    return report


def _receipt(reports: list[Any]) -> Receipt:
    # A strict xfail that passed has no error: the world decides whether it passed.
    bad = next((each for each in reports if not each.passed and each.when in _errors), None)
    if bad is None:
        return receipts.passed()
    if bad.skipped and not hasattr(bad, "wasxfail"):
        return receipts.skipped(bad.longrepr[-1])
    parts = () if bad.failed else (Part("", expectable=True),)
    return replace(world_rank.failure(_errors[bad.when]), parts=parts)
