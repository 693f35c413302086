"""Runs a plan on a Ray cluster: hands classes to machines as Ray makes room, and again the tests of a lost machine.

Note [A lost machine]
~~~~~~~~~~~~~~~~~~~~~
Results come as tests end, so those that a machine has sent are kept. When Ray says that its actor is gone, or that ends
because its supervisor did, the tests without a result run once more, wherever there is room, and the report says so. A
class that has lost three machines fails: it may be what ends them.

A class on several hosts is lost with any of them. Its other hosts end it, so that no test fails for the loss, and their
later events count for nothing.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch_ext
from torch_ext.results import Over, Remark, SetupError, Sink, Status, TestName, TestResult, Tick
from torch_ext.runner.cluster.hosts import on_our_clock
from torch_ext.runner.cluster.machines import Machines, said_in_a_line
from torch_ext.runner.cluster.messages import HostFailed, Joined, RunClass, Told
from torch_ext.runner.names import TestFile
from torch_ext.runner.options import RunOptions
from torch_ext.runner.schedule import Batch, Packed, Plan
from torch_ext.runner.steps import Executor
from torch_ext.world.wording import PREFIX

__all__ = ["ClusterExecutor"]

# How many classes wait for a place at a time; more would cost Ray time and gain nothing.
_AHEAD = 8
# Poll and tick interval, in seconds.
_LOOK_S = 0.25
# How many machines a class may lose.
_MOST_LOST = 3
_PACKAGE = Path(torch_ext.__file__).resolve().parent


@dataclass
class _Job:
    """A class on its way."""

    batch: Batch
    left: list[TestName]  # its tests without a result
    lost: int = 0  # how many machines it has lost
    number: int = field(default_factory=itertools.count(1).__next__)
    place: Any = None  # Ray's reservation for it; None before Ray is asked, and once the room is given back
    nodes: tuple[str, ...] = ()  # the ids of the machines that it runs on, host 0 first; none before it runs
    joined: int = 0  # how many of those from host 1 on can start ranks
    over: bool = False  # no event of it counts any more

    @property
    def cls(self) -> TestName:
        return TestName(self.batch.file.name, self.batch.cls)


class ClusterExecutor:
    """See :class:`~torch_ext.runner.steps.Executor`. Names are collected on this machine, by ``here``; tests run on the
    machines of ``options.cluster``.
    """

    def __init__(self, options: RunOptions, here: Executor) -> None:
        self.collect, self._close_local = here.collect, here.close
        self._options = options
        self._machines = Machines(options)
        # Classes that wait, those that Ray is placing, and the event streams of those that run, each with its host.
        self._waiting: list[_Job] = []
        self._placed: list[_Job] = []
        self._running: dict[Any, tuple[_Job, int]] = {}

    def close(self) -> None:
        """Let go of the cluster, and end it if it is our own. Idempotent."""
        self._machines.close()
        self._close_local()

    def run(self, plan: Plan, sink: Sink) -> None:
        """See the Protocol."""
        if not plan.batches:
            return
        self._sink, self._folder = sink, _folder_of(self._options.root, [batch.file for batch in plan])
        self._machines.connect(_runtime_environment(self._folder))
        self._waiting = [_Job(batch, list(batch.tests)) for batch in Packed(1).order(plan.batches)]
        self._placed, self._running = [], {}
        try:
            while self._waiting or self._placed or self._running:
                self._place_more()
                self._placed = [job for job in self._placed if not self._begins(job)]
                if self._take():
                    return
                self._sink(Tick())
        finally:
            for job in [*self._placed, *(job for job, _ in self._running.values())]:
                self._leave(job)
            if self._running:  # the run stops early: nothing more must come of them
                self._machines.end()

    def _place_more(self) -> None:
        most = self._options.jobs or float("inf")
        at_once = len(self._placed) + len({job.number for job, _ in self._running.values()})
        while self._waiting and len(self._placed) < _AHEAD and at_once < most:
            job = self._waiting.pop(0)
            if self._has_machines_for(job):
                job.place = self._machines.reserve(job.batch.need)
                self._placed.append(job)
                at_once += 1

    def _has_machines_for(self, job: _Job) -> bool:
        """Return whether the cluster has as many machines as a class asks for; end the class if not."""
        wanted, there, most = job.batch.need.hosts, self._machines.number, self._machines.most
        if wanted <= max(1, there):
            return True
        has = there if wanted <= most else most
        told = f"the class asks for {wanted} hosts, and the cluster has {has} machine{'s' * (has != 1)}"
        if wanted <= most:
            self._end(job, f"{told} left")
            return False
        for test in job.left:
            reason = f"{told}; without --cluster, this machine stands for all of them"
            self._sink(TestResult(test, Status.SKIPPED, 0.0, reason=reason))
        self._sink(Over(job.cls))
        return False

    def _begins(self, job: _Job) -> bool:
        """Run ``job`` if Ray has found a place for it; return whether it has. Host 0 begins last."""
        job.nodes = self._machines.nodes(job.place, job.batch.need.hosts)
        if strange := [node for node in job.nodes if not self._machines.has(node)]:
            self._leave(job)
            job.lost += 1
            if job.lost >= _MOST_LOST:
                raise SetupError(f"Ray places classes on the machine {strange[0][:12]}, which cannot run tests")
            job.place = self._machines.reserve(job.batch.need)
            return False
        for host in range(1, len(job.nodes)) if len(job.nodes) > 1 else range(len(job.nodes)):
            self._order(job, host)
        return bool(job.nodes)

    def _order(self, job: _Job, host: int) -> None:
        """Have the machine of ``host`` run its share of a class."""
        node, batch = job.nodes[host], job.batch
        path, import_root = (each.relative_to(self._folder) for each in (batch.file.path, batch.file.import_root))
        file = replace(batch.file, path=path, import_root=import_root)
        shipped = batch._replace(file=file, tests=tuple(job.left), need=batch.need.of_each_host)
        names = tuple(map(_name, job.nodes)) if len(job.nodes) > 1 else ()
        order = RunClass(job.number, shipped, host, self._machines.addresses[node], names)
        self._running[self._machines.run(node, order, job.nodes)] = job, host

    def _take(self) -> bool:
        """Take the events that have come, waiting a moment for one. Return whether the run stops."""
        if not self._running:
            time.sleep(_LOOK_S / 5)
        for stream in self._machines.ready(list(self._running), _LOOK_S) if self._running else ():
            job, host = self._running[stream]
            try:
                told = self._machines.next_of(stream)
            except StopIteration:  # the share of this host is over
                del self._running[stream]
                if not host:
                    self._leave(job)
            except Exception as error:  # Ray's errors have no common base that means this
                del self._running[stream]
                self._lost(job, host, said_in_a_line(error))
            else:
                if not job.over and self._hear(job, host, told):
                    return True
        return False

    def _hear(self, job: _Job, host: int, told: Told) -> bool:
        """Take an event of a class; return whether the run stops."""
        event = told.event
        if isinstance(event, Joined):
            job.joined += 1
            if job.joined == len(job.nodes) - 1:
                self._order(job, 0)
        elif isinstance(event, HostFailed) and event.lost:
            self._lost(job, host, event.why)
        elif isinstance(event, HostFailed):
            self._end(job, f"host {host} ({_name(job.nodes[host])}) cannot run it: {event.why}")
        elif isinstance(event, TestResult):
            if event.test in job.left:
                job.left.remove(event.test)
            shift_s = time.monotonic() - told.now_s
            self._sink(replace(event, ranks=tuple(on_our_clock(rank, shift_s) for rank in event.ranks)))
            return self._options.failfast and event.status.counted is Status.FAILED
        else:
            self._sink(event)
        return False

    def _lost(self, job: _Job, host: int, why: str) -> None:
        """See Note [A lost machine]."""
        node = job.nodes[host]
        self._machines.lose(node)
        if job.over:
            return
        job.lost += 1
        machine, number = node[:12], len(job.left)
        if number and job.lost >= _MOST_LOST:
            self._end(job, f"{job.lost} machines were lost while they ran this class, the last one {machine}: {why}")
            return
        job.over = True
        self._leave(job)
        if not number:
            self._sink(Over(job.cls))
            return
        which = f"{machine}, host {host} of {job.cls.id}," if len(job.nodes) > 1 else machine
        tests = f"{number} test{'s' * (number != 1)} of {job.cls.id}"
        lost = f"{PREFIX}the machine {which} is lost ({why}); {tests} run again elsewhere"
        print(lost, file=sys.stderr, flush=True)
        self._waiting.insert(0, _Job(job.batch, job.left, job.lost))
        self._machines.connect({})

    def _end(self, job: _Job, said: str) -> None:
        """Have the class fail, for a reason in a sentence."""
        job.over = True
        self._leave(job)
        self._sink(TestResult(job.cls, Status.FAILED, 0.0, (Remark(said),)))
        self._sink(Over(job.cls))

    def _leave(self, job: _Job) -> None:
        """End a class on all of its hosts, and give its room back."""
        if job.place is not None:
            self._machines.leave(job.place, job.nodes, job.number)
            job.place = None


def _name(node: str) -> str:
    return f"machine {node[:12]}"


def _folder_of(root: Path, files: Iterable[TestFile]) -> Path:
    """Return the folder that is shipped: our checkout if the suites lie in it, else the smallest that holds the root
    and every folder that a file is imported from.
    """
    folder = Path(os.path.commonpath([root, *(file.import_root for file in files)]))
    checkout = _PACKAGE.parent
    return checkout if folder.is_relative_to(checkout) and (checkout / "run_test.py").is_file() else folder


def _runtime_environment(folder: Path) -> dict[str, Any]:
    """Return Ray's ``runtime_env``: workers run in a copy of ``folder``, and import this torch_ext.

    Ray leaves out what ``.gitignore`` names, and refuses more than 500 MiB.
    """
    found: dict[str, Any] = {"working_dir": str(folder), "excludes": [".git"]}
    if not _PACKAGE.is_relative_to(folder):
        found["py_modules"] = [str(_PACKAGE)]
    return found
