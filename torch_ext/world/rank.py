"""A rank: applies its order, runs its task, answers its parent half and submits its receipt. Touches torch only if it
is loaded.

Note [Life of a rank]
~~~~~~~~~~~~~~~~~~~~~
A rank first applies its order: the environment, working directory, umask and ``sys.argv``, which the test may have
changed just before. The task runs inside multiprocessing's bootstrap, so that multiprocessing's hooks (coverage,
finalizers, logs) see an ordinary process. After the body, its threads and its exit functions, the rank submits a
receipt.

A rank that passed waits a moment for its peers, which may still use its connections, and then ends without destroying
its process groups, which would cost gloo 10 ms per peer. If the wait times out, or the rank failed, it destroys them in
order: peers of a rank that failed must see connections close instead of waiting for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from torch_ext.world import _os, debugger, exits, operations, settings, threads, wording
from torch_ext.world.channel import Channel
from torch_ext.world.child import end_fork, redirect
from torch_ext.world.exits import UnfinishedWork, UnfinishedWorkError
from torch_ext.world.operations import VARIABLE as WAIT_PAGE
from torch_ext.world.protocol import (
    OWNER_VARIABLE,
    STACK_SIGNAL,
    Collectives,
    Notice,
    Part,
    Phase,
    Progress,
    RankOrder,
    RankRequest,
    RankStatus,
    Receipt,
    Ticket,
    Variables,
)
from torch_ext.world.settings import NUMBER_VARIABLE
from torch_ext.world.threads import LISTENER, leave_out, observe

# Seconds for which a rank that passed waits for its peers before it destroys its process groups.
_RELEASE_WAIT_S = 1.0

# All ranks of a test are on this machine, and resolving the host's name may be slow, wrong or refused.
_ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": threads.LOOPBACK, "TP_SOCKET_IFNAME": threads.LOOPBACK}

# Enable torch's flight recorder, to trace a hang to a collective. Torch reads it when it creates the first group.
_DEFAULTS = {"TORCH_FR_BUFFER_SIZE": "512"}


class Rank:
    """This process as a rank: its number and its channel to the parent half. A forked child inherits this object, but
    its receipts do not count.
    """

    def __init__(self, order: RankOrder, channel: Channel, stacks: int) -> None:
        self.rank = order.rank
        self._pid = _os.getpid()
        self._ticket = order.ticket
        self._stacks = stacks
        self._channel = channel
        self._sending = threading.Lock()
        self.submitted = False
        self._is_between_tests = False
        self._released = threading.Event()
        self._unfinished_work = UnfinishedWork()
        operations.test_began()
        threading.Thread(target=self._listen, name=LISTENER, daemon=True).start()

    def begin(self, ticket: Ticket) -> None:
        """Begin another run of a test; later receipts carry ``ticket``."""
        self._ticket, self._is_between_tests = ticket, False
        self._unfinished_work.watch(ticket.test)
        operations.test_began()

    @_os.with_room
    def submit(self, receipt: Receipt) -> bool:
        """Submit the receipt, once. First finish the body's threads and exit functions, except after an unexpected
        failure. Then wait for the peers, except after any failure. Return whether every rank is done, so that this
        process may end without teardown.
        """
        self._end_fork(receipt)
        if self.submitted:
            raise AssertionError(f"rank {self.rank} has submitted a receipt already")
        if receipt.status is not RankStatus.FAILED or receipt.is_expected:
            self.try_send(Phase.SETTLING)
            receipt = self._receipt_after(self._unfinished_work.finish, receipt)
        self.submitted = True
        self._send(self._stamped(receipt))
        if receipt.status is not RankStatus.FAILED and self._released.wait(_RELEASE_WAIT_S):
            return True
        self._send(Collectives(operations.own_record()))  # a peer may be waiting for this rank in a collective
        return False

    @_os.with_room
    def report(self, receipt: Receipt) -> Receipt:
        """Submit the receipt of one test without ending the rank; return the receipt."""
        self._end_fork(receipt)
        if receipt.status is not RankStatus.FAILED or receipt.is_expected:
            receipt = self._receipt_after(self._unfinished_work.check, receipt)
        self._is_between_tests = True
        self._send(self._stamped(receipt))
        if receipt.status is RankStatus.FAILED:
            self._send(Collectives(operations.own_record()))
        return receipt

    def hang(self) -> NoReturn:
        """Hang as a test expects it: submit a receipt, wait until the peers are done too, and end this process."""
        self._send(self._stamped(Receipt(RankStatus.PASSED, 0.0)))
        self._released.wait()
        self.try_send(Phase.EXITING)
        os._exit(0)

    def notify(self, text: str) -> None:
        """Show ``text`` to the user, once for all ranks."""
        self._send(Notice(text))

    def warn_of_globals(self, module: str) -> None:
        """Warn the user about globals of ``module`` with a ``__del__`` of that module, which a rank never calls."""
        found = sys.modules.get(module)
        values = list(vars(found).items()) if found is not None else []
        names = [name for name, each in values if type(each).__module__ == module and hasattr(type(each), "__del__")]
        if names:
            which = f"{', '.join(names)} of {module}"
            self.notify(f"ranks end without finalizing globals: __del__ of {which} does not run in them")

    @property
    def test(self) -> str:
        """The id of the test that this rank runs."""
        return self._ticket.test

    def _end_fork(self, receipt: Receipt) -> None:
        """Exit if this process is a child that the test has forked and that continues as if it were the rank. Its
        parent judges it by the exit code.
        """
        if _os.getpid() != self._pid:
            end_fork(AssertionError(receipt.reason) if receipt.status is RankStatus.FAILED else None, receipt.trace)

    def _receipt_after(self, check: Callable[[], None], receipt: Receipt) -> Receipt:
        try:
            check()
        except UnfinishedWorkError as error:
            return failure(error)
        return receipt

    def _stamped(self, receipt: Receipt) -> Receipt:
        return replace(receipt, time_s=_os.monotonic(), ticket=self._ticket, pid=self._pid)

    def try_send(self, message: Phase) -> None:
        """Send ``message``; no error if the parent half is gone."""
        with contextlib.suppress(OSError):
            self._send(message)

    @_os.with_room
    def _send(self, message: Any) -> None:
        if _os.getpid() == self._pid:
            with self._sending:
                self._channel.send(message)

    def _listen(self) -> None:
        leave_out()
        try:
            while True:
                message, _ = self._channel.receive()
                if message is RankRequest.RELEASE:
                    self._released.set()
                elif message is RankRequest.COLLECTIVES:
                    self._send(Collectives(operations.own_record()))
                elif message is RankRequest.PROGRESS:
                    self._send(_look(self._is_between_tests))
                elif message is RankRequest.STACKS:
                    faulthandler.dump_traceback(self._stacks, all_threads=True)
                elif isinstance(message, Variables):
                    os.environ.update(message.values)  # of known names: other threads may read the environment
        except OSError:
            self._released.set()  # the parent half is gone


def _look(between_tests: bool) -> Progress:
    """Return :func:`observe`'s progress; if it fails, a progress that proves nothing."""
    try:
        return observe(between_tests)
    except Exception as error:  # keep the listener alive: no other thread answers the parent half
        return Progress(False, math.inf, "", may_act=(f"a thread that cannot be inspected ({error})",))


_current: Rank | None = None


def current() -> Rank | None:
    """Return this process's rank; None if it has none."""
    return _current


def this_rank() -> Rank:
    """Return this process's rank. Raises AssertionError if it has none."""
    if _current is None:
        raise AssertionError("this process is no rank")
    return _current


def main(order: RankOrder, descriptors: Sequence[int]) -> int:
    """Target of a rank's order.

    Descriptors: the channel, stdout, stderr, the pipe for stacks, the page of waits if there is one, the reservation of
    the world's address if it has one, then the task's connections.
    """
    channel, stdout, stderr, stacks, *connections = descriptors
    _apply(order)
    if order.has_page:
        os.environ[WAIT_PAGE] = str(connections.pop(0))
    if order.address:
        connections.pop(0)  # the reservation: open until this process ends
    os.dup2(null := os.open(os.devnull, os.O_RDONLY), 0)
    redirect(stdout, stderr)
    for descriptor in (null, stdout, stderr):
        os.close(descriptor)
    faulthandler.enable(2)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    task = order, Channel.from_descriptor(channel), stacks, [Connection(each) for each in connections]
    process = multiprocessing.Process(target=_run_task, name=order.name, args=task)
    end_writing = exits.write_stacks_before(stacks)
    code = int(process._bootstrap())  # type: ignore[attr-defined]  # the entry that multiprocessing's own starters use
    end_writing()
    if _current is not None:
        _current.try_send(Phase.EXITING)
    return code


def _apply(order: RankOrder) -> None:
    on_one = {} if NUMBER_VARIABLE in order.environment else _ON_ONE_MACHINE
    wanted = {**_DEFAULTS, **on_one, **order.environment}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.environ[OWNER_VARIABLE] = str(_os.getpid())
    os.chdir(order.directory)
    os.umask(order.umask)
    sys.argv[:] = order.argv
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(order.threads or torch.get_num_threads())  # see Note [Thread pool after a fork]
        if torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()  # torch reads it only once, at import


def _run_task(order: RankOrder, channel: Channel, stacks: int, connections: Sequence[Connection]) -> None:
    global _current
    _current = rank = Rank(order, channel, stacks)
    try:
        function, args, kwargs = pickle.loads(order.task)
        threads.prepare()
        threads.belong_to(order.address)
        debugger.prepare(order.rank, rank.try_send)
        rank.try_send(Phase.RUNNING)
        with planned_faults(order.rank):
            function(*args, *connections, **kwargs)
    except SystemExit as left:
        if not rank.submitted:
            exits.write_text(stacks, wording.read_error(left)[1])  # tells the parent half the place
        raise
    except BaseException as error:
        if not rank.submitted:
            debugger.examine(error)
            rank.submit(failure(error))
        raise
    if not rank.submitted:
        rank.submit(Receipt(RankStatus.PASSED, _os.monotonic()))


@contextlib.contextmanager
def planned_faults(rank: int) -> Iterator[None]:
    """Context: the faults of ``--faults`` happen in this rank; at the end, name those that have not."""
    if not (text := settings.fault_plan()):
        yield
        return
    from torch_ext.faults import plan, points

    armed = points.Armament(plan.parse(text), rank)
    try:
        yield
    finally:
        for sentence in armed.missed():
            with contextlib.suppress(OSError, ValueError):  # the body has closed its stderr
                print(f"torch_ext: {sentence}", file=sys.stderr, flush=True)


@_os.with_room
def failure(error: BaseException) -> Receipt:
    """Return the receipt of a body that raised ``error``."""
    if threading.current_thread() is threading.main_thread():
        # torch.utils.data's handler raises wherever this thread is when a worker has died, and would end the report.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reason, trace = wording.read_error(error)
    transport = operations.raised_by_transport(error)
    waits = operations.waits_of_error(error) if transport else ()
    place = wording.place_of(error)
    parts = (Part("", expectable=False),) if isinstance(error, UnfinishedWorkError) else ()
    return Receipt(RankStatus.FAILED, _os.monotonic(), reason, trace, transport, waits, place, parts=parts)
