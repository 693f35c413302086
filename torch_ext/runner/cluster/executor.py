"""Runs a plan on a Ray cluster: hands classes to machines as Ray makes room, and again what a lost machine took along.

Note [A lost machine]
~~~~~~~~~~~~~~~~~~~~~
Results come as tests end, so what a machine has told is kept. When Ray says that its actor is gone, or that ends
because its supervisor did, the tests without a result run once more, wherever there is room, and the report says so. A
class that has lost three machines fails: it may be what ends them.

A class on several hosts is lost with any of them. Its host 0 may notice that before Ray does, and ends the class then,
so that no test fails for it. What its other machines still say counts for nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch_ext
from torch_ext.runner.cluster.link import on_our_clock
from torch_ext.runner.cluster.machines import Machines, Placement, bundle, said_in_a_line
from torch_ext.runner.cluster.messages import HostLost, Listening, Peer, RunClass, Told
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.names import Collected
from torch_ext.runner.options import RunOptions
from torch_ext.runner.results import Over, Remark, SetupError, Sink, Status, TestName, TestResult, Tick
from torch_ext.runner.schedule import Batch, Packed, Plan
from torch_ext.world.wording import PREFIX

__all__ = ["ClusterExecutor"]

# How many classes wait for a place at a time; more would cost Ray time and nobody anything else.
_AHEAD = 8
# How often those are looked after, and those who show the time told that it passes, in seconds.
_LOOK_S = 0.25
# How many machines a class may lose.
_MOST_LOST = 3
_PACKAGE = Path(torch_ext.__file__).resolve().parent


@dataclass
class _Job:
    """A class on its way.

    Attributes:
        left: its tests without a result.
        lost: how many machines it has lost.
        place: where Ray puts it; None before it is asked.
        nodes: the ids of the machines that it runs on, host 0 first; none before it runs.
        ports: where those from host 1 on wait for host 0.
        token: what they know that by.
        over: nothing that is still said of it counts.
    """

    number: int
    batch: Batch
    left: list[TestName]
    lost: int = 0
    place: Placement | None = None
    nodes: tuple[str, ...] = ()
    ports: dict[int, int] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    over: bool = False

    @property
    def cls(self) -> TestName:
        return TestName(self.batch.file.name, self.batch.cls)


# What a machine tells of a class, and which of its hosts it is.
_Streams = dict[Any, tuple[_Job, int]]


class ClusterExecutor:
    """See :class:`~torch_ext.runner.executor.Executor`. Names are collected on this machine, tests run on those of
    ``options.cluster``, which is ``local:N`` or an address that Ray understands.

    Args:
        options: what the user asked for.
        collect: names the tests of files; see the Protocol.
        close: ends what that has started.
    """

    def __init__(
        self,
        options: RunOptions,
        collect: Callable[[Sequence[TestFile]], Iterator[Collected]],
        close: Callable[[], None],
    ) -> None:
        self.collect = collect
        self._close_local = close
        self._options = options
        self._machines = Machines(options)
        self._numbers = 0

    def run(self, plan: Plan, sink: Sink) -> None:
        """See the Protocol."""
        if not plan.batches:
            return
        folder = _folder_of(self._options.root, [batch.file for batch in plan])
        self._machines.connect(_runtime_environment(folder))
        in_order = self._options.random_order is not None
        waiting = [self._job(batch) for batch in Packed(1, in_order=in_order).order(plan.batches)]
        placed: list[_Job] = []
        running: _Streams = {}
        done = False
        try:
            while (waiting or placed or running) and not done:
                at_once = len(placed) + len({job.number for job, _ in running.values()})
                while waiting and len(placed) < _AHEAD and at_once < self._most:
                    job = waiting.pop(0)
                    if self._has_machines_for(job, sink):
                        job.place = self._placement(job)
                        placed.append(job)
                        at_once += 1
                for job in [job for job in placed if self._begins(job, folder, running)]:
                    placed.remove(job)
                done, again = self._take(running, folder, sink)
                waiting = [*again, *waiting]
                sink(Tick())
        finally:
            for job in [*placed, *(job for job, _ in running.values())]:
                self._leave(job)
            if running:  # the run stops early: nothing more must come of them
                self._machines.end()

    def _placement(self, job: _Job) -> Placement:
        need = job.batch.need
        resources = bundle(need.of_each_host, self._machines.largest_cpus, self._machines.devices)
        return Placement(resources, need.hosts)

    def _has_machines_for(self, job: _Job, sink: Sink) -> bool:
        """Return whether the cluster has as many machines as a class asks for; end the class if not."""
        wanted, there = job.batch.need.hosts, self._machines.number
        if wanted <= max(1, there):
            return True
        asks = f"the class asks for {wanted} hosts"
        if wanted <= self._machines.most:
            had = self._machines.most
            said = f"{asks}, and of the cluster's {had} machines only {there} {'is' if there == 1 else 'are'} left"
            sink(TestResult(job.cls, Status.FAILED, 0.0, (Remark(said),)))
        else:
            has = f"{self._machines.most} machine{'s' * (self._machines.most != 1)}"
            reason = f"{asks}, and the cluster has {has}; without --cluster, this machine stands for all of them"
            for test in job.left:
                sink(TestResult(test, Status.SKIPPED, 0.0, reason=reason))
        sink(Over(job.cls))
        return False

    @property
    def _most(self) -> float:
        return self._options.jobs or float("inf")

    def _job(self, batch: Batch) -> _Job:
        self._numbers += 1
        return _Job(self._numbers, batch, list(batch.tests))

    # Classes

    def _begins(self, job: _Job, folder: Path, running: _Streams) -> bool:
        """Run ``job`` if Ray has found a place for it; return whether it has."""
        nodes = job.place.nodes() if job.place is not None else ()
        if not nodes:
            return False
        for node in nodes:
            if not self._machines.has(node):
                self._leave(job)
                job.lost += 1
                if job.lost >= _MOST_LOST:
                    raise SetupError(f"Ray places classes on the machine {node[:12]}, which cannot run tests")
                job.place = self._placement(job)
                return False
        job.nodes = nodes
        for host in range(1, len(nodes)):
            self._order(job, host, folder, running)
        if len(nodes) == 1:
            self._run_class(job, folder, running)
        return True

    def _run_class(self, job: _Job, folder: Path, running: _Streams) -> None:
        """Run ``job`` on its host 0; the others wait for that."""
        peers = [
            Peer(self._machines.addresses[node], job.ports[host], f"machine {node[:12]}")
            for host, node in enumerate(job.nodes[1:], 1)
        ]
        self._order(job, 0, folder, running, tuple(peers))

    def _order(self, job: _Job, host: int, folder: Path, running: _Streams, peers: tuple[Peer, ...] = ()) -> None:
        node, batch = job.nodes[host], job.batch
        file = replace(
            batch.file,
            path=batch.file.path.relative_to(folder),
            import_root=batch.file.import_root.relative_to(folder),
        )
        shipped = batch._replace(file=file, tests=tuple(job.left), need=batch.need.of_each_host)
        address, name = self._machines.addresses[node], f"machine {node[:12]}"
        order = RunClass(job.number, shipped, host, address, name, peers, job.token)
        running[self._machines.run(node, order)] = job, host

    def _take(self, running: _Streams, folder: Path, sink: Sink) -> tuple[bool, list[_Job]]:
        """Take what has come, waiting a moment for it. Return whether the run stops, and what has to run again."""
        again: list[_Job] = []
        if not running:
            time.sleep(_LOOK_S / 5)
            return False, again
        for stream in self._machines.ready(list(running), _LOOK_S):
            job, host = running[stream]
            try:
                told: Told = self._machines.next_of(stream)
            except StopIteration:
                del running[stream]
                if not host:
                    self._leave(job)
                continue
            except Exception as error:  # Ray's errors have no common base that means this
                del running[stream]
                self._lost(job, host, said_in_a_line(error), sink, again)
                continue
            event = told.event
            if event is None or job.over:
                continue
            if isinstance(event, Listening):
                job.ports[host] = event.port
                if len(job.ports) == len(job.nodes) - 1:
                    self._run_class(job, folder, running)
                continue
            if isinstance(event, HostLost):
                if event.gone:
                    self._lost(job, event.host, event.why, sink, again)
                else:
                    self._end(
                        job,
                        f"host {event.host} (machine {job.nodes[event.host][:12]}) cannot run it: {event.why}",
                        sink,
                    )
                continue
            if isinstance(event, TestResult):
                event = _on_our_clock(event, told.now_s)
                if event.test in job.left:
                    job.left.remove(event.test)
            sink(event)
            failed = isinstance(event, TestResult) and event.status.counted is Status.FAILED
            if failed and self._options.failfast:
                return True, again
        return False, again

    def _lost(self, job: _Job, host: int, why: str, sink: Sink, again: list[_Job]) -> None:
        """See Note [A lost machine]."""
        node = job.nodes[host]
        self._machines.lose(node)
        if job.over:
            return
        job.over = True
        self._leave(job)
        if not job.left:
            sink(Over(job.cls))
            return
        job.lost += 1
        machine, number = node[:12], len(job.left)
        tests = f"{number} test{'s' * (number != 1)}"
        if job.lost >= _MOST_LOST:
            self._end(
                job, f"{job.lost} machines were lost while they ran this class, the last one {machine}: {why}", sink
            )
            return
        which = f"{machine}, host {host} of {job.cls.id}," if len(job.nodes) > 1 else machine
        self._tell(f"the machine {which} is lost ({why}); {tests} of {job.cls.id} run again elsewhere")
        self._numbers += 1
        again.append(_Job(self._numbers, job.batch, job.left, job.lost))
        self._machines.connect({})

    def _end(self, job: _Job, said: str, sink: Sink) -> None:
        """Have the class fail for what a sentence says."""
        job.over = True
        self._leave(job)
        sink(TestResult(job.cls, Status.FAILED, 0.0, (Remark(said),)))
        sink(Over(job.cls))

    def _tell(self, said: str) -> None:
        print(f"{PREFIX}{said}", file=sys.stderr, flush=True)

    def _leave(self, job: _Job) -> None:
        if job.place is not None:
            with contextlib.suppress(Exception):  # of a cluster that is gone nothing is left to give back
                job.place.leave()
            job.place = None

    def close(self) -> None:
        """Let go of the cluster, and end it if it is our own. Idempotent."""
        self._machines.close()
        self._close_local()


def _on_our_clock(result: TestResult, now_s: float) -> TestResult:
    """Shift the times of ranks from the machine's clock, which reads ``now_s``, to that of this process."""
    shift_s = time.monotonic() - now_s
    ranks = [
        replace(
            one,
            receipt=on_our_clock(one.receipt, shift_s),
            started_s=one.started_s + shift_s,
            ended_s=one.ended_s + shift_s if one.ended_s else 0.0,
        )
        for one in result.ranks
    ]
    return replace(result, ranks=tuple(ranks))


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
