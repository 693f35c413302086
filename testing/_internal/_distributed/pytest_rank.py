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
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
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
from torch_ext.world import _os, settings
from torch_ext.world import rank as world_rank
from torch_ext.world.child import reason_not_to_fork
from torch_ext.world.protocol import Part, RankStatus, Receipt

# Plugins that would act for pytest's own process: a watchdog's thread, a debugger without a terminal.
_ABSENT = ("faulthandler", "pdbinvoke")


@dataclass(frozen=True)
class Place:
    """One rank of one item."""

    rank: int
    world_size: int
    index: int  # of the item, in ``session.items``
    folder: str  # for the reports of the ranks, and the file where their process group meets
    tmp_path: str  # of the item, the same on each rank; a rank that asks for it makes it
    changes: dict[str, str | None]  # of the environment, by wider fixtures
    directory: str  # the working directory, if a wider fixture has changed it
    reports: list[tuple[str, Any]] = field(default_factory=list)  # what this rank has written

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


@dataclass(frozen=True)
class Held:
    """The answer of the holder. ``report``: of a fixture that failed or skipped, in pytest's serial form."""

    report: Any = None
    leave: tuple[bool, str] | None = None  # of pytest.exit(), or of a KeyboardInterrupt if the first is True
    is_unsafe: bool = False  # the holder cannot be forked any more
    changes: dict[str, str | None] = field(default_factory=dict)
    directory: str = ""
    warnings: list[tuple[str, Any]] = field(default_factory=list)


session: pytest.Session | None = None  # of pytest's process, in its forks
action: Callable[[pytest.Item], None] | None = None  # of this process when it is to run an item; None in pytest's own
place: Place | None = None
_began: tuple[dict[str, str], str] | None = None
_records: list[tuple[str, Any]] = []
_errors: dict[str, BaseException] = {}  # by phase
_races = ExitStack()


def _item(index: int) -> Any:
    if session is None:
        raise AssertionError("the ranks of an item of pytest can only be forked from a process that has collected it")
    return session.items[index]


# In the holder


def _become_holder(config: pytest.Config) -> None:
    global _began
    if _began is not None:
        return
    _began = dict(os.environ), os.getcwd()
    manager = config.pluginmanager
    for plugin in [*map(manager.get_plugin, _ABSENT), *(each for each in manager.get_plugins() if _sends(each))]:
        if plugin is not None:
            manager.unregister(plugin)
    if capturing := manager.get_plugin("capturemanager"):  # files of its own: those of pytest's process are shared
        capturing._global_capturing = None
        capturing.start_global_capturing()
        capturing.suspend_global_capture()


def _sends(plugin: object) -> bool:
    """Whether ``plugin`` is that of a worker of pytest-xdist, which owns a connection."""
    return hasattr(plugin, "sendevent")


def _in_hook(item: Any, run: Callable[[Any], None]) -> None:
    """Call ``run(item)`` within the wrappers around an item: assertions with details, filters of warnings."""
    global action
    action = run
    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)


def set_up(index: int) -> bytes:
    """Make the fixtures of the item that are wider than a function; return a pickled :class:`Held`."""
    item = _item(index)
    _become_holder(item.config)
    _records.clear()
    before, found = _os.threads_of(), []

    def make() -> None:
        skipping.pytest_runtest_setup(item)
        item.session._setupstate.teardown_exact(item.parent)
        if not item._request:
            item._initrequest()
        stack = item.session._setupstate
        stack.setup(item.parent)
        stack.stack[item] = ([], None)  # fixtures belong to an active item
        try:
            for name in item.fixturenames:
                definitions = item._request._arg2fixturedefs.get(name)
                if definitions and definitions[-1]._scope is not Scope.Function:
                    item._request._get_active_fixturedef(name)
                    _refuse_if_unsafe(f"the {definitions[-1]._scope.value} fixture {name!r}", before)
        finally:
            del stack.stack[item]
        if {"device", "mesh"}.intersection(item.fixturenames):
            accelerator.device_type()  # loads the device once for all ranks

    _in_hook(item, lambda _: found.append(_held(item, "setup", make)))
    held: Held = found[0]
    environment, directory = _began or ({}, "")
    changes = {
        name: os.environ.get(name)
        for name in {*environment, *os.environ}
        if environment.get(name) != os.environ.get(name)
    }
    here = os.getcwd() if os.getcwd() != directory else ""
    unsafe = bool(reason_not_to_fork(before))
    return pickle.dumps(replace(held, changes=changes, directory=here, warnings=[*_records], is_unsafe=unsafe))


def _refuse_if_unsafe(what: str, threads: set[int]) -> None:
    if why := reason_not_to_fork(threads):
        pytest.fail(
            f"{what} cannot be shared by forks: once it is made, {why.replace('it ', 'its process ', 1)}. Make it a "
            "fixture of function scope, so that each process makes its own.",
            pytrace=False,
        )


def tear_down(indices: tuple[int, int | None]) -> bytes:
    """Tear down the wider fixtures of the first item that the second one does not share; all if it is None. Returns a
    pickled :class:`Held`.
    """
    item, following = _item(indices[0]), None if indices[1] is None else _item(indices[1]).parent
    return pickle.dumps(_held(item, "teardown", lambda: item.session._setupstate.teardown_exact(following)))


def _held(item: Any, when: Any, run: Callable[[], None]) -> Held:
    capturing = item.config.pluginmanager.get_plugin("capturemanager")
    try:
        with capturing.item_capture(when, item) if capturing else nullcontext():
            call = CallInfo.from_call(run, when, reraise=(pytest.exit.Exception, KeyboardInterrupt))
    except (pytest.exit.Exception, KeyboardInterrupt) as error:
        return Held(leave=(isinstance(error, KeyboardInterrupt), str(error)))
    if call.excinfo is None:
        return Held()
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    return Held(item.config.hook.pytest_report_to_serializable(config=item.config, report=report))


# In a rank


def run(here: Place) -> None:
    """The task of a rank."""
    global place
    place, item = here, _item(here.index)
    for name, value in here.changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if here.directory:
        os.chdir(here.directory)
    if capturing := item.config.pluginmanager.get_plugin("capturemanager"):
        capturing._global_capturing = capture._get_multicapture("no")  # the world captures, also of a rank that dies
        capturing._global_capturing.start_capturing()
    for finalizers, _ in item.session._setupstate.stack.values():
        finalizers.clear()  # the holder's
    tmpdir._mk_tmp = _shared_path
    _in_hook(item, _run_phases)


def _shared_path(request: Any, factory: Any) -> Path:
    factory._retention_policy = "all"  # one rank must not remove what another still uses
    path = Path(place.tmp_path) if place else factory.mktemp("rank")
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def record(kind: str, what: Any) -> None:
    """Add ``what`` to the records of this rank or of the holder."""
    if place is None:
        _records.append((kind, what))
        return
    with open(os.path.join(place.folder, str(place.rank)), "ab") as file:
        pickle.dump((kind, what), file)


def note_error(when: str, error: BaseException) -> None:
    """Note that a phase of the item has raised ``error``."""
    _errors[when] = error


def note_warning(message: warnings.WarningMessage, nodeid: str) -> None:
    """Record a warning for the summary of pytest's process."""
    warning = message.message
    try:
        pickle.loads(pickle.dumps(warning))
    except Exception:  # a class of the test's own, with arguments that it does not keep
        warning = UserWarning(str(warning))
    if place is None or place.rank == 0:
        record("warning", (warning, message.filename, message.lineno, nodeid))


def end_race_check(error: BaseException | None) -> None:
    """End the check for races at the end of the body, which ``error`` has ended, if any. Raises what counts instead."""
    blamed = error and accelerator.blame_races(error, is_skip=isinstance(error, pytest.skip.Exception))
    with _races:
        if blamed is not None:
            raise blamed


def _run_phases(item: Any) -> None:
    rank = world_rank.this_rank()
    _races.enter_context(receipts.race_check())
    reports: list[Any] = []
    try:
        for when in ("setup", "call"):
            if not reports or reports[0].passed:
                reports.append(_report(item, when))
        first = reports[-1]
        if first.failed and first.when in _errors:  # not a strict xfail that passed: the world decides about that
            rank.submit(_failed(first))  # now: a teardown may wait for peers
        with suppress(Exception):
            _races.close()  # of a body that has not run
        reports.append(_report(item, "teardown", nextitem=None))
    except (pytest.exit.Exception, KeyboardInterrupt) as error:
        record("leave", (isinstance(error, KeyboardInterrupt), str(error)))
        if not rank.submitted:
            rank.submit(world_rank.failure(error))
    if not rank.submitted:
        _submit(rank, _receipt(reports))


def _report(item: Any, when: Any, **arguments: Any) -> Any:
    report = call_and_report(item, when, log=False, **arguments)
    record("report", item.config.hook.pytest_report_to_serializable(config=item.config, report=report))
    return report


def _failed(report: Any, parts: tuple[Part, ...] = ()) -> Receipt:
    return replace(world_rank.failure(_errors[report.when]), parts=parts)


def _receipt(reports: list[Any]) -> Receipt:
    for report in reports:
        if report.when in _errors and not report.passed:
            if report.failed:
                return _failed(report)
            if hasattr(report, "wasxfail"):
                return _failed(report, (Part("", expectable=True),))
            return receipts.skipped(report.longrepr[-1])
    return receipts.passed()


def _submit(rank: world_rank.Rank, receipt: Receipt) -> None:
    if receipt.status is RankStatus.PASSED and settings.full_teardown():
        receipts.end_group()
    if not rank.submit(receipt):
        receipts.end_group()
