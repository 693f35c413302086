"""What runs in a rank before, around and after its task. Imports the standard library and its own layer; touches torch
only if it is loaded.

Note [Life of a rank]
~~~~~~~~~~~~~~~~~~~~~
A rank starts having done nothing. Its order brings everything that a test may have changed a moment ago (environment,
working directory, umask, ``sys.argv``), which is applied before anything else. The task runs inside multiprocessing's
own bootstrap, so that whatever hooks into it (coverage, finalizers, logs) sees an ordinary process. When the body is
over, and what it left to be done is done (see Note [Nothing after the receipt]), the rank hands in a receipt.

A rank that passed waits a moment for its peers, so that it does not cut connections that they still use, and then ends
without destroying its process groups, which would cost gloo 10 ms per peer. If the wait is in vain, it destroys them in
order. So does a rank that failed: its peers must see connections close instead of waiting for it.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import math
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from torch_ext.world import flight_record, frames, loopback, operations, transport_errors, transports
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.child import end_fork, redirect
from torch_ext.world.hosts import NUMBER_VARIABLE
from torch_ext.world.last_words import say_before_abort
from torch_ext.world.protocol import (
    OWNER_VARIABLE,
    STACK_SIGNAL,
    Ask,
    Collectives,
    Farewell,
    Inherited,
    Notice,
    Phase,
    Progress,
    RankOrder,
    Receipt,
    Said,
    Ticket,
)
from torch_ext.world.settling import Debts, UnfinishedWorkError, unfinalized_globals
from torch_ext.world.stall import LISTENER, observe
from torch_ext.world.wait_page import VARIABLE as WAIT_PAGE

__all__ = ["Rank", "current", "failure", "main", "this_rank"]

# How long a rank that passed waits for its peers before it tears down by itself, in seconds.
_RELEASE_WAIT_S = 1.0

# Stand between a test and torch.
frames.hide(r"/compat/c10d\.py")
frames.hide(r"/world/stores\.py", "wait_in_store")
frames.hide(r"/world/operations\.py", "after_body")

# All ranks of a test are on this machine, and looking up the host's name may be slow, wrong or refused.
_ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": transports.LOOPBACK, "TP_SOCKET_IFNAME": transports.LOOPBACK}
_DEFAULTS = {
    # Torch's flight recorder, so that a hang can be traced to a collective; read when the first group is created.
    "TORCH_FR_BUFFER_SIZE": "512",
}


class Rank:
    """This process, as a rank: its number and its line to the parent half.

    Only the process that was started as the rank speaks for it. A child that it forks inherits this object, but what
    the child hands in counts for nothing.
    """

    def __init__(self, order: RankOrder, channel: Channel, stacks: int) -> None:
        self.rank = order.rank
        self._pid = os.getpid()
        self._ticket = order.ticket
        self._stacks = stacks
        self._channel = channel
        self._line = os.fstat(channel.fileno())
        self._sending = threading.Lock()
        self._handed_in = False
        self._released = threading.Event()
        self._debts = Debts()
        operations.test_began()
        self._began_s, self._met_s = time.monotonic(), (0.0, 0.0)
        threading.Thread(target=self._listen, name=LISTENER, daemon=True).start()

    def begin(self, ticket: Ticket) -> None:
        """Take on another run of a test: receipts are about it from now on."""
        self._ticket = ticket
        self._debts.watch()
        operations.test_began()
        self._began_s, self._met_s = time.monotonic(), (0.0, 0.0)

    def made_group(self, from_s: float, to_s: float) -> None:
        """Take note of when a process group was made; the first one counts."""
        if not self._met_s[1]:
            self._met_s = from_s, to_s

    def hand_in(self, receipt: Receipt) -> bool:
        """Hand in the receipt, once. Unless it tells of a failure, first do what the body left to be done, and then
        wait for the other ranks.

        Returns:
            Whether every rank is done, so that this process may end without tearing anything down.
        """
        self._end_fork(receipt)
        if self._handed_in:
            raise AssertionError(f"rank {self.rank} has handed in a receipt already")
        if receipt.said is not Said.FAILED:
            receipt = self._settled(receipt)
        self._handed_in = True
        self._send(self._stamped(receipt))
        if receipt.said is not Said.FAILED and self._released.wait(_RELEASE_WAIT_S):
            return True
        self._send(Collectives(flight_record.read()))  # a peer may be waiting for this rank in a collective
        return False

    def report(self, receipt: Receipt) -> Receipt:
        """Hand in the receipt of one test and live on for the next; return what was handed in."""
        self._end_fork(receipt)
        if receipt.said is not Said.FAILED:
            try:
                self._debts.check()
            except UnfinishedWorkError as error:
                receipt = failure(error)
        self._send(self._stamped(receipt))
        if receipt.said is Said.FAILED:
            self._send(Collectives(flight_record.read()))
        return receipt

    def tell(self, text: str) -> None:
        """Have the parent half say ``text`` to the user, once however many ranks say it."""
        self._send(Notice(text))

    def tell_of_globals(self, module: str) -> None:
        """Tell the user which globals of ``module`` are not finalized here."""
        names = unfinalized_globals(module)
        if names:
            which = f"{', '.join(names)} of {module}"
            self.tell(f"ranks end without finalizing globals: __del__ of {which} does not run in them")

    @property
    def test(self) -> str:
        """The test that this rank runs, as unittest names it."""
        return self._ticket.test

    @property
    def handed_in(self) -> bool:
        return self._handed_in

    def _end_fork(self, receipt: Receipt) -> None:
        """End a child that the test has forked and that goes on as if it were the rank: it has no say, and no test.

        How it ended is its parent's to judge, who learns it by the exit code.
        """
        if os.getpid() != self._pid:
            end_fork(AssertionError(receipt.reason) if receipt.said is Said.FAILED else None, receipt.trace)

    def _settled(self, receipt: Receipt) -> Receipt:
        self.say(Phase.SETTLING)
        try:
            self._debts.settle()
        except UnfinishedWorkError as error:
            return failure(error)
        return replace(receipt, time_s=time.monotonic())

    def _stamped(self, receipt: Receipt) -> Receipt:
        return replace(receipt, ticket=self._ticket, pid=self._pid, began_s=self._began_s, met_s=self._met_s)

    def say_it_aborts(self) -> None:
        """Say that this process ends by ``abort()``."""
        self._say_at_last(Phase.ABORTING)

    def say_what_it_called(self) -> None:
        """Say which collectives this rank has called last, before it aborts."""
        self._say_at_last(Collectives(flight_record.read()))

    def _say_at_last(self, message: Phase | Collectives) -> None:
        """Send ``message``, unless a thread that was sending when the process aborted does not come to its end."""
        if os.getpid() == self._pid and self._sending.acquire(timeout=1.0):
            try:
                self._channel.send(message)
            finally:
                self._sending.release()

    def say(self, message: Phase | Farewell) -> None:
        """Tell the parent half how far this process is."""
        with contextlib.suppress(ChannelClosedError, OSError):
            self._send(message)

    def _send(self, message: Any) -> None:
        if os.getpid() == self._pid:
            with self._sending:
                self._check_line()
                self._channel.send(message)

    def _check_line(self) -> None:
        """Raise OSError if the body has closed the channel's descriptor, whose number may be a file of its own now."""
        if not os.path.samestat(os.fstat(self._channel.fileno()), self._line):
            raise OSError(errno.EBADF, "the line to the harness was closed")

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                if message is Ask.RELEASE:
                    self._released.set()
                elif message is Ask.COLLECTIVES:
                    self._send(Collectives(flight_record.read()))
                elif message is Ask.PROGRESS:
                    self._send(_look())
                elif message is Ask.STACKS:
                    faulthandler.dump_traceback(self._stacks, all_threads=True)
        except (ChannelClosedError, OSError):
            self._released.set()  # nobody is left to wait for


def _look() -> Progress:
    """Return what :func:`observe` does; where looking fails, nothing is proven."""
    try:
        return observe()
    except Exception:  # without this thread, nobody would learn anything of the rank any more
        return Progress(False, math.inf, "", ())


_current: Rank | None = None


def current() -> Rank | None:
    """Return this process as a rank; None if it is not one."""
    return _current


def this_rank() -> Rank:
    """Return this process as a rank.

    Raises:
        AssertionError: it is not one.
    """
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
        os.environ[loopback.VARIABLE] = order.address
        connections.pop(0)  # stays open as long as this process lives
    _close_stdin()
    redirect(stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    faulthandler.enable(2)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    return _run(order, Channel.from_descriptor(channel), stacks, [Connection(each) for each in connections])


def _apply(order: RankOrder) -> None:
    on_one = {} if NUMBER_VARIABLE in order.environment else _ON_ONE_MACHINE
    wanted = {**_DEFAULTS, **on_one, **order.environment}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    os.chdir(order.directory)
    os.umask(order.umask)
    sys.argv[:] = order.argv
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(order.threads or torch.get_num_threads())  # see Note [Thread pool after a fork]
        if torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()  # read once at import otherwise


def _close_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _run(order: RankOrder, channel: Channel, stacks: int, connections: Sequence[Connection]) -> int:
    process = multiprocessing.Process(target=_run_task, name=order.name, args=(order, channel, stacks, connections))
    code = int(process._bootstrap())  # type: ignore[attr-defined]  # the entry that multiprocessing's own starters use
    if _current is not None:
        _current.say(Farewell())
    return code


def _run_task(order: RankOrder, channel: Channel, stacks: int, connections: Sequence[Connection]) -> None:
    global _current
    _current = rank = Rank(order, channel, stacks)
    say_before_abort(rank.say_it_aborts, rank.say_what_it_called)
    try:
        function, args, kwargs = pickle.loads(order.task)
        transports.prepare()
        transports.belong_to(order.address, rank.made_group)
        rank.say(Phase.RUNNING)
        function(*(connections[a.index] if isinstance(a, Inherited) else a for a in args), **kwargs)
    except SystemExit:
        raise
    except BaseException as error:
        if not rank.handed_in:
            rank.hand_in(failure(error))
        raise
    if not rank.handed_in:
        rank.hand_in(Receipt(Said.PASSED, time.monotonic()))


def failure(error: BaseException) -> Receipt:
    """Return the receipt of a body that raised ``error``."""
    reason, trace = frames.read_error(error)
    transport = transport_errors.raised_by_transport(error)
    waits = operations.waits_of_error(error) if transport else ()
    return Receipt(Said.FAILED, time.monotonic(), reason, trace, transport, waits)
