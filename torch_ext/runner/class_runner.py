"""Supervises the class processes of one class: starts one, follows it, replaces it if it dies, until every test has its
result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch_ext.results import (
    Began,
    Died,
    Over,
    Problem,
    Remark,
    Sink,
    Stalled,
    Status,
    TestName,
    TestResult,
    raised,
)
from torch_ext.runner.class_child import ClassChild
from torch_ext.runner.loop import Task
from torch_ext.runner.messages import (
    ClassEnded,
    ClassFailed,
    ClassLeft,
    ClassOrder,
    ClassSkipped,
    TestEnded,
    TestStarted,
)
from torch_ext.runner.options import RunOptions
from torch_ext.runner.places import Place
from torch_ext.runner.schedule import Batch
from torch_ext.runner.zygotes import RunZygotes
from torch_ext.world import _os, wording
from torch_ext.world.protocol import Notice
from torch_ext.world.tree import LoadError, ZygoteClient, ZygoteDiedError

__all__ = ["ClassFacts", "ClassRunner", "Next", "what_next"]


@dataclass(frozen=True)
class ClassFacts:
    """What is known of a class process that is gone.

    Attributes:
        running: whether a test had begun and not ended.
        ended: how many tests ended in it.
        left: how many tests have not begun.
        last: its last message, if that was one about its end.
        death: its end, unless it exited by itself with code 0.
        lost_zygote: whether it ended because its zygote did.
    """

    running: bool
    ended: int
    left: int
    last: ClassEnded | ClassLeft | None
    death: Died | None = None
    lost_zygote: bool = False


@dataclass(frozen=True)
class Next:
    """What follows from the end of a class process.

    Attributes:
        test: why the test that was running failed, if one was.
        cls: why the class failed, if it did.
        go_on: whether another class process runs the tests that are left.
    """

    test: Problem | None = None
    cls: Problem | None = None
    go_on: bool = False


def what_next(facts: ClassFacts, exited: Died) -> Next:
    """Decide what the end of a class process means.

    Silence is no pass: a process that has not said that it is done has failed. A process that has not ended a single
    test is replaced only if its zygote took it along, and the caller sees to it that this happens once; so every class
    comes to its end.

    ``exited`` describes a process that exited before it was done.
    """
    left_by = facts.last.problem if isinstance(facts.last, ClassLeft) else None
    if facts.running:
        return Next(test=left_by or facts.death or exited, go_on=facts.left > 0)
    went_on = facts.left > 0 and facts.ended > 0
    if isinstance(facts.last, ClassLeft):
        unfinished = Remark(f"The class was interrupted before {facts.left} of its tests began.")
        return Next(cls=left_by or facts.death or (unfinished if facts.left and not went_on else None), go_on=went_on)
    if facts.last is not None:
        unfinished = Remark(f"unittest ended the class before {facts.left} of its tests began.")
        return Next(cls=facts.death or (unfinished if facts.left and not went_on else None), go_on=went_on)
    if facts.lost_zygote and facts.left:
        return Next(go_on=True)
    return Next(cls=facts.death or exited, go_on=went_on)


class ClassRunner:
    """Runs one batch. Every planned test gets one result: its own, or that of the process that died under it."""

    def __init__(
        self,
        zygotes: RunZygotes,
        place: Place,
        batch: Batch,
        options: RunOptions,
        sink: Sink,
    ) -> None:
        self._zygotes = zygotes
        self._place = place
        self._batch = batch
        self._options = options
        self._sink = sink
        self._zygote: ZygoteClient | None = None
        self._left = [test.method for test in batch.tests]
        self._failed = False
        self._class_is_over = False
        self._may_lose_zygote = True  # once more without having ended a test
        self._running, self._began_s = "", 0.0  # the test, and since when
        self._last: ClassEnded | ClassLeft | None = None

    def run(self) -> Task[bool]:
        """A task that runs the batch, and returns whether the run goes on after it."""
        self._sink(Began(self._class))
        while self._left and not self._class_is_over and not self._stop:
            try:
                yield from self._run_one_process()
            except LoadError as error:
                self._file_failed(raised(str(error)))
            except ZygoteDiedError as error:
                self._lost_zygote(Remark(f"{error} before any test of the class began; it is not tried again"))
        self._sink(Over(self._class))
        return not self._stop

    @property
    def _stop(self) -> bool:
        return self._failed and self._options.failfast

    def _run_one_process(self) -> Task[None]:
        batch, place, options = self._batch, self._place, self._options
        zygote = self._zygote = yield from self._zygotes.of_class(batch)
        module, argv = self._zygotes.module_of(batch.file), (str(batch.file.path),)
        order = ClassOrder(
            module, batch.cls, tuple(self._left), place.environment, argv, place.scratch, options.failfast
        )
        self._running, self._last, before = "", None, len(self._left)
        with ClassChild(order, zygote, place, options) as process:
            while (event := (yield from process.next_event())) is not None:
                self._hear(event, process)
            self._process_ended(process, before)

    def _hear(self, event: Any, process: ClassChild) -> None:
        if isinstance(event, (TestStarted, TestEnded)) and event.method not in self._left:
            process.end_broken(f"told of {event.method}(), which it was not to run")
        elif isinstance(event, TestStarted):
            if event.method != self._running:
                self._running, self._began_s = event.method, _os.monotonic()
                self._sink(Began(self._name(event.method)))
        elif isinstance(event, Notice):
            self._sink(Stalled(self._name(self._running), event.text))
        elif isinstance(event, TestEnded):
            self._running, self._may_lose_zygote = "", True
            self._left.remove(event.method)
            test, problems = self._name(event.method), event.problems
            result = TestResult(test, event.status, event.duration_s, problems, event.reason, ranks=event.ranks)
            self._report(result, process.new_output(event.printed_bytes))
        elif isinstance(event, ClassFailed):
            self._fail(self._class, event.problem, process)
            self._class_is_over = True
        elif isinstance(event, ClassSkipped):
            skipped, self._left = self._left, []
            for method in skipped:
                self._report(TestResult(self._name(method), Status.SKIPPED, 0.0, reason=event.reason))
        elif isinstance(event, (ClassEnded, ClassLeft)):
            self._last = event

    def _process_ended(self, process: ClassChild, before: int) -> None:
        running = self._running
        if running:
            self._left.remove(running)
        left = 0 if self._class_is_over or self._stop else len(self._left)
        ended = before - len(self._left) - bool(running)
        when = "" if running else " between two tests" if left and ended else " before its first test"
        when = " after its last test" if not left and not running else when
        exited = process.death("The parent half of the test" if running else "The process that runs the class", when)
        death = None if process.ended_well else exited
        facts = ClassFacts(bool(running), ended, left, self._last, death, process.lost_zygote)
        following = what_next(facts, exited)
        if following.test is not None:
            self._fail(self._name(running), following.test, process, _os.monotonic() - self._began_s)
        if following.cls is not None:
            self._fail(self._class, following.cls, process)
        if process.lost_zygote:
            self._lost_zygote(exited, fruitless=not ended and not running)
        if not following.go_on:
            self._class_is_over = True

    def _lost_zygote(self, problem: Problem, *, fruitless: bool = True) -> None:
        self._zygotes.drop(self._batch, self._zygote)
        if not fruitless:
            return
        if not self._may_lose_zygote:
            self._file_failed(problem)
        self._may_lose_zygote = False

    def _file_failed(self, problem: Problem) -> None:
        self._fail(TestName(self._batch.file.name), problem)
        self._class_is_over = True

    def _name(self, method: str) -> TestName:
        return TestName(self._batch.file.name, self._batch.cls, method)

    @property
    def _class(self) -> TestName:
        return TestName(self._batch.file.name, self._batch.cls)

    def _fail(
        self, test: TestName, problem: Problem, process: ClassChild | None = None, duration_s: float = 0.0
    ) -> None:
        output = process.new_output() if process else ""
        self._report(TestResult(test, Status.FAILED, duration_s, (problem,)), output)

    def _report(self, result: TestResult, output: str = "") -> None:
        failed = result.status.counted is Status.FAILED
        self._failed = self._failed or failed
        self._sink(replace(result, warnings=_announcements(output), output=output if failed else ""))


def _announcements(output: str) -> tuple[str, ...]:
    """Return what the harness itself said to the user."""
    lines = (line for line in output.splitlines() if line.startswith(wording.PREFIX))
    return tuple(line.removeprefix(wording.PREFIX) for line in lines)
