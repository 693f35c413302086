"""``MultiProcContinuousTest``: one set of ranks, and one process group, for all tests of a class."""

from __future__ import annotations

import inspect
import math
import os
import tempfile
import unittest
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.compat._unittest import forget_class_cleanups, run_class_cleanups
from torch_ext.compat.c10d import _get_default_group
from torch_ext.testing._internal._distributed import receipts
from torch_ext.testing._internal._distributed.hosts import meeting_point
from torch_ext.testing._internal._distributed.methods import RanksTestCase, count_ranks
from torch_ext.testing._internal._distributed.multi_process import raise_verdict, start_ranks
from torch_ext.testing._internal._distributed.skips import required_devices
from torch_ext.testing._internal.common_utils import set_rng_seed
from torch_ext.world import files, settings, verdict
from torch_ext.world import rank as world_rank
from torch_ext.world.files import RankProcess
from torch_ext.world.follow import World
from torch_ext.world.outcome import Outcome
from torch_ext.world.protocol import RankStatus
from torch_ext.world.settings import HostFile, Limits, hosts_of, is_multi_host, timeout_of
from torch_ext.world.start import RankTask, ZygoteLostError

__all__ = ["MultiProcContinuousTest"]

__unittest = True

__tracebackhide__ = True  # pytest: its frames say nothing that the report of the ranks does not


_UNSET = -2
_END_S = 15.0  # for the ranks to end when the class does


class MultiProcContinuousTest(RanksTestCase):
    """A test case whose ranks, with their process group, live as long as the class.

    The tests of a class share processes, process group, and all state that a test leaves in them, but not the instance
    and the random seed. After a test that fails, or a rank that dies, the next test gets fresh ranks.

    Subclasses may set ``world_size`` (by default the number of devices) and ``timeout``, and override ``backend_str``,
    ``device_type`` and ``opts``.
    """

    MAIN_PROCESS_RANK = -1

    world_size: Any = _UNSET
    rank: int = _UNSET
    rdvz_file: str | None = None
    timeout: timedelta = timedelta(seconds=120)
    poison_pill: bool = False  # upstream sets it after a failure, here only subclasses do

    pg: ClassVar[c10d.ProcessGroup]
    processes: ClassVar[list[RankProcess]] = []
    # Upstream's name: its subclasses without ranks set it, and override the methods that start and end ranks.
    _processes_spawned: ClassVar[bool] = False
    _world: ClassVar[World | None] = None

    @classmethod
    def backend_str(cls) -> str | None:
        """Return the process group's backend. With None, torch chooses by the device of each tensor."""
        return None

    @classmethod
    def device_type(cls) -> str:
        """Return the device type under test."""
        return accelerator.device_type()

    @classmethod
    def opts(cls, high_priority_stream: bool = False) -> Any:
        """Return options for the process group's backend, or None."""
        return None

    def _worker_run_main_wait(self, fn: Callable[[], Any]) -> Any:
        return self.join_or_run(fn)

    # The parent half

    @classmethod
    def tearDownClass(cls) -> None:
        cls._end_ranks()
        super().tearDownClass()

    def setUp(self) -> None:
        cls = type(self)
        super().setUp()
        self.addCleanup(self._check_ranks)
        if cls.poison_pill:
            raise unittest.SkipTest(f"an earlier test of {cls.__name__} set poison_pill, which skips the rest")
        if cls._world is not None:
            try:
                cls._world.pump(0)
            except ZygoteLostError:  # since the last test
                cls._drop_ranks()
        cls._ensure_processes_spawned()
        self.rank = self.MAIN_PROCESS_RANK
        if cls._world is None:
            raise AssertionError("no ranks were started")
        cls._world.new_round(self.id(), True)

    @classmethod
    def _ensure_processes_spawned(cls) -> None:
        """Start the ranks if there are none. Device-generic classes call ``setUpClass`` too early for this."""
        if cls._world is not None:
            return
        # Existing subclasses define these as class methods, properties or strings.
        device_type = cls._value_of("device_type")
        cls.world_size = cls._get_world_size(str(device_type() if callable(device_type) else device_type))
        backend = cls.backend_str() if callable(cls.backend_str) else cls.backend_str
        if backend is not None and ":" not in backend and not c10d.is_backend_available(backend):
            raise unittest.SkipTest(f"this torch has no backend {backend!r}")
        cls._spawn_processes(cls.world_size)

    @classmethod
    def _value_of(cls, name: str) -> Any:
        found = inspect.getattr_static(cls, name, None)
        if isinstance(found, property) and found.fget is not None:
            # The property may read others, such as world_size.
            return found.fget(object.__new__(cls))
        return getattr(cls, name)

    @classmethod
    def _get_world_size(cls, device_type: str) -> int:
        if (found := cls._value_of("world_size")) is not _UNSET:
            return count_ranks(cls, found)
        count = torch.get_device_module(device_type).device_count()
        if not count:
            raise unittest.SkipTest(f"no {device_type} device is available; set world_size on {cls.__name__}")
        return int(count)

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        descriptor, cls.rdvz_file = tempfile.mkstemp(dir=files.folder())
        os.close(descriptor)
        hosts = hosts_of(cls)
        arguments = (int(world_size), HostFile(cls.rdvz_file) if hosts > 1 else cls.rdvz_file)
        tasks = [RankTask(cls._rank_main, (rank, *arguments), connections=1) for rank in range(int(world_size))]
        cls._world = start_ranks(cls.__module__, tasks, cls.__qualname__, hosts)
        cls.processes, cls._processes_spawned = cls._world.processes, True
        cls.addClassCleanup(cls._end_ranks)  # for a tearDownClass() that does not call ours

    @classmethod
    def _end_ranks(cls) -> None:
        """Ask the ranks to end, wait until they have, and forget them. Raises WorldFailure if one does not end well."""
        world = cls._forget_ranks()
        if world is None:
            return
        try:
            world.new_round(f"the end of {cls.__qualname__}", False)
            # The runner kills this process at the whole limit; half of it leaves time to report the rank that hangs.
            outcomes = world.wait(Limits(test_s=min(_END_S, (settings.time_limit_s() or math.inf) / 2)))
            raise_verdict(outcomes, world.took_s)
        finally:
            world.close()
            if cls.rdvz_file is not None and os.path.exists(cls.rdvz_file):
                os.remove(cls.rdvz_file)

    def _check_ranks(self) -> None:
        """Fail if the test ended without waiting for the ranks, which may still run it: drop them."""
        try:
            verdict.check()
        except verdict.UnjudgedRanksError:
            self._drop_ranks()
            raise

    def _wait_for_ranks(self, fn: Callable[[], Any]) -> None:
        cls = type(self)
        world = cls._world
        if world is None:
            raise AssertionError("no ranks were started")
        self._outcomes = outcomes = list[Outcome]()
        try:
            outcomes += world.wait(Limits(test_s=timeout_of(self), hang_s=settings.hang_after_s()), keep=True)
        finally:
            if not outcomes or any(not outcome.ok or outcome.exit_code is not None for outcome in outcomes):
                cls._drop_ranks()
        raise_verdict(outcomes, world.took_s)

    @classmethod
    def _forget_ranks(cls) -> World | None:
        world, cls._world, cls.processes, cls._processes_spawned = cls._world, None, [], False
        return world

    @classmethod
    def _drop_ranks(cls) -> None:
        """Drop the ranks after a failure, because some may wait for the failed one."""
        world = cls._forget_ranks()
        if world is not None:
            world.close()

    # In a rank

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        if not is_multi_host():
            os.environ["LOCAL_RANK"] = str(rank)  # as a launcher would, so that init_device_mesh() knows the device
        c10d.init_process_group(
            cls.backend_str(),
            timeout=cls.timeout,
            **meeting_point(rdvz_file, world_size),
            rank=rank,
            world_size=world_size,
            pg_options=cls.opts(),
        )
        cls.pg = _get_default_group()

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        name = test_id.rpartition(f"{cls.__name__}.")[2]  # which may have dots
        self = cls(name)
        self.rank = cls.rank
        self.world_size = cls.world_size
        set_rng_seed()
        getattr(self, name)(**kwargs)

    @classmethod
    def _rank_main(cls, rank: int, world_size: int, rdvz_file: str, tests: Connection) -> None:
        """Run the tests whose tickets arrive on ``tests``, and report a receipt for each."""
        me = world_rank.this_rank()
        accelerator.request_devices(max(world_size, required_devices(cls)))
        forget_class_cleanups(cls)
        cls.rank, cls.world_size = rank, world_size
        group_error: BaseException | None = None
        try:
            cls._init_pg(rank, world_size, rdvz_file)
        except (Exception, SystemExit) as error:
            group_error = error
        while receipts.next_order(tests):  # False at the end of the class
            if group_error is not None:
                receipt = receipts.receipt_of(group_error)
                if receipt is None:
                    raise group_error
            else:
                receipt = receipts.run_test(cls._run_test_given_id, me.test)
            if me.report(receipts.after_expected_failure(receipt, cls)).status is RankStatus.FAILED:
                run_class_cleanups(cls)
                return
        if group_error is None:
            receipts.end_group_unless_released()
        for failed in run_class_cleanups(cls):
            raise failed
