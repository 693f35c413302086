"""One class process as the supervisor sees it: its events, its output, its limits, its end."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from typing import Any

from torch_ext.results import Died
from torch_ext.runner.loop import Pause, Task
from torch_ext.runner.messages import (
    Body,
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
from torch_ext.world import _os, wording
from torch_ext.world.channel import (
    WRITE_TO_OWN,
    ChannelBrokenError,
    ChannelClosedError,
    channel_pair,
    close_all,
)
from torch_ext.world.files import read_stacks
from torch_ext.world.protocol import STACK_SIGNAL, Notice
from torch_ext.world.settings import Patience
from torch_ext.world.tree import Child, ZygoteClient, ZygoteDiedError
from torch_ext.world.wording import printable

__all__ = ["ClassChild"]

# How much longer than the test's limit its parent half, which ends the ranks at the limit, may take until it counts as
# hung itself; the same for a test without ranks, whose limit only the supervisor knows; and how long what comes before,
# between and after the tests of a class may take unless --timeout says so, in seconds.
_MARGIN_S, _ALONE_S, _FIXTURE_S = 30.0, 1.0, 300.0
# Nobody else can tell that a process was stopped by a signal, so that is looked for much earlier than the margin ends.
_STOPPED_S = 5.0
# How long a zygote may take to end a child.
_KILL_S = 5.0

_EVENTS = (Body, ClassEnded, ClassFailed, ClassLeft, ClassSkipped, Notice, TestEnded, TestStarted)


class ClassChild:
    """A class process that obeys ``order``.

    Attributes:
        lost_zygote: the process ended because its zygote did.

    Raises:
        ZygoteDiedError: the zygote is gone.
    """

    def __init__(self, order: ClassOrder, zygote: ZygoteClient, place: Place, options: RunOptions) -> None:
        self.lost_zygote = False
        self._zygote = zygote
        self._hung: str | None = None  # the stacks, if it was ended because it hung
        self._stopped = ""  # which process had been stopped by a signal, in words
        self._broke = ""  # the junk that it has written into its channel, in words
        self._test: TestStarted | None = None
        self._fixture_s = options.timeout_s or _FIXTURE_S
        self._allow(self._fixture_s)
        self._events, theirs = channel_pair()
        self._stacks, stacks_writer = os.pipe()
        self._output = _Shown() if options.show_output else _Kept()
        descriptors = [os.dup(theirs.fileno()), place.add_client(zygote), *self._output.writers(), stacks_writer]
        theirs.close()
        try:
            self._child: Child = zygote.start(
                "torch_ext.runner.class_process:main", order, descriptors, place.environment
            )
        except BaseException:
            self._close_own()
            raise
        finally:
            close_all(descriptors)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._selector.register(self._child, selectors.EVENT_READ)
        for reader in self._output.readers():
            self._selector.register(reader, selectors.EVENT_READ)

    def __enter__(self) -> ClassChild:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()
        self._selector.close()
        self._close_own()

    def _close_own(self) -> None:
        self._events.close()
        os.close(self._stacks)
        self._output.close()

    def _allow(self, limit_s: float, stopped_s: float = float("inf"), **more: float) -> None:
        now_s = _os.monotonic()
        self._patience: Patience | None = Patience(limit_s, now_s, **more)
        self._look_for_stopped_s = now_s + stopped_s

    def next_event(self) -> Task[Any]:
        """A task that returns the next event; None when the process has ended and all its events are told."""
        while True:
            if not self._events.closed and self._events.poll():
                event = self._receive()
                if isinstance(event, Body):
                    self._allow_body(event.begins)
                elif event is not None:
                    return event
                continue
            if self._child.ended is not None or self.lost_zygote:
                self._output.pass_on()
                return None
            yield from self._wait()

    def _receive(self) -> Any:
        """Return an event that has come; None if the process can say nothing more."""
        try:
            event, descriptors = self._events.receive()
            close_all(descriptors)
            if not isinstance(event, _EVENTS):
                raise self._events.refuse(f"a {type(event).__name__}, which is no message of a test class,")
        except ChannelClosedError as error:
            self._selector.unregister(self._events)
            self._events.close()
            if isinstance(error, ChannelBrokenError):
                self.end_broken(str(error))
            return None
        if isinstance(event, TestStarted):
            self._test = event
            self._allow(event.timeout_s + _ALONE_S)
        elif not isinstance(event, (Body, Notice)):
            self._allow(self._fixture_s)
        return event

    def end_broken(self, what: str) -> None:
        """End the process, which said ``what``, words that follow a subject: nothing more that it says counts."""
        self._broke = f"{what}, and was ended. {WRITE_TO_OWN}"
        self._child.send_signal(signal.SIGKILL)
        self._allow(_KILL_S)

    def _allow_body(self, begins: bool) -> None:
        limit_s = self._test.timeout_s if self._test is not None else self._fixture_s
        if begins:
            self._allow(limit_s + _MARGIN_S, limit_s + _STOPPED_S, more_s=0.0)
        else:
            self._allow(limit_s + _ALONE_S)

    def _wait(self) -> Task[None]:
        if self._patience is None:
            self._end_zygote()
            return
        now_s = _os.monotonic()
        stopped = self._who_is_stopped() if now_s >= self._look_for_stopped_s else ""
        if stopped or (
            now_s >= self._patience.look_s and self._patience.is_over(now_s, _os.computed_s(self._child.pid))
        ):
            yield from self._end(stopped or self._who_is_stopped())
            return
        yield from self._pump(min(self._patience.look_s, self._look_for_stopped_s))

    def _who_is_stopped(self) -> str:
        self._look_for_stopped_s = float("inf")
        if self._zygote.pid and _os.is_stopped(self._zygote.pid):
            return "its zygote"
        return "the process" if _os.is_stopped(self._child.pid) else ""

    def _end(self, stopped: str) -> Task[None]:
        """Find out where the process hangs, and have its zygote end it; if that is stopped too, end both."""
        self._stopped = stopped
        self._hung = ""
        if not stopped:
            self._child.send_signal(STACK_SIGNAL)
            self._hung = wording.trim_stacks(read_stacks({0: self._stacks})[0])
        self._child.send_signal(signal.SIGKILL)
        end_s = _os.monotonic() + _KILL_S
        while self._child.ended is None and not self.lost_zygote and _os.monotonic() < end_s:
            yield from self._pump(end_s)
        self._patience = None

    def _end_zygote(self) -> None:
        """The zygote does not answer: end it, and with it the process."""
        self._zygote.kill()
        self.lost_zygote = True

    def _pump(self, until_s: float) -> Task[None]:
        yield Pause(tuple(key.fileobj for key in self._selector.get_map().values()), until_s)
        for key, _ in self._selector.select(0):
            if key.fileobj is self._child:
                try:
                    self._child.take_in()
                except ZygoteDiedError:
                    self.lost_zygote = True
                    self._selector.unregister(self._child)
            elif key.fileobj is not self._events and not self._output.pass_on():
                self._selector.unregister(key.fileobj)

    def death(self, what: str, when: str = "") -> Died:
        """Say how the process ended.

        Args:
            what: the process, in words.
            when: when, in words that follow the verb.
        """
        if self._broke:
            return Died(f"{what} {self._broke}")
        if self._stopped:
            return Died(
                f"{what} hung{when} until it was killed: {self._stopped} had been stopped by a signal (SIGSTOP)."
            )
        if self._hung is not None:
            return Died(f"{what} hung{when} until it was killed; it was here:", self._hung)
        if self.lost_zygote or self._child.ended is None:
            return Died(f"{what} ended{when} because its zygote was killed.")
        code = self._child.ended.exit_code
        how = f"was killed by {_os.signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return Died(f"{what} {how}{when}.")

    @property
    def ended_well(self) -> bool:
        """Whether the process exited by itself, with code 0."""
        ended = self._child.ended
        clean = self._hung is None and not self._broke and not self.lost_zygote
        return clean and ended is not None and ended.exit_code == 0

    def new_output(self, to: int | None = None) -> str:
        """Return what the process has printed since the last call, unless it was shown as it came.

        Args:
            to: up to this position in all that it has printed, in bytes; None: up to now.
        """
        return wording.trim_stacks(self._output.new(to))


class _Kept:
    """What a process prints, in a file without a name."""

    def __init__(self) -> None:
        self._file = _os.unnamed_file()
        self._read_to = 0

    def writers(self) -> list[int]:
        return [os.dup(self._file.fileno()) for _ in range(2)]

    def readers(self) -> list[int]:
        return []

    def pass_on(self) -> bool:
        return False

    def new(self, to: int | None) -> str:
        if to is None:
            to = os.fstat(self._file.fileno()).st_size
        # By position: a writer moves the one that it shares with this file.
        text = os.pread(self._file.fileno(), max(0, to - self._read_to), self._read_to)
        self._read_to += len(text)
        return text.decode(errors="replace")

    def close(self) -> None:
        self._file.close()


class _Shown:
    """What a process prints, shown line by line as it comes, without what a terminal would obey."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._line = b""

    def writers(self) -> list[int]:
        writer, self._writer = self._writer, -1
        return [os.dup(writer), writer]

    def readers(self) -> list[int]:
        return [self._reader]

    def pass_on(self) -> bool:
        """Show what has arrived; a line without an end waits for it. Return whether more may come."""
        while True:
            try:
                part = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                return True
            *lines, self._line = (self._line + part).split(b"\n")
            if not part:
                return False
            for line in lines:
                self._show(line)

    def _show(self, line: bytes) -> None:
        print(printable(line.decode(errors="backslashreplace")), file=sys.stdout, flush=True)

    def new(self, to: int | None) -> str:
        return ""

    def close(self) -> None:
        if self._line:
            self._show(self._line)
        os.close(self._reader)
        if self._writer >= 0:
            os.close(self._writer)
