"""Supervises the class processes of one class: starts one, follows it, replaces it if it dies, until every test has its
result.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

from torch_ext.runner.discovery import TestFile
from torch_ext.runner.messages import ClassFailed, ClassOrder, ClassSkipped, TestEnded, TestStarted
from torch_ext.runner.options import Options
from torch_ext.runner.results import Died, Problem, Raised, Remark, Status, TestName, TestResult
from torch_ext.runner.schedule import Batch
from torch_ext.world import _os, frames, notices
from torch_ext.world.channel import ChannelClosedError, channel_pair, close_all
from torch_ext.world.follow import read_stacks
from torch_ext.world.protocol import STACK_SIGNAL
from torch_ext.world.tree import Child, LoadError, ZygoteClient, ZygoteDiedError

__all__ = ["ClassRunner", "Zygotes"]

# How much longer than the test's limit its parent half may take until it counts as hung itself, and how long setUpClass
# may take, in seconds.
_MARGIN_S, _SET_UP_S = 30.0, 300.0


class Zygotes(Protocol):
    """Where a class's zygote comes from.

    Called on the main thread; :meth:`zygote` blocks while the file is imported.
    """

    environment: dict[str, str]
    scratch: str

    def module_of(self, file: TestFile) -> str: ...
    def zygote(self, file: TestFile) -> ZygoteClient: ...
    def drop(self, file: TestFile) -> None: ...


class ClassRunner:
    """Runs one batch. Every planned test gets one result: its own, or that of the process that died under it."""

    def __init__(self, zygotes: Zygotes, batch: Batch, options: Options, sink: Callable[[TestResult], None]) -> None:
        self._zygotes = zygotes
        self._batch = batch
        self._options = options
        self._sink = sink
        self._left = [test.method for test in batch.tests]
        self._failed = False
        self._class_is_over = False

    def run(self) -> bool:
        """Run the batch; return whether the run goes on after it."""
        while self._left and not self._class_is_over and not self._stop:
            before = list(self._left)
            try:
                self._run_one_process()
            except LoadError as error:
                self._file_failed(Raised(*_import_error(str(error))))
            except ZygoteDiedError as error:
                self._zygotes.drop(self._batch.file)
                if before == self._left:
                    self._file_failed(Remark(f"{error} before any test of the class began; it is not tried again"))
        return not self._stop

    @property
    def _stop(self) -> bool:
        return self._failed and self._options.failfast

    def _run_one_process(self) -> None:
        zygote = self._zygotes.zygote(self._batch.file)
        with _ClassProcess(self._zygotes, zygote, self._batch, tuple(self._left), self._options) as process:
            running = ""
            while (event := process.next_event()) is not None:
                if isinstance(event, TestStarted):
                    running = event.method
                elif isinstance(event, TestEnded):
                    running = ""
                    self._test_ended(event, process)
                elif isinstance(event, ClassFailed):
                    self._report(self._class, Status.FAILED, (event.problem,), process)
                    self._class_is_over = True
                elif isinstance(event, ClassSkipped):
                    for method in self._take_all():
                        self._report(self._name(method), Status.SKIPPED, reason=event.reason)
            self._process_ended(process, running)

    def _process_ended(self, process: _ClassProcess, running: str) -> None:
        if running:
            self._left.remove(running)
            self._report(self._name(running), Status.FAILED, (process.death("The parent half of the test"),), process)
            if process.lost_zygote:
                self._zygotes.drop(self._batch.file)
        elif self._left and not self._class_is_over and not self._stop:
            problem = process.death("The process that runs the class", when=" between two tests")
            self._report(self._class, Status.FAILED, (problem,), process)
            self._class_is_over = True

    def _test_ended(self, event: TestEnded, process: _ClassProcess) -> None:
        self._left.remove(event.method)
        failed = event.status.counted is Status.FAILED
        self._failed = self._failed or failed
        output = process.new_output()
        self._sink(
            TestResult(
                self._name(event.method),
                event.status,
                event.duration_s,
                event.problems,
                event.reason,
                _announcements(output),
                output if failed else "",
            )
        )

    def _take_all(self) -> list[str]:
        taken, self._left = self._left, []
        return taken

    def _file_failed(self, problem: Problem) -> None:
        self._report(TestName(self._batch.file.name), Status.FAILED, (problem,))
        self._class_is_over = True

    def _name(self, method: str) -> TestName:
        return TestName(self._batch.file.name, self._batch.cls, method)

    @property
    def _class(self) -> TestName:
        return TestName(self._batch.file.name, self._batch.cls)

    def _report(
        self,
        test: TestName,
        status: Status,
        problems: tuple[Problem, ...] = (),
        process: _ClassProcess | None = None,
        reason: str = "",
    ) -> None:
        self._failed = self._failed or status is Status.FAILED
        output = process.new_output() if process else ""
        self._sink(TestResult(test, status, 0.0, problems, reason, _announcements(output), output))


def _announcements(output: str) -> tuple[str, ...]:
    """Return what the harness itself said to the user."""
    lines = (line for line in output.splitlines() if line.startswith(notices.PREFIX))
    return tuple(line.removeprefix(notices.PREFIX) for line in lines)


def _import_error(trace: str) -> tuple[str, str]:
    """Return the last line of an import's traceback, and the traceback."""
    return trace.rstrip().rpartition("\n")[2], trace.rstrip()


class _ClassProcess:
    """One class process: its events, its output, its end."""

    def __init__(
        self, zygotes: Zygotes, zygote: ZygoteClient, batch: Batch, methods: tuple[str, ...], options: Options
    ) -> None:
        self.lost_zygote = False
        self._hung: str | None = None  # the stacks, if it was ended because it hung
        self._output = None if options.show_output else _os.unnamed_file()
        self._read_to = 0
        self._deadline_s = time.monotonic() + _SET_UP_S
        self._events, theirs = channel_pair()
        self._stacks, stacks_writer = os.pipe()
        order = ClassOrder(
            zygotes.module_of(batch.file), batch.cls, methods, zygotes.environment, (str(batch.file.path),),
            zygotes.scratch, options.failfast,
        )  # fmt: skip
        streams = [os.dup(self._output.fileno() if self._output else number) for number in (1, 2)]
        descriptors = [os.dup(theirs.fileno()), zygote.add_client(), *streams, stacks_writer]
        theirs.close()
        try:
            self._child: Child = zygote.start(
                "torch_ext.runner.class_process:main", order, descriptors, zygotes.environment
            )
        except ZygoteDiedError:
            self._close_own()
            raise
        finally:
            close_all(descriptors)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._selector.register(self._child, selectors.EVENT_READ)

    def __enter__(self) -> _ClassProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()
        self._selector.close()
        self._close_own()

    def _close_own(self) -> None:
        self._events.close()
        os.close(self._stacks)
        if self._output is not None:
            self._output.close()

    def next_event(self) -> Any:
        """Return the next event; None when the process has ended and all its events are told."""
        while True:
            if not self._events.closed and self._events.poll():
                try:
                    event, _ = self._events.receive()
                except ChannelClosedError:
                    self._selector.unregister(self._events)
                    self._events.close()
                    continue
                if isinstance(event, TestStarted):
                    self._deadline_s = time.monotonic() + event.timeout_s + _MARGIN_S
                elif isinstance(event, TestEnded):
                    self._deadline_s = time.monotonic() + _SET_UP_S
                return event
            if self._child.ended is not None or self.lost_zygote:
                return None
            self._wait()

    def _wait(self) -> None:
        left = self._deadline_s - time.monotonic()
        if left <= 0:
            self._child.send_signal(STACK_SIGNAL)
            self._hung = frames.trim_stacks(read_stacks({0: self._stacks})[0])
            self._child.send_signal(signal.SIGKILL)
            self._deadline_s = float("inf")
            return
        for key, _ in self._selector.select(None if left == float("inf") else left):
            if key.fileobj is self._child:
                try:
                    self._child.take_in()
                except ZygoteDiedError:
                    self.lost_zygote = True
                    self._selector.unregister(self._child)

    def death(self, what: str, when: str = "") -> Died:
        """Say how the process ended; ``what`` it is, in words, and ``when`` it ended."""
        if self._hung is not None:
            return Died(f"{what} hung{when} until it was killed; it was here:", self._hung)
        if self.lost_zygote or self._child.ended is None:
            return Died(f"{what} ended{when} because its zygote was killed.")
        code = self._child.ended.exit_code
        how = f"was killed by {_os.signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return Died(f"{what} {how}{when}.")

    def new_output(self) -> str:
        """Return what the process has printed since the last call."""
        if self._output is None:
            return ""
        self._output.seek(self._read_to)
        text = self._output.read()
        self._read_to += len(text)
        return frames.trim_stacks(text.decode(errors="replace"))
