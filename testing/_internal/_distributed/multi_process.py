"""``MultiProcessTestCase`` and ``DistributedTestBase``: one set of fresh ranks for every test."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import unittest
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d

from torch_ext.compat.c10d import _get_default_group
from torch_ext.testing._internal._distributed import receipts
from torch_ext.testing._internal._distributed.hosts import assign_hosts, meeting_point
from torch_ext.testing._internal._distributed.methods import PARENT_HALF, RanksTestCase, count_ranks
from torch_ext.testing._internal._distributed.skips import required_devices
from torch_ext.testing._internal.common_utils import set_rng_seed
from torch_ext.world import _os, files, provider, settings, verdict
from torch_ext.world import rank as world_rank
from torch_ext.world.files import RankProcess
from torch_ext.world.follow import World, start_world
from torch_ext.world.outcome import Outcome
from torch_ext.world.protocol import RankStatus
from torch_ext.world.settings import ADDRESS_VARIABLE, HostFile, Limits, hosts_of, ranks_per_host, timeout_of
from torch_ext.world.start import RankTask, ZygoteLostError
from torch_ext.world.verdict import Judgement, WorldFailure, WorldReport, judge
from torch_ext.world.wording import left_behind

__all__ = ["DEFAULT_WORLD_SIZE", "DistributedTestBase", "MultiProcessTestCase"]

__unittest = True

__tracebackhide__ = True  # pytest: its frames say nothing that the report of the ranks does not

DEFAULT_WORLD_SIZE = 4

# Seconds until ranks are gone after they were killed.
_KILL_S = 5.0
# Characters of a traceback that a pipe holds without a reader.
_MAX_PIPE_CHARACTERS = 1 << 14


def start_ranks(module: str, ranks: Sequence[RankTask], test: str, hosts: int = 1) -> World:
    """Start the ranks of ``test`` as the environment selects. ``module`` is the name of its file in zygotes. A zygote
    that was lost since the last test is replaced, once.

    Raises:
        ZygoteLostError: the new zygote was lost too.
        ValueError: the ranks cannot be divided among the ``hosts``; see Note [Several hosts].
    """
    if hosts > 1:
        ranks, store = assign_hosts(ranks, hosts)
        world = start_ranks(module, ranks, test)
        world.store = store
        return world
    for is_last in (False, True):
        try:
            world = start_world(
                provider.zygote_for(module),
                ranks,
                spares=settings.spare_count(len(ranks)),
                show=settings.show_output(),
                test=test,
                own_address=not any(rank.host for rank in ranks) or ADDRESS_VARIABLE not in os.environ,
            )
            break
        except ZygoteLostError:
            if is_last:
                raise
    return world


def raise_verdict(
    outcomes: Sequence[Outcome],
    took_s: float,
    expected_exit: int | None = None,
    any_exit: bool = False,
    differ: str = "",
) -> None:
    """Return if the outcomes mean that the test passed. ``differ``: a report on replicas, which fails it too.

    Raises:
        WorldFailure: they mean that it failed.
        unittest.SkipTest: all ranks skipped.
    """
    verdict = _os.with_room(judge)(outcomes, expected_exit, any_exit)
    if verdict.judgement is Judgement.SKIPPED:
        raise unittest.SkipTest(verdict.summary)
    if differ and verdict.judgement is Judgement.PASSED:
        verdict, differ = replace(verdict, judgement=Judgement.FAILED, summary=differ), ""
    if verdict.judgement is Judgement.FAILED:
        details = (differ,) if differ else ()
        raise _os.with_room(WorldFailure)(WorldReport(tuple(outcomes), verdict, took_s, details))
    for outcome in outcomes:
        for command in outcome.left_behind:
            print(f"torch_ext: rank {outcome.rank} {left_behind(command)}", file=sys.stderr)


class MultiProcessTestCase(RanksTestCase):
    """A test case whose methods run in ``world_size`` ranks, each a fresh process.

    Call ``self._spawn_processes()`` in ``setUp``. The test method then runs in every rank, on its own instance with its
    ``rank`` and a ``file_name`` (an empty file, for a rendezvous). The instance that called ``setUp`` has rank -1 and
    waits. A test passes only if every rank says so. When a rank fails or dies, its peers have one second to do the same
    and are then stopped. A test that exceeds its time limit fails with the stacks of its ranks. With ``hosts = 2`` on
    the class, its ranks run on two machines (``run_test.py --cluster``), or as if they did: see docs/cluster.md.
    """

    MAIN_PROCESS_RANK = -1
    TEST_ERROR_EXIT_CODE = receipts.TEST_ERROR_EXIT_CODE

    rank: int
    file_name: str
    parent_pipe: Connection
    processes: list[RankProcess]
    pid_to_pipe: dict[int, Connection]
    special_return_code_checks: dict[Any, int]
    skip_return_code_checks: list[Any]

    # Whether the harness destroys the process groups that a test leaves initialized.
    @property
    def destroy_pg_upon_exit(self) -> bool:
        return True

    @property
    def world_size(self) -> int:
        return DEFAULT_WORLD_SIZE

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    def _should_stop_test_suite(self) -> bool:
        return False

    def _current_test_name(self) -> str:
        return self._testMethodName  # may have dots, so id() does not show where it begins

    def _wait_for_ranks(self, fn: Callable[[], Any]) -> None:
        parent_half = getattr(fn, PARENT_HALF, type(self)._join_processes)
        parent_half(self, fn)

    # The parent half

    def setUp(self) -> None:
        super().setUp()
        self.special_return_code_checks = {}
        self.skip_return_code_checks = []
        self.processes = []
        self.pid_to_pipe = {}
        self.rank = self.MAIN_PROCESS_RANK
        self._world: World | None = None
        descriptor, self.file_name = tempfile.mkstemp(dir=files.folder())
        os.close(descriptor)
        self.addCleanup(self._clean_up, self.file_name)

    def tearDown(self) -> None:
        super().tearDown()
        self._end_world()

    def _clean_up(self, file_name: str) -> None:
        self._end_world()  # if a subclass's tearDown does not call ours, or setUp raised
        for path in (Path(file_name), *map(self._hashes_of, range(count_ranks(self)))):
            path.unlink(missing_ok=True)

    def _end_world(self) -> None:
        if self._world is not None:
            self._world.close()
        self._world, self.processes, self.pid_to_pipe = None, [], {}
        verdict.check()

    def _kill_ranks(self) -> None:
        """Kill the ranks and wait until they are gone, because the next ones use the same rendezvous file."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(_KILL_S)
        self._end_world()
        with open(self.file_name, "wb"):
            pass

    def _spawn_processes(self) -> None:
        """Start the ranks. Each calls ``_run(rank, test name, file name, connection, fake_pg=...)`` of this class."""
        self._end_world()
        name, size = self._current_test_name(), count_ranks(self)
        parameters = inspect.signature(type(self)._run).parameters.values()
        accepts = any(each.name == "fake_pg" or each.kind is each.VAR_KEYWORD for each in parameters)
        kwargs = {"fake_pg": getattr(self, "fake_pg", False)} if accepts else {}  # existing overrides may lack it
        hosts = hosts_of(self)
        devices = max(ranks_per_host(size, hosts), required_devices(type(self), name))
        arguments = (name, HostFile(self.file_name) if hosts > 1 else self.file_name)
        tasks = [
            RankTask(receipts.run_rank, (type(self), devices, rank, *arguments), kwargs, connections=1)
            for rank in range(size)
        ]
        self._world = start_ranks(type(self).__module__, tasks, self.id(), hosts)
        type(self).addClassCleanup(verdict.check)  # for a run() that calls none of our own
        self.processes = self._world.processes
        self.pid_to_pipe = {each.pid: each.connections[0] for each in self.processes if each.pid is not None}

    def _join_processes(self, fn: Any) -> None:
        if self._world is None:
            why = "setUp() of the test class did not call self._spawn_processes()"
            raise unittest.SkipTest(f"no ranks were started: {why}")
        limits = Limits(test_s=timeout_of(self), hang_s=settings.hang_after_s())
        expected = self.special_return_code_checks.get(fn), fn in self.skip_return_code_checks
        self._outcomes = self._world.wait(limits, *expected)
        self._check_return_codes(fn, self._world.took_s)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        """Judge the ranks' outcomes; see :func:`raise_verdict`."""
        expected = self.special_return_code_checks.get(fn), fn in self.skip_return_code_checks
        differ = ""
        if settings.checks_replicas():
            from torch_ext.replicas import compare

            differ = compare(map(self._hashes_of, range(len(self._outcomes))))
        raise_verdict(self._outcomes, elapsed_time, *expected, differ)

    def _hashes_of(self, rank: int) -> Path:
        """Return the file with what a rank writes of its replicas, if they are checked."""
        return Path(f"{self.file_name}.replicas.{rank}")

    # In a rank

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Connection, **kwargs: Any) -> None:
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.run_test(test_name, parent_pipe)

    def run_test(self, test_name: str, parent_pipe: Connection) -> None:
        """Run the test method. A failure is reported to the parent half at once, and sent to ``parent_pipe`` as text.

        Raises:
            SystemExit: the test failed.
            unittest.SkipTest: the test skipped.
        """
        set_rng_seed()
        self.parent_pipe = parent_pipe
        if settings.checks_replicas():
            from torch_ext.replicas import Recorder

            Recorder(self._hashes_of(self.rank))
        try:
            getattr(self, test_name)()
        except BaseException as error:
            rank, receipt = world_rank.current(), receipts.receipt_of(error)
            if receipt is None or rank is None or receipt.status is not RankStatus.FAILED:
                raise
            with contextlib.suppress(OSError):  # upstream's; reports take the traceback from the receipt
                parent_pipe.send(receipt.trace[-_MAX_PIPE_CHARACTERS:])
            rank.submit(receipts.after_expected_failure(receipt, type(self)))
            sys.exit(self.TEST_ERROR_EXIT_CODE)
        finally:
            parent_pipe.close()
        if self.destroy_pg_upon_exit:
            receipts.end_group_unless_released()


class DistributedTestBase(MultiProcessTestCase):
    """A :class:`MultiProcessTestCase` that starts its ranks in ``setUp`` and makes process groups by device type."""

    def setUp(self) -> None:
        super().setUp()
        os.environ["WORLD_SIZE"] = str(self.world_size)
        self._spawn_processes()

    def tearDown(self) -> None:
        if c10d.is_initialized():
            c10d.destroy_process_group()
        super().tearDown()

    def backend(self, device: str) -> str:
        """Return the c10d backend that torch uses for ``device`` (a type or ``"type:index"``)."""
        return c10d.get_default_backend_for_device(torch.device(device).type)

    def create_pg(self, device: str, world_size: int | None = None) -> c10d.ProcessGroup:
        """Initialize the default group, make the rank's own device current, and return the group. Collective."""
        size = self.world_size if world_size is None else world_size
        where = meeting_point(self.file_name, size)
        c10d.init_process_group(backend=self.backend(device), world_size=size, rank=self.rank, **where)
        current = torch.accelerator.current_accelerator()
        if current is not None and current.type == torch.device(device).type:
            own = torch.device(current.type, self.rank % torch.accelerator.device_count())
            torch.accelerator.set_device_index(own)
            # As upstream's, for these backends alone: a test of placement errors must see them on other devices.
            if self.backend(device) in ("nccl", "xccl"):
                torch.set_default_device(own)
        return _get_default_group()

    def rank_to_device(self, device: str) -> dict[int, list[Any]]:
        """Return a list with one device index for each rank; ranks take the devices in turn."""
        count = torch.get_device_module(device).device_count()
        return {rank: [rank % count] for rank in range(self.world_size)}
