"""Runs cases in forks of this process, so that a crash or a hang is the result of one case.

Note [Cases in forks]
~~~~~~~~~~~~~~~~~~~~~
This process imports torch, the device and the lists of cases, and runs nothing, which makes forking it safe. A fork
runs the cases of one group in order and writes a line before and after each. If the fork ends inside a case, that case
has crashed or hung, and a new fork goes on with the rest. A case that disagrees runs again, alone in a fork, and only
that result counts, so that no case fails by what an earlier one has left behind.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import IO

from torch_ext.results import SetupError
from torch_ext.world import _os
from torch_ext.world.child import compute_on_one_thread, reason_not_to_fork, redirect, replace_thread_pool

# Seconds after its limit at which a case that has not ended itself is killed, such as one that a signal has stopped.
_GRACE_S = 10.0
# How faulthandler's report of a case at its limit begins.
_TIMED_OUT = "Timeout ("
# How much of a dead fork's output a finding keeps, in characters.
_KEPT = 2000


class Status(Enum):
    """How a case ended."""

    AGREES = "agrees"
    ROUNDS = "rounds"  # unequal, but within the tolerances of torch.testing
    REFUSED = "refused"  # the device need not have this type, or the host has no result to compare with
    DIFFERS = "differs"
    CRASHED = "crashed"
    HUNG = "hung"


@dataclass(frozen=True)
class Finding:
    """The result of one case."""

    group: str
    case: str
    status: Status
    text: str = ""
    duration_s: float = 0.0
    known: str = ""  # why it is known to differ, if its tier knows that


# The case of a test file that stands for all of it: found when every test has a result. It is none of the tests.
DONE = "every test has a result"
Body = Callable[[str, str], tuple[Status, str]]


def first_line(text: str) -> str:
    """Return the line of an error or a finding that names it."""
    return text.strip().partition("\n")[0]


@dataclass
class _Fork:
    """A running fork, and what it has reported."""

    group: str
    cases: deque[str]
    is_alone: bool
    pid: int
    reader: int
    output: IO[bytes]
    since_s: float = field(default_factory=time.monotonic)  # when its present case began
    pending: bytes = b""


def run(groups: Mapping[str, Sequence[str]], body: Body, *, slots: int, limit_s: float) -> Iterator[Finding]:
    """Run ``body(group, case)`` for each case, ``slots`` groups at a time, each case for at most ``limit_s`` seconds.
    Yields each finding as it is made. Closing the iterator kills the forks. Raises SetupError if forking is not safe.
    """
    compute_on_one_thread()
    if why := reason_not_to_fork():
        raise SetupError(f"cases cannot run in forks of this process: {why}")
    gc.freeze()
    waiting = deque((group, deque(cases), False) for group, cases in groups.items() if cases)
    running = dict[int, _Fork]()
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    fork = _start(*waiting.popleft(), body, limit_s)
                    running[fork.reader] = fork
                    selector.register(fork.reader, selectors.EVENT_READ)
                for key, _ in selector.select(1.0):
                    fork = running[key.fd]
                    received = os.read(key.fd, 1 << 16)
                    if not received:
                        selector.unregister(key.fd)
                        del running[key.fd]
                    for finding in _received(fork, received) if received else _ended(fork, limit_s):
                        if finding.status is Status.DIFFERS and not fork.is_alone:
                            waiting.append((fork.group, deque([finding.case]), True))
                        else:
                            yield finding
                    if fork.cases and not received:
                        waiting.appendleft((fork.group, fork.cases, fork.is_alone))
                _end_stopped(running.values(), limit_s)
        finally:
            for fork in running.values():
                _os.end_process(fork.pid)
                os.waitpid(fork.pid, 0)
                os.close(fork.reader)
                fork.output.close()


def _end_stopped(running: Iterable[_Fork], limit_s: float) -> None:
    for fork in running:
        if time.monotonic() - fork.since_s > limit_s + _GRACE_S:
            _os.end_process(fork.pid)


def _received(fork: _Fork, received: bytes) -> Iterator[Finding]:
    *lines, fork.pending = (fork.pending + received).split(b"\n")
    for line in lines:
        fork.since_s = time.monotonic()
        if line:  # an empty line: the next case begins
            status, text, duration_s = json.loads(line)
            yield Finding(fork.group, fork.cases.popleft(), Status(status), text, duration_s)


def _ended(fork: _Fork, limit_s: float) -> Iterator[Finding]:
    """Reap a fork; yield the finding of the case that it has ended in, if any."""
    os.close(fork.reader)
    code = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
    fork.output.seek(0)
    with fork.output:
        output = fork.output.read(_KEPT).decode(errors="replace")
    if not fork.cases:
        return
    took_s = time.monotonic() - fork.since_s
    if took_s >= limit_s or output.startswith(_TIMED_OUT):
        status, what = Status.HUNG, f"took longer than {limit_s:g} s"
    else:
        status = Status.CRASHED
        what = f"ended by {_os.signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    yield Finding(fork.group, fork.cases.popleft(), status, f"{what}\n{output}".rstrip(), took_s)


def _start(group: str, cases: deque[str], is_alone: bool, body: Body, limit_s: float) -> _Fork:
    reader, writer = os.pipe()
    output, parent = _os.unnamed_file(), os.getpid()
    _os.flush_output()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Fork(group, cases, is_alone, pid, reader, output)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its forks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _os.die_with_parent(parent)
        redirect(output.fileno(), output.fileno())
        replace_thread_pool()
        faulthandler.enable()
        for case in cases:
            os.write(writer, b"\n")
            began_s = time.monotonic()
            faulthandler.dump_traceback_later(limit_s, exit=True)
            try:
                status, text = body(group, case)
            except Exception:  # of torch's database, or of the comparison
                status, text = Status.DIFFERS, f"the case cannot run: {traceback.format_exc()[-_KEPT:]}"
            faulthandler.cancel_dump_traceback_later()
            line = json.dumps([status.value, text[:_KEPT], round(time.monotonic() - began_s, 4)])
            os.write(writer, line.encode() + b"\n")
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(70)
    raise AssertionError("unreachable")
