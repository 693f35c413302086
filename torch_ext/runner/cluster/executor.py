"""Runs a plan on a Ray cluster: hands classes to machines as Ray makes room, and again what a lost machine took along.

Note [A lost machine]
~~~~~~~~~~~~~~~~~~~~~
Results come as tests end, so what a machine has told is kept. When Ray says that its actor is gone, or that ends
because its supervisor did, the tests without a result run once more, wherever there is room, and the report says so. A
class that has lost three machines fails: it may be what ends them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_ext import cache
from torch_ext.runner.cluster.messages import Ready, RunClass, Settings, Told
from torch_ext.runner.cluster.node import Node
from torch_ext.runner.cluster.placing import Placement, bundle
from torch_ext.runner.cluster.ship import folder_of, runtime_environment, shipped
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.names import Collected
from torch_ext.runner.options import Options
from torch_ext.runner.results import Over, Remark, SetupError, Sink, Status, TestName, TestResult, Tick
from torch_ext.runner.schedule import Batch, Packed, Plan
from torch_ext.world.notices import PREFIX

__all__ = ["ClusterExecutor"]

# How many classes wait for a place at a time; more would cost Ray time and nobody anything else.
_AHEAD = 8
# How often those are looked after, and those who show the time told that it passes, in seconds.
_LOOK_S = 0.25
# How many machines a class may lose.
_MOST_LOST = 3
# How long a machine may take until its supervisor has loaded torch, a minute for the simulator's build included.
_READY_S = 600.0
# How long it may take until what it has started has ended.
_END_S = 30.0


def _ray() -> Any:
    """Return Ray.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise SetupError("--cluster needs Ray, which is not installed here; install it with: pip install ray") from None
    return ray


@dataclass
class _Job:
    """A class on its way.

    Attributes:
        left: its tests without a result.
        lost: how many machines it has lost.
        place: where Ray puts it; None before it is asked.
        node: the id of the machine that it runs on; empty before it runs.
    """

    number: int
    batch: Batch
    left: list[TestName]
    lost: int = 0
    place: Placement | None = None
    node: str = ""


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
        options: Options,
        collect: Callable[[Sequence[TestFile]], Iterator[Collected]],
        close: Callable[[], None],
    ) -> None:
        self.collect = collect
        self._close_local = close
        self._options = options
        self._ray = _ray()
        self._cluster: Any = None
        self._connected = False
        self._nodes: dict[str, Any] = {}  # actors, by the id of their machine
        self._largest_cpus, self._devices = 1.0, 0
        self._numbers = 0

    def run(self, plan: Plan, sink: Sink, renew: Callable[[Collected], Sequence[Batch]]) -> None:
        """See the Protocol. What was remembered of a file is trusted, and not asked for again."""
        if not plan.batches:
            return
        folder = folder_of(self._options.root, [batch.file for batch in plan])
        if not self._nodes:
            self._connect(runtime_environment(folder))
        in_order = self._options.random_order is not None or self._options.failed_first
        waiting = [self._job(batch) for batch in Packed(1, in_order=in_order).order(plan.batches)]
        placed: list[_Job] = []
        running: dict[Any, _Job] = {}
        done = False
        try:
            while (waiting or placed or running) and not done:
                while waiting and len(placed) < _AHEAD and len(placed) + len(running) < self._most:
                    job = waiting.pop(0)
                    job.place = self._placement(job)
                    placed.append(job)
                for job in [job for job in placed if self._begins(job, folder, running)]:
                    placed.remove(job)
                done, again = self._take(running, sink)
                waiting = [*again, *waiting]
                sink(Tick())
        finally:
            for job in [*placed, *running.values()]:
                self._leave(job)
            if running:  # the run stops early: nothing more must come of them
                self._end_nodes()

    def _placement(self, job: _Job) -> Placement:
        return Placement(bundle(job.batch.need, self._largest_cpus, self._devices))

    @property
    def _most(self) -> float:
        return self._options.jobs or float("inf")

    def _job(self, batch: Batch) -> _Job:
        self._numbers += 1
        return _Job(self._numbers, batch, list(batch.tests))

    # Machines

    def _connect(self, runtime_env: dict[str, Any]) -> None:
        """Connect to the cluster, once, and start an actor on each of its machines."""
        if not self._connected:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            address = self._options.cluster
            try:
                if address.startswith("local:"):
                    address = self._start_local(int(address.removeprefix("local:")))
                self._ray.init(
                    address=address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.ERROR
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                first = str(error).partition("\n")[0]
                raise SetupError(f"got --cluster {self._options.cluster}, which cannot be used: {first}") from None
            self._connected = True
        machines = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        if not machines:
            raise SetupError(f"the cluster {self._options.cluster} has no machine with a CPU left")
        self._largest_cpus = max(float(node["Resources"]["CPU"]) for node in machines)
        self._start_nodes([node["NodeID"] for node in machines])

    def _start_local(self, number: int) -> str:
        from ray.cluster_utils import Cluster

        from torch_ext.runner.schedule.slots import cores

        self._cluster = Cluster()
        for _ in range(number):
            self._cluster.add_node(num_cpus=cores(), include_dashboard=False)
        return str(self._cluster.address)

    def _start_nodes(self, ids: Sequence[str]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ours = {name: value for name, value in os.environ.items() if name.startswith("TORCH_EXT_")}
        ours.pop("TORCH_EXT_CACHE", None)
        actor, kept = self._ray.remote(Node), cache.folder()
        for number, node in enumerate(ids):
            local = str(kept / "cluster" / f"node-{number}") if self._cluster is not None and kept is not None else ""
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            how = {"num_cpus": 0, "max_concurrency": 1000, "scheduling_strategy": where}
            self._nodes[node] = actor.options(**how).remote(Settings(self._options, ours, local))
        asked = {node: each.ready.remote() for node, each in self._nodes.items()}
        refused = ""
        for node, ref in asked.items():
            try:
                ready: Ready = self._ray.get(ref, timeout=_READY_S)
                self._devices = max(self._devices, ready.devices)
            except Exception as error:  # whatever its actor raised, and that it is gone
                refused = refused or f"the machine {node[:12]} cannot run tests: {_said(error)}"
                del self._nodes[node]
        if not self._nodes:
            raise SetupError(refused)

    # Classes

    def _begins(self, job: _Job, folder: Any, running: dict[Any, _Job]) -> bool:
        """Run ``job`` if Ray has found a place for it; return whether it has."""
        node = job.place.node() if job.place is not None else ""
        if not node:
            return False
        if node not in self._nodes:  # it joined after the run had begun, or has lost its supervisor
            self._start_nodes([node])
        if node not in self._nodes:
            self._leave(job)
            job.lost += 1
            if job.lost >= _MOST_LOST:
                raise SetupError(f"Ray places classes on the machine {node[:12]}, which cannot run tests")
            job.place = self._placement(job)
            return False
        batch = job.batch
        methods = tuple(test.method for test in job.left)
        order = RunClass(job.number, shipped(batch.file, folder), batch.cls, methods, batch.need)
        job.node = node
        running[self._nodes[node].run.options(num_returns="streaming").remote(order)] = job
        return True

    def _take(self, running: dict[Any, _Job], sink: Sink) -> tuple[bool, list[_Job]]:
        """Take what has come, waiting a moment for it. Return whether the run stops, and what has to run again."""
        again: list[_Job] = []
        if not running:
            time.sleep(_LOOK_S / 5)
            return False, again
        ready, _ = self._ray.wait(list(running), num_returns=1, timeout=_LOOK_S, fetch_local=False)
        if ready and len(running) > 1:
            ready, _ = self._ray.wait(list(running), num_returns=len(running), timeout=0, fetch_local=False)
        for stream in ready:
            job = running[stream]
            try:
                told: Told = self._ray.get(next(stream))
            except StopIteration:
                self._leave(running.pop(stream))
                continue
            except Exception as error:  # Ray's errors have no common base that means this
                self._leave(running.pop(stream))
                self._lost(job, error, sink, again)
                continue
            if told.event is None:
                continue
            event = told.event
            if isinstance(event, TestResult):
                event = _on_our_clock(event, told.now_s)
                if event.test in job.left:
                    job.left.remove(event.test)
            sink(event)
            failed = isinstance(event, TestResult) and event.status.counted is Status.FAILED
            if failed and self._options.failfast:
                return True, again
        return False, again

    def _lost(self, job: _Job, error: Exception, sink: Sink, again: list[_Job]) -> None:
        """See Note [A lost machine]."""
        self._nodes.pop(job.node, None)
        cls = TestName(job.batch.file.name, job.batch.cls)
        if not job.left:
            sink(Over(cls))
            return
        job.lost += 1
        machine, number = job.node[:12], len(job.left)
        tests = f"{number} test{'s' * (number != 1)}"
        if job.lost >= _MOST_LOST:
            said = f"{job.lost} machines were lost while they ran this class, the last one {machine}: {_said(error)}"
            sink(TestResult(cls, Status.FAILED, 0.0, (Remark(said),)))
            sink(Over(cls))
            return
        self._tell(f"the machine {machine} is lost ({_said(error)}); {tests} of {cls.id} run again elsewhere")
        self._numbers += 1
        again.append(_Job(self._numbers, job.batch, job.left, job.lost))
        if not self._nodes:
            self._connect({})

    def _tell(self, said: str) -> None:
        print(f"{PREFIX}{said}", file=sys.stderr, flush=True)

    def _leave(self, job: _Job) -> None:
        if job.place is not None:
            with contextlib.suppress(Exception):  # of a cluster that is gone nothing is left to give back
                job.place.leave()
            job.place = None

    def _end_nodes(self) -> None:
        actors = list(self._nodes.values())
        self._nodes = {}
        with contextlib.suppress(Exception):  # of a cluster that is gone nothing is left to end
            self._ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=_END_S)
        for actor in actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    def close(self) -> None:
        """Let go of the cluster, and end it if it is our own. Idempotent."""
        if self._connected:
            self._connected = False
            self._end_nodes()
            self._ray.shutdown()
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.shutdown()
        self._close_local()


def _said(error: Exception) -> str:
    """Return what an error says, in one line: the last of Ray's, which holds the error of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if "Error: " in line]
    return (ours[-1] if ours else lines[0] if lines else type(error).__name__)[:200]


def _on_our_clock(result: TestResult, now_s: float) -> TestResult:
    """Shift the times of ranks from the machine's clock, on which it is ``now_s``, to that of this process."""
    shift_s = time.monotonic() - now_s

    def shifted(time_s: float) -> float:
        return time_s + shift_s if time_s else 0.0

    ranks = [
        replace(
            one,
            started_s=shifted(one.started_s),
            began_s=shifted(one.began_s),
            met_s=(shifted(one.met_s[0]), shifted(one.met_s[1])),
            done_s=shifted(one.done_s),
            ended_s=shifted(one.ended_s),
        )
        for one in result.ranks
    ]
    return replace(result, ranks=tuple(ranks))
