"""``MultiThreadedTestCase``: ranks that are threads of the parent half, over torch's threaded process group."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar

import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.compat.c10d import _set_thread_isolation_mode
from torch_ext.compat.testing import _install_threaded_pg, _uninstall_threaded_pg, separate_threaded_worlds
from torch_ext.testing._internal._distributed import rank_threads
from torch_ext.testing._internal._distributed.methods import RanksTestCase, count_ranks
from torch_ext.testing._internal._distributed.multi_process import DEFAULT_WORLD_SIZE, raise_verdict
from torch_ext.testing._internal._distributed.rank_threads import RankThread
from torch_ext.testing._internal._distributed.skips import required_devices
from torch_ext.testing._internal.common_utils import TestCase
from torch_ext.world import provider, settings, verdict
from torch_ext.world._os import monotonic
from torch_ext.world.outcome import Outcome
from torch_ext.world.settings import TIMEOUT_DEFAULT, seconds_of, timeout_of
from torch_ext.world.verdict import check_ran

__all__ = ["MultiThreadedTestCase", "spawn_threads_and_init_comms"]

__unittest = True

__tracebackhide__ = True  # pytest: its frames say nothing that the report of the ranks does not


def _run_rank(rank: int, world_size: int, store: c10d.Store, body: Callable[[], Any]) -> None:
    """Run ``body`` in this thread as ``rank`` of a fresh threaded group. An exception wakes the peers."""
    c10d.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
    try:
        body()
    except BaseException as error:
        rank_threads.hand_in(error)  # before the peers wake and fail because of it
        rank_threads.end_world()
    finally:
        if rank_threads.is_of_this_test():  # else the registry of groups belongs to another test
            c10d.destroy_process_group()
    rank_threads.hand_in(None)


def _install_threaded_groups() -> None:
    """Have the groups that threads of this process make be torch's threaded ones."""
    _set_thread_isolation_mode(True)
    _install_threaded_pg()
    separate_threaded_worlds(rank_threads.world_of)


class MultiThreadedTestCase(RanksTestCase):
    """A test case whose methods run in ``world_size`` threads of this process.

    Call ``self._spawn_threads()`` in ``setUp``. Each thread has its own instance, rank and default process group; all
    else is shared. Put per-rank setup in ``perThreadSetUp`` and ``perThreadTearDown``. A rank that fails wakes its
    peers from their collectives. A rank that hangs fails the test at its time limit, and its thread stays behind.
    """

    MAIN_THREAD_RANK = -1

    global_store: ClassVar[c10d.Store]
    exception_queue: ClassVar[queue.Queue[Any]] = queue.Queue()  # upstream's; outcomes hold exceptions

    rank: int
    threads: list[RankThread]

    def _prepare(self) -> None:
        provider.watch_this_process()

    @property
    def world_size(self) -> int:
        return DEFAULT_WORLD_SIZE

    @property
    def _current_test_name(self) -> str:
        return self._testMethodName  # may have dots, so id() does not show where it begins

    def _wait_for_ranks(self, fn: Callable[[], Any]) -> None:
        self._join_threads(self.threads, fn, timeout_of(self))

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(verdict.check)
        self.rank = self.MAIN_THREAD_RANK
        self.threads = []

    def tearDown(self) -> None:
        super().tearDown()
        self.threads = []

    def perThreadSetUp(self) -> None:
        """Called in every rank before the test, in place of ``setUp``."""

    def perThreadTearDown(self) -> None:
        """Called in every rank after the test, in place of ``tearDown``."""

    def _spawn_threads(self) -> None:
        """Start a thread for each rank. Call it in ``setUp``."""
        cls, name, size = type(self), self._current_test_name, count_ranks(self)
        # A process has one device count, so ask for what the later tests need too. Threads may share a device.
        accelerator.request_devices(min(max(size, required_devices(cls)), accelerator.MAX_DEVICES))
        _install_threaded_groups()
        cls.global_store = c10d.HashStore()
        cls.addClassCleanup(verdict.check)  # for a run() that bypasses our own
        self.threads = rank_threads.start(size, lambda rank: cls._run(name, rank, size))

    @classmethod
    def _run(cls, test_name: str, rank: int, world_size: int, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        if hasattr(self, "_tls"):
            # Tolerances that a test overrides are thread-local, so each rank needs its own.
            self._tls = threading.local()
            self._tls.precision = TestCase._precision
            self._tls.rel_tol = TestCase._rel_tol
        self.run_test_with_threaded_pg(test_name, rank, world_size)

    def run_test_with_threaded_pg(self, test_name: str, rank: int, world_size: int) -> None:
        """Run the test method as ``rank`` in this thread."""

        def body() -> None:
            self.perThreadSetUp()
            try:
                getattr(self, test_name)()
            finally:
                self.perThreadTearDown()

        _run_rank(rank, world_size, type(self).global_store, body)

    @classmethod
    def _join_threads(cls, threads: Sequence[RankThread], fn: Any, timeout: float = TIMEOUT_DEFAULT) -> None:
        started = monotonic()
        try:
            outcomes = rank_threads.wait(threads, timeout)
        finally:
            _uninstall_threaded_pg()
            _set_thread_isolation_mode(False)
        cls._check_return_codes(outcomes, monotonic() - started, fn)

    @classmethod
    def _check_return_codes(cls, outcomes: Sequence[Outcome], elapsed_time: float, fn: Any) -> None:
        raise_verdict(outcomes, elapsed_time)

    def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        """Compare on one rank only: threads share the CPU's random generator, so others differ from run to run."""
        if self.rank == rank:
            self.assertEqual(x, y, msg)

    def assertNotEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        if self.rank == rank:
            self.assertNotEqual(x, y, msg)


def spawn_threads_and_init_comms(
    func: Callable[..., Any] | None = None, timeout: float = TIMEOUT_DEFAULT, world_size: int = DEFAULT_WORLD_SIZE
) -> Callable[..., Any]:
    """Run a test method in ``world_size`` threads, each with a rank and a default process group. Use it with or without
    arguments. A rank that has not ended after ``timeout`` seconds fails the test.
    """
    if func is None:
        return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)

    @wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        _install_threaded_groups()
        store = c10d.HashStore()
        threads = rank_threads.start(
            world_size,
            lambda rank: _run_rank(
                rank, world_size, store, lambda: check_ran(func(self, *args, **kwargs), func.__name__)
            ),
        )
        limit_s = settings.time_limit_s() or seconds_of(timeout, f"the timeout of {func.__name__}()")
        MultiThreadedTestCase._join_threads(threads, func, limit_s)

    return wrapper
