"""Manages the machines of a Ray cluster: connects to them, keeps an actor on each to run tests, and has Ray place
classes. Imports Ray on use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch_ext import cache
from torch_ext.results import Needs, SetupError
from torch_ext.runner.cluster.messages import Event, Line, RunClass
from torch_ext.runner.options import RunOptions
from torch_ext.runner.schedule import cores
from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair


class SupervisorDiedError(RuntimeError):
    """The supervisor of a machine has ended by itself, or was killed."""


class Node:
    """One machine. Ray calls its methods on several threads concurrently."""

    def __init__(self, options: RunOptions, environment: dict[str, str]) -> None:
        self._channel, remote = channel_pair()
        environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        program = [sys.executable, "-m", "torch_ext.runner.cluster.supervisor", str(remote.fileno())]
        self._process = subprocess.Popen(
            program, pass_fds=[remote.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        remote.close()
        self._sending = threading.Lock()
        self._channels: dict[int, Channel] = {}  # of the running classes, by number
        self._channel.send(options)

    def ready(self) -> int:
        """Wait until the supervisor accepts classes; return the number of devices that its ranks share, 0 without a
        limit. Raises SupervisorDiedError if it cannot load its modules; Ray's log of this machine has its output.
        """
        try:
            return int(self._channel.receive()[0])
        except ChannelClosedError:
            raise SupervisorDiedError(f"its supervisor ended with code {self._process.wait()} at its start") from None

    def run(self, order: RunClass, peers: Sequence[Any] = ()) -> Iterator[Event]:
        """Run a class, or ranks of one, with the actors ``peers`` of all its hosts; yield its events as they happen.
        Raises SupervisorDiedError if the supervisor ends before the class does.
        """
        try:
            with self._sending:
                channel = self._channels[order.number] = self._channel.connect(order)
            while (message := channel.receive()[0]) is not None:
                if isinstance(message, Line):
                    peers[message.to].pass_on.remote(order.number, message)  # the driver notices a lost host
                else:
                    yield message
        except OSError:
            raise SupervisorDiedError("its supervisor ended") from None
        finally:
            with self._sending:
                if order.number in self._channels:
                    self._channels.pop(order.number).close()

    def pass_on(self, number: int, line: Line | None) -> None:
        """Pass on a message of another host of class ``number``, if that has not ended; None ends the class."""
        with self._sending:
            if number in self._channels:
                self._channels[number].try_send(line)

    def end(self) -> None:
        """End the supervisor with its processes, and wait for that."""
        with self._sending, contextlib.suppress(OSError):
            self._channel.shut()
        self._process.wait()


# Seconds for a supervisor to load torch, the simulator's build included, and to end with its processes.
_READY_S, _END_S = 600.0, 30.0
# As on a single machine: ranks wait for each other most of the time.
_RANKS_PER_CPU = 4


class Machines:
    """The machines of ``options.cluster``: ``local:N``, or an address that Ray accepts."""

    def __init__(self, options: RunOptions) -> None:
        try:
            import ray
        except ImportError:
            hint = "install it with: pip install ray"
            raise SetupError(f"--cluster needs Ray, which is not installed here; {hint}") from None
        self.addresses: dict[str, str] = {}  # by the machine's id
        self.most = 0  # the largest number of machines so far
        self._largest_cpus, self._devices = 1.0, 0  # of one machine
        self._options = options
        self._ray = ray
        self._cluster: Any = None
        self._actors: dict[str, Any] = {}  # by the machine's id
        self._lost: set[str] = set()  # Ray may still list them

    def connect(self, runtime_env: dict[str, Any]) -> None:
        """Connect to the cluster, once, and start an actor on each machine, unless actors exist."""
        if self._actors:
            return
        if not self._ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            address = self._options.cluster
            try:
                if address.startswith("local:"):
                    address = self._start_local(int(address.removeprefix("local:")))
                quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
                self._ray.init(address=address, runtime_env=runtime_env, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                first = str(error).partition("\n")[0]
                raise SetupError(f"got --cluster {self._options.cluster}, which cannot be used: {first}") from None
        machines = self._look()
        if not machines:
            raise SetupError(f"the cluster {self._options.cluster} has no machine with a CPU left")
        self._largest_cpus = max(float(node["Resources"]["CPU"]) for node in machines)
        refused = self._start([node["NodeID"] for node in machines])
        if not self._actors:
            raise SetupError(refused)

    def _start_local(self, number: int) -> str:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        for _ in range(number):
            self._cluster.add_node(num_cpus=cores(), include_dashboard=False)
        return str(self._cluster.address)

    def _look(self) -> list[dict[str, Any]]:
        """Return Ray's description of each live machine with a CPU."""
        found = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        self.addresses.update({node["NodeID"]: node["NodeManagerAddress"] for node in found})
        self.most = max(self.most, len(found))
        return found

    @property
    def number(self) -> int:
        """The number of machines, without lost ones."""
        return sum(node["NodeID"] not in self._lost for node in self._look())

    def _start(self, ids: Sequence[str]) -> str:
        """Start an actor on each of these machines; return why one of them cannot run tests, or an empty string."""
        variables = {name: value for name, value in os.environ.items() if name.startswith("TORCH_EXT_")}
        variables.pop("TORCH_EXT_CACHE", None)
        actor, kept = self._ray.remote(Node), cache.folder()
        for number, node in enumerate(ids):
            if self._cluster is not None and kept is not None:
                variables["TORCH_EXT_CACHE"] = str(kept / "cluster" / f"node-{number}")
            where = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            how = {"num_cpus": 0, "max_concurrency": 1000, "scheduling_strategy": where}
            self._actors[node] = actor.options(**how).remote(self._options, dict(variables))
        refused = ""
        for node, ref in {node: self._actors[node].ready.remote() for node in ids}.items():
            try:
                self._devices = max(self._devices, self._ray.get(ref, timeout=_READY_S))
                self._lost.discard(node)
            except Exception as error:  # the actor's, or Ray's for a dead actor
                refused = refused or f"the machine {node[:12]} cannot run tests: {in_one_line(error)}"
                del self._actors[node]
        return refused

    def has(self, node: str) -> bool:
        """Return whether the machine can run tests. Starts an actor on one that joined late or lost its supervisor."""
        if node not in self._actors:
            self._start([node])
        if node not in self.addresses:
            self._look()
        return node in self._actors and node in self.addresses

    def reserve(self, need: Needs) -> Any:
        """Ask Ray for room for a class, each host on another machine of Ray's choice; return the reservation."""
        resources = bundle(need.of_each_host, self._largest_cpus, self._devices)
        return self._ray.util.placement_group(
            [resources] * need.hosts, strategy="STRICT_SPREAD" if need.hosts > 1 else "PACK"
        )

    def nodes(self, reservation: Any, hosts: int) -> tuple[str, ...]:
        """Return the ids of the machines of a reservation; an empty tuple while there is no room."""
        table = self._ray.util.placement_group_table(reservation)
        created = table.get("state") == "CREATED"
        return tuple(str(table["bundles_to_node_id"][host]) for host in range(hosts)) if created else ()

    def lose(self, node: str) -> None:
        """Stop using a machine after its loss, or its supervisor's."""
        self._actors.pop(node, None)
        self._lost.add(node)

    def run(self, node: str, order: RunClass, hosts: Sequence[str]) -> Any:
        """Start a machine's part of a class; return the stream of events, for :meth:`ready` and :meth:`next_of`."""
        peers = [self._actors.get(each) for each in hosts] if len(hosts) > 1 else []
        return self._actors[node].run.options(num_returns="streaming").remote(order, peers)

    def leave(self, reservation: Any, nodes: Sequence[str], number: int) -> None:
        """End a class on its machines, and return its reservation to Ray."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            for actor in filter(None, map(self._actors.get, nodes)):
                actor.pass_on.remote(number, None)
            self._ray.util.remove_placement_group(reservation)

    def ready(self, streams: Sequence[Any], timeout_s: float) -> list[Any]:
        """Wait at most ``timeout_s`` seconds for an event; return the streams that have one."""
        found, _ = self._ray.wait(list(streams), num_returns=1, timeout=timeout_s, fetch_local=False)
        if found and len(streams) > 1:
            found, _ = self._ray.wait(list(streams), num_returns=len(streams), timeout=0, fetch_local=False)
        return list(found)

    def next_of(self, stream: Any) -> Event:
        """Return the next event. Raises StopIteration at the end, and an error of Ray's if the machine is lost."""
        event: Event = self._ray.get(next(stream))
        return event

    def end(self) -> None:
        """End all actors, with the processes of their machines."""
        actors = list(self._actors.values())
        self._actors = {}
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=_END_S)
        for actor in actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    def close(self) -> None:
        """Disconnect from the cluster; end the cluster if this run has started it. Idempotent."""
        if self._ray.is_initialized():
            self.end()
            self._ray.shutdown()
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.shutdown()


def in_one_line(error: Exception) -> str:
    """Return one line of an error's text: our own error, which Ray puts last, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    messages = [line for line in lines if "Error: " in line]
    return (messages[-1] if messages else lines[0] if lines else type(error).__name__)[:200]


def bundle(need: Needs, largest_cpus: float, devices: int) -> dict[str, float]:
    """Return the Ray resources that a class needs on one machine, capped at the largest machine's.

    ``devices``: the largest number of devices that the ranks of a machine share; 0 without a limit.

    >>> bundle(Needs(processes=2), 8, 0), bundle(Needs(alone=True), 8, 0), bundle(Needs(processes=4), 8, 2)
    ({'CPU': 0.5}, {'CPU': 8}, {'GPU': 2, 'CPU': 0.25})
    """
    if devices:
        ranks = devices if need.alone else min(need.processes, devices)
        return {"GPU": ranks, "CPU": largest_cpus if need.alone else 1 / _RANKS_PER_CPU}
    return {"CPU": largest_cpus if need.alone else min(largest_cpus, need.processes / _RANKS_PER_CPU)}
