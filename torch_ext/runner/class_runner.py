"""Supervises the class processes of one class: starts one, follows it, replaces it if it dies, until every test has a
result. :class:`ClassChild` is one such process: its events, output, limits and end.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, replace
from typing import Any

from torch_ext.results import Began, Died, Over, Problem, Remark, Sink, Stalled, Status, TestName, TestResult, raised
from torch_ext.runner.loop import Pause, Task
from torch_ext.runner.messages import Body, ClassEnded, ClassOrder, TestEnded, TestStarted
from torch_ext.runner.options import RunOptions
from torch_ext.runner.places import Place
from torch_ext.runner.schedule import Batch
from torch_ext.runner.zygotes import RunZygotes
from torch_ext.world import _os, wording
from torch_ext.world.channel import WRITE_TO_OWN, ChannelBrokenError, ChannelClosedError, close_all
from torch_ext.world.files import Live, open_capture
from torch_ext.world.protocol import Notice
from torch_ext.world.settings import ProcessDeadline
from torch_ext.world.tree import LoadError, ZygoteClient, ZygoteCopy, ZygoteDiedError


@dataclass(frozen=True)
class ClassFacts:
    """The facts about an ended class process."""

    running: bool  # a test had begun and not ended
    ended: int  # number of tests that ended in it
    left: int  # number of tests that have not begun
    last: ClassEnded | None  # its last message, if that announced its end
    death: Died | None = None  # its end, unless it exited by itself with code 0
    lost_zygote: bool = False  # it ended because its zygote did


def decide_next(facts: ClassFacts, exited: Died) -> tuple[Problem | None, bool]:
    """Return how the running test, or else the class, has failed, if it has, and whether another process runs the rest.

    A process that has not reported its end has failed; ``exited`` describes it if it exited by itself. One that has not
    finished a single test is replaced only if its zygote died, and the caller allows that once; so every class ends.
    """
    left_by = facts.last.problem if facts.last is not None else None
    if facts.running:
        return left_by or facts.death or exited, facts.left > 0
    went_on = facts.left > 0 and facts.ended > 0
    if facts.last is None and facts.lost_zygote and facts.left:
        return None, True
    if facts.last is None:
        return facts.death or exited, went_on
    how = "The class was interrupted" if facts.last.early else "unittest ended the class"
    unfinished = Remark(f"{how} before {facts.left} of its tests began.") if facts.left and not went_on else None
    return left_by or facts.death or unfinished, went_on


class ClassRunner:
    """Runs one batch. Every planned test gets one result: its own, or the death of its process."""

    def __init__(self, zygotes: RunZygotes, place: Place, batch: Batch, options: RunOptions, sink: Sink) -> None:
        self._zygotes = zygotes
        self._place = place
        self._batch = batch
        self._options = options
        self._sink = sink
        self._zygote: ZygoteCopy | None = None
        self._class = batch.name
        self._left = list(batch.tests)
        self._failed = False
        self._class_is_over = False
        self._may_lose_zygote = True  # allows one replacement before any test has ended
        self._running: TestName | None = None
        self._began_s = 0.0  # start of that test
        self._last: ClassEnded | None = None

    def run(self) -> Task[bool]:
        """Task: run the batch; return whether the run goes on after it."""
        self._sink(Began(self._class))
        try:
            while self._left and not self._class_is_over and not self._stop:
                try:
                    yield from self._run_one_process()
                except LoadError as error:
                    self._file_failed(raised(str(error)))
                except ZygoteDiedError as error:
                    self._lost_zygote(Remark(f"{error} before any test of the class began; the class is not retried"))
        finally:
            self._close_zygote()
        self._sink(Over(self._class))
        return not self._stop

    @property
    def _stop(self) -> bool:
        return self._failed and self._options.failfast

    def _run_one_process(self) -> Task[None]:
        file, place, options = self._batch.file, self._place, self._options
        if self._zygote is None:
            self._zygote = yield from self._zygotes.copy_of(file)
        argv = (str(file.path),)
        order = ClassOrder(file.module, tuple(self._left), place.environment, argv, place.scratch, options.failfast)
        self._running, self._last, before = None, None, len(self._left)
        with contextlib.closing(ClassChild(order, self._zygote, place, options)) as process:
            while (event := (yield from process.next_event())) is not None:
                self._handle(event, process)
            self._process_ended(process, before)

    def _handle(self, event: Any, process: ClassChild) -> None:
        if isinstance(event, TestEnded) and event.result.test == self._class:
            self._report(event.result, process.new_output(event.printed_bytes))
            self._class_is_over = True
        elif isinstance(event, TestEnded) and event.result.test in self._left:
            self._running, self._may_lose_zygote = None, True
            self._left.remove(event.result.test)
            self._report(event.result, process.new_output(event.printed_bytes))
        elif isinstance(event, TestStarted) and event.test in self._left:
            if event.test != self._running:
                self._running, self._began_s = event.test, _os.monotonic()
                self._sink(Began(event.test))
        elif isinstance(event, (TestEnded, TestStarted)):
            test = event.result.test if isinstance(event, TestEnded) else event.test
            process.end_broken(f"reported {test.method}(), which it was not to run")
        elif isinstance(event, Notice):
            self._sink(Stalled(self._running or self._class, event.text))
        elif isinstance(event, ClassEnded):
            self._last = event

    def _process_ended(self, process: ClassChild, before: int) -> None:
        running = self._running
        if running:
            self._left.remove(running)
        left = 0 if self._class_is_over or self._stop else len(self._left)
        ended = before - len(self._left) - bool(running)
        when = "" if running else " between two tests" if left and ended else " before its first test"
        when = " after its last test" if not left and not running else when
        what = "The parent half of the test" if running else "The process that runs the class"
        output = process.new_output()
        exited = process.death(what, when, output)
        death = None if process.exited_cleanly else exited
        facts = ClassFacts(bool(running), ended, left, self._last, death, process.lost_zygote)
        problem, goes_on = decide_next(facts, exited)
        if problem is not None:
            self._fail(running or self._class, problem, output, _os.monotonic() - self._began_s if running else 0.0)
        if process.lost_zygote:
            self._lost_zygote(exited, fruitless=not ended and not running)
        self._class_is_over = self._class_is_over or not goes_on

    def _close_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _lost_zygote(self, problem: Problem, *, fruitless: bool = True) -> None:
        self._close_zygote()
        if fruitless and not self._may_lose_zygote:
            self._file_failed(problem)
        self._may_lose_zygote = self._may_lose_zygote and not fruitless

    def _file_failed(self, problem: Problem) -> None:
        self._fail(TestName(self._batch.file.name), problem)
        self._class_is_over = True

    def _fail(self, test: TestName, problem: Problem, output: str = "", duration_s: float = 0.0) -> None:
        self._report(TestResult(test, Status.FAILED, duration_s, (problem,)), output)

    def _report(self, result: TestResult, output: str) -> None:
        failed = result.status.counted is Status.FAILED
        self._failed = self._failed or failed
        own = (line for line in output.splitlines() if line.startswith(wording.PREFIX))
        warnings = tuple(line.removeprefix(wording.PREFIX) for line in own)
        self._sink(replace(result, warnings=warnings, output=output if failed else ""))


# In seconds: time past the test's limit after which a parent half, which ends its ranks at the limit, counts as hung;
# the same for a test without ranks; and the limit of the code between tests, unless --timeout sets one.
_MARGIN_S, _ALONE_S, _FIXTURE_S = 30.0, 1.0, 300.0
# Only the supervisor can notice that a signal has stopped a process, so it checks long before the margin ends.
_STOPPED_S = 5.0
# Seconds for a zygote to end a child.
_KILL_S = 5.0

_EVENTS = (Body, ClassEnded, Notice, TestEnded, TestStarted)


class ClassChild:
    """A class process that executes ``order``. Raises ZygoteDiedError if the zygote is gone."""

    def __init__(self, order: ClassOrder, zygote: ZygoteClient, place: Place, options: RunOptions) -> None:
        self.lost_zygote = False  # the process ended because its zygote did
        self._zygote = zygote
        # Why this side killed the process, with `{when}` for the time; its stacks, if it hung
        self._why_killed, self._hung = "", ""
        self._limit_s = self._fixture_s = options.timeout_s or _FIXTURE_S  # of the current test, and between tests
        self._allow(self._fixture_s)
        self._shows = options.show_output
        self._output, output = open_capture(0, self._shows and Live(prefix=""))
        more = [place.add_client(zygote), output, os.dup(output)]
        target = "torch_ext.runner.class_process:main"
        try:
            self._child = zygote.start(target, order, place.environment, more)
        except BaseException:
            self._output.close()
            raise
        finally:
            close_all(more)
        self._events = self._child.channel

    def close(self) -> None:
        """End the process."""
        self._child.close()
        self._output.close()

    def _allow(self, limit_s: float, stopped_s: float = float("inf"), **more: float) -> None:
        now_s = _os.monotonic()
        self._deadline: ProcessDeadline | None = ProcessDeadline(limit_s, now_s, **more)
        self._look_for_stopped_s = now_s + stopped_s

    def next_event(self) -> Task[Any]:
        """Task: return the next event; None when the process has ended and no event is left."""
        while True:
            if not self._events.closed and self._events.poll():
                if (event := self._receive()) is not None:
                    self._output.pass_through()
                    return event
            elif self._child.ended is not None or self.lost_zygote:
                self._output.pass_through()
                return None
            else:
                yield from self._wait()

    def _receive(self) -> Any:
        """Return a pending event; None if the process cannot send another."""
        try:
            event, descriptors = self._events.receive()
            close_all(descriptors)
            if not isinstance(event, _EVENTS):
                raise self._events.refuse(f"a {type(event).__name__}, which is not a message of a test class,")
        except ChannelClosedError as error:
            self._events.close()
            if isinstance(error, ChannelBrokenError):
                self.end_broken(str(error))
            return None
        if isinstance(event, TestStarted):
            self._limit_s = event.timeout_s
            self._allow(self._limit_s + _ALONE_S)
        elif isinstance(event, Body) and event.begins:
            self._allow(self._limit_s + _MARGIN_S, self._limit_s + _STOPPED_S, extra_s=0.0)
        elif isinstance(event, Body):
            self._allow(self._limit_s + _ALONE_S)
        elif not isinstance(event, Notice):
            self._allow(self._fixture_s)
        return event

    def end_broken(self, what: str) -> None:
        """End the process because of ``what``, a phrase that lacks its subject; ignore its further messages."""
        self._why_killed = f"{what}, and was ended. {WRITE_TO_OWN}"
        self._child.send_signal(signal.SIGKILL)
        self._allow(_KILL_S)

    def _wait(self) -> Task[None]:
        if self._deadline is None:
            # The zygote does not answer: killing it also kills the process.
            self._zygote.kill()
            self.lost_zygote = True
            return
        now_s = _os.monotonic()
        stopped = self._find_stopped() if now_s >= self._look_for_stopped_s else ""
        is_late = now_s >= self._deadline.look_s and self._deadline.is_over(now_s, _os.cpu_time_s(self._child.pid))
        if stopped or is_late:
            yield from self._end(stopped or self._find_stopped())
        else:
            yield from self._pump(min(self._deadline.look_s, self._look_for_stopped_s))

    def _find_stopped(self) -> str:
        self._look_for_stopped_s = float("inf")
        if self._zygote.pid and _os.is_stopped(self._zygote.pid):
            return "its zygote"
        return "the process" if _os.is_stopped(self._child.pid) else ""

    def _end(self, stopped: str) -> Task[None]:
        """Collect the hung process's stacks, then have its zygote kill it; if the zygote is stopped too, kill both."""
        if stopped and not self._why_killed:
            self._why_killed = f"hung{{when}} until it was killed: {stopped} had been stopped by a signal (SIGSTOP)."
        elif not self._why_killed:
            self._why_killed = "hung{when} until it was killed; its stacks:"
            self._hung = self._child.stacks()
        self._child.send_signal(signal.SIGKILL)
        end_s = _os.monotonic() + _KILL_S
        while self._child.ended is None and not self.lost_zygote and _os.monotonic() < end_s:
            yield from self._pump(end_s)
        self._deadline = None

    def _pump(self, until_s: float) -> Task[None]:
        ends = (self._child,) if self._events.closed else (self._child, self._events)
        yield Pause(ends if self._output.live is None else (*ends, self._output.live), until_s)
        self._output.pass_through()
        try:
            self._child.receive_one()
        except ZygoteDiedError:
            self.lost_zygote = True

    def death(self, what: str, when: str, output: str) -> Died:
        """Describe the end of the process, with phrases for the process and, after the verb, for the time. Its
        ``output`` may show the place.
        """
        if self._why_killed:
            return Died(f"{what} {self._why_killed.replace('{when}', when)}", self._hung)
        if self.lost_zygote or self._child.ended is None:
            return Died(f"{what} ended{when} because its zygote was killed.")
        code = self._child.ended.exit_code
        how = f"was killed by {_os.signal_name(-code)}" if code < 0 else f"exited with code {code}"
        place = wording.place_of_death(output) if code < 0 else ""
        return Died(f"{what} {how}{when}{place and f' {place}'}.")

    @property
    def exited_cleanly(self) -> bool:
        """Whether the process exited by itself, with code 0."""
        ended = self._child.ended
        return not (self._why_killed or self.lost_zygote) and ended is not None and ended.exit_code == 0

    def new_output(self, to: int | None = None) -> str:
        """Return the output since the last call, up to position ``to`` in bytes, unless it was already shown."""
        return "" if self._shows else wording.trim_stacks(self._output.new(to).decode(errors="replace"))
