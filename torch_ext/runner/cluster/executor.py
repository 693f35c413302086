"""Runs a plan on a Ray cluster: sends classes to machines as Ray finds room, and repeats the tests of a lost machine.

Note [A lost machine]
~~~~~~~~~~~~~~~~~~~~~
Results arrive as tests end, so a lost machine's results so far count. When its actor or its supervisor has ended, the
tests without a result run again on any machine with room, with a message. A class that has lost three machines fails,
since it may be the cause. A class on several hosts is lost with any of them: the others end it, so that no test fails
for the loss, and the driver ignores their later events.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch_ext
from torch_ext.results import Over, Remark, SetupError, Sink, Status, TestName, TestResult, Tick
from torch_ext.runner.cluster.machines import Machines, in_one_line
from torch_ext.runner.cluster.messages import Event, HostFailed, Joined, RunClass
from torch_ext.runner.names import TestFile
from torch_ext.runner.options import RunOptions
from torch_ext.runner.schedule import Batch, Plan, longest_first
from torch_ext.runner.steps import Executor
from torch_ext.world.wording import announce

# The number of classes for which Ray has a reservation at a time; more cost Ray time and gain nothing.
_AHEAD = 8
_LOOK_S = 0.25  # between polls and ticks
_MAX_LOST = 3  # machines that a class may lose before it fails
_PACKAGE = Path(torch_ext.__file__).resolve().parent


@dataclass
class _Job:
    """A class to run."""

    batch: Batch
    left: list[TestName]  # its tests without a result
    lost: int = 0  # number of lost machines
    number: int = field(default_factory=itertools.count(1).__next__)
    place: Any = None  # Ray's reservation, while there is one
    nodes: tuple[str, ...] = ()  # the ids of its machines, host 0 first; empty before it runs
    joined: int = 0  # number of hosts besides host 0 that can start ranks
    over: bool = False  # later events are ignored


class ClusterExecutor:
    """Runs tests on the machines of ``options.cluster``; names are collected on this machine, by ``here``."""

    def __init__(self, options: RunOptions, here: Executor) -> None:
        self.collect, self._close_local = here.collect, here.close
        self._options = options
        self._machines = Machines(options)
        # Waiting classes, classes that Ray is placing, and the event streams of running classes, each with its host.
        self._waiting: list[_Job] = []
        self._placed: list[_Job] = []
        self._running: dict[Any, tuple[_Job, int]] = {}

    def close(self) -> None:
        """Disconnect from the cluster; end the cluster if this run has started it. Idempotent."""
        self._machines.close()
        self._close_local()

    def run(self, plan: Plan, sink: Sink) -> None:
        """See the Protocol."""
        self._sink, self._folder = sink, _folder_of(self._options.root, [batch.file for batch in plan])
        # Ray's workers run in a copy of the folder, and import this torch_ext.
        shipped: dict[str, Any] = {"working_dir": str(self._folder), "excludes": [".git"]}
        elsewhere = {} if _PACKAGE.is_relative_to(self._folder) else {"py_modules": [str(_PACKAGE)]}
        self._machines.connect({**shipped, **elsewhere})
        self._waiting = [_Job(batch, list(batch.tests)) for batch in longest_first(plan)]
        self._placed, self._running = [], {}
        try:
            while self._waiting or self._placed or self._running:
                self._place_more()
                self._placed = [job for job in self._placed if not self._start(job)]
                if self._receive():
                    return
                self._sink(Tick())
        finally:
            for job in [*self._placed, *(job for job, _ in self._running.values())]:
                self._leave(job)
            if self._running:  # the run stops early
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
        """Return whether the cluster has enough machines for a class. If not, end the class."""
        requested, available, most = job.batch.need.hosts, self._machines.number, self._machines.most
        if requested <= max(1, available):
            return True
        has = available if requested <= most else most
        shortage = f"the class asks for {requested} hosts, and the cluster has {has} machine{'s' * (has != 1)}"
        if requested <= most:
            self._end(job, f"{shortage} left")
        else:
            reason = f"{shortage}; without --cluster, this machine stands for all of them"
            for test in job.left:
                self._sink(TestResult(test, Status.SKIPPED, 0.0, reason=reason))
            self._sink(Over(job.batch.name))
        return False

    def _start(self, job: _Job) -> bool:
        """Start ``job`` if Ray has placed it; return whether it has. Host 0 starts last."""
        job.nodes = self._machines.nodes(job.place, job.batch.need.hosts)
        if unusable := [node for node in job.nodes if not self._machines.has(node)]:
            self._leave(job)
            job.lost += 1
            if job.lost >= _MAX_LOST:
                raise SetupError(f"Ray places classes on the machine {unusable[0][:12]}, which cannot run tests")
            job.place = self._machines.reserve(job.batch.need)
            return False
        for host in range(len(job.nodes))[len(job.nodes) > 1 :]:
            self._order(job, host)
        return bool(job.nodes)

    def _order(self, job: _Job, host: int) -> None:
        """Start the part of a class that belongs to ``host`` on its machine."""
        node, batch = job.nodes[host], job.batch
        path, import_root = (each.relative_to(self._folder) for each in (batch.file.path, batch.file.import_root))
        file = replace(batch.file, path=path, import_root=import_root)
        shipped = batch._replace(file=file, tests=tuple(job.left), need=batch.need.of_each_host)
        names = tuple(map(_name, job.nodes)) if len(job.nodes) > 1 else ()
        order = RunClass(job.number, shipped, host, self._machines.addresses[node], names)
        self._running[self._machines.run(node, order, job.nodes)] = job, host

    def _receive(self) -> bool:
        """Wait a moment for events and handle them. Return whether the run stops."""
        if not self._running:
            time.sleep(_LOOK_S / 5)
        for stream in self._machines.ready(list(self._running), _LOOK_S) if self._running else ():
            job, host = self._running[stream]
            try:
                event = self._machines.next_of(stream)
            except StopIteration:  # this host has finished its part
                del self._running[stream]
                if not host:
                    self._leave(job)
            except Exception as error:  # Ray's errors have no common base that means this
                del self._running[stream]
                self._lost(job, host, in_one_line(error))
            else:
                if not job.over and self._handle(job, host, event):
                    return True
        return False

    def _handle(self, job: _Job, host: int, event: Event) -> bool:
        """Handle an event of a class; return whether the run stops."""
        if isinstance(event, Joined):
            job.joined += 1
            if job.joined == len(job.nodes) - 1:
                self._order(job, 0)
        elif isinstance(event, HostFailed) and event.lost:
            self._lost(job, host, event.why)
        elif isinstance(event, HostFailed):
            self._end(job, f"host {host} ({_name(job.nodes[host])}) cannot run the class: {event.why}")
        elif isinstance(event, TestResult):
            if event.test in job.left:
                job.left.remove(event.test)
            self._sink(event)
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
        if not number or job.lost >= _MAX_LOST:
            last = f"{job.lost} machines were lost while they ran this class, the last one {machine}: {why}"
            self._end(job, last if number else "")
            return
        job.over = True
        self._leave(job)
        which = f"{machine}, host {host} of {job.batch.name.id}," if len(job.nodes) > 1 else machine
        tests = f"{number} test{'s' * (number != 1)} of {job.batch.name.id}"
        announce(f"the machine {which} is lost ({why}); {tests} run again elsewhere")
        self._waiting.insert(0, _Job(job.batch, job.left, job.lost))
        self._machines.connect({})

    def _end(self, job: _Job, failure: str = "") -> None:
        """End a class, which has failed for a ``failure``."""
        job.over = True
        self._leave(job)
        if failure:
            self._sink(TestResult(job.batch.name, Status.FAILED, 0.0, (Remark(failure),)))
        self._sink(Over(job.batch.name))

    def _leave(self, job: _Job) -> None:
        """End a class on all of its hosts, and return its reservation."""
        if job.place is not None:
            self._machines.leave(job.place, job.nodes, job.number)
            job.place = None


def _name(node: str) -> str:
    return f"machine {node[:12]}"


def _folder_of(root: Path, files: Iterable[TestFile]) -> Path:
    """Return the folder to ship: our checkout if it holds the suites, else one with the root and all import roots."""
    folder = Path(os.path.commonpath([root, *(file.import_root for file in files)]))
    checkout = _PACKAGE.parent
    return checkout if folder.is_relative_to(checkout) and (checkout / "run_test.py").is_file() else folder
