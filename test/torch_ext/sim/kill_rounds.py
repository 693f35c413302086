"""Kills one of three ranks in each round, and checks what its peers get and what is left.

    python -m test.torch_ext.sim.kill_rounds [--rounds 1000] [--within-s 1]

Rounds go through all ranks in all of ``PHASES``. Some phases end at their own place: there a rank kills itself,
before its peers have anything of that step. In the others the rank says that it begins something that takes a while,
and is killed within it, at a moment drawn anew.

A program of its own, because it forks ranks by the hundred from a process that must not have used a device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import re
import select
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torch_ext.sim  # noqa: F401 - registers the device
from torch_ext.sim import _native, faults

WORLD_SIZE = 3
CALLS = 8  # of all steps together
TIMEOUT = timedelta(hours=1)  # nothing but the death itself can end a wait
DEADLINE_S = 60.0
UNMET = timedelta(milliseconds=400)  # peers cannot know a rank that never joined
# In which a rank dies by itself: None. In the others it is killed within so many seconds, about as long as they take.
PHASES: dict[str, float | None] = {
    "before it tells its address": None,
    "before it reads its peers' addresses": None,
    "while the group is made": 0.003,
    "at a call": None,
    "between calls": 0.02,
    "within publishing": 0.006,
    "after publishing": None,
    "within waiting": 0.03,
    "within copying out": 0.01,
    "within destroying the group": 0.001,
}
SIM = torch.get_device_module("sim")

Backend = c10d.Backend


@dataclass
class Rank:
    """The arguments of one rank in one round."""

    rank: int
    folder: Path
    dies: str  # the phase, of the rank that is to die in it; empty for its peers
    phase: str
    at: int  # the call at which it dies
    ready: int  # a pipe: when it is fit to be killed, or has been told
    death: int  # a pipe: when the victim has died
    gate: int  # a pipe: when all peers have been told

    def is_fit(self, phase: str) -> None:
        """Let the parent kill this process from now on, if it is to die in this phase."""
        if self.dies == phase:
            os.write(self.ready, b"r")

    def dies_in(self, phase: str) -> None:
        if self.dies == phase:
            os.kill(os.getpid(), signal.SIGKILL)


class MeetingPlace(dist.Store):
    """A store in which a rank may die."""

    def __init__(self, store: dist.Store, me: Rank) -> None:
        super().__init__()
        self.store, self.me, self.has_waited = store, me, False

    def set(self, key: str, value: str) -> None:
        self.me.dies_in("before it tells its address")
        self.store.set(key, value)
        self.me.is_fit("while the group is made")

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        self.store.wait(keys, timeout)

    def get(self, key: str) -> bytes:
        self.me.dies_in("before it reads its peers' addresses")
        if self.me.phase == "before it reads its peers' addresses" and not self.has_waited:
            self.has_waited = bool(os.read(self.me.death, 1))  # they look for it when it is gone
        return bytes(self.store.get(key))


def steps(group: Backend, me: Rank) -> list[Callable[[], object]]:
    """What each rank does in turn: a small and a large reduction, a gather, and a ring of transfers."""
    small, large = torch.ones(4, device="sim"), torch.ones(1 << 18, device="sim")
    gathered = torch.empty(WORLD_SIZE * 4, device="sim")
    after, before = (me.rank + 1) % WORLD_SIZE, (me.rank - 1) % WORLD_SIZE

    def pass_on() -> None:
        group.send([small], after, 0).wait()
        group.recv([small], before, 0).wait()

    def launch_two() -> None:
        first, second = group.allreduce([small]), group.allreduce([large])
        second.wait()
        first.wait()

    return [
        lambda: group.allreduce([small]).wait(),
        lambda: group.allreduce([large]).wait(),
        lambda: group._allgather_base(gathered, small).wait(),
        launch_two,
        pass_on,
        lambda: group.barrier(c10d.BarrierOptions()).wait(),
    ]


def one_large(group: Backend, me: Rank) -> None:
    """A gather whose parts a rank can be killed between: it publishes 8 MiB, waits, and copies 24 MiB out."""
    mine, gathered = (torch.ones(size << 21, device="sim") for size in (1, WORLD_SIZE))
    SIM.synchronize()
    me.is_fit("within publishing")
    work = group._allgather_base(gathered, mine)
    me.dies_in("after publishing")
    me.is_fit("within waiting")
    if me.dies == "within copying out":
        time.sleep(0.02)  # its peers have published
        me.is_fit("within copying out")
    work.wait()
    SIM.synchronize()


def take_part(me: Rank) -> None:
    """Meet the peers, and do things with them for ever, or for as long as the phase says."""
    SIM.set_device(me.rank)
    store = MeetingPlace(dist.FileStore(str(me.folder / "store"), WORLD_SIZE), me)
    timeout = UNMET if me.phase == "before it tells its address" else TIMEOUT
    group = _native.ProcessGroupSimCCL(store, me.rank, list(range(WORLD_SIZE)), timeout)
    if me.phase in ("at a call", "between calls"):
        todo = steps(group, me)
        if me.dies == "at a call":
            faults.kill(at=me.at)
        me.is_fit("between calls")
        while True:
            for step in todo:
                step()
                SIM.synchronize()
    if me.phase == "within destroying the group":
        group.barrier(c10d.BarrierOptions()).wait()
        me.is_fit(me.phase)
        if me.dies:
            group.shutdown()
            signal.pause()
    if me.phase == "within waiting" and not me.dies:
        os.read(me.death, 1)  # the victim waits for its peers when it is killed
    while True:
        one_large(group, me)


def in_rank(me: Rank) -> None:
    torch.set_num_threads(1)
    try:
        take_part(me)
    except RuntimeError as error:
        told = str(error).partition("\n")[0]
        (me.folder / f"told {me.rank}").write_text(f"{time.monotonic()} {told}")
        os.write(me.ready, b"t")
        os.read(me.gate, 1)  # a rank that destroys its group tells its peers of itself
        error.__traceback__ = None  # which holds the group
    for _ in range(2):  # launched at once; the stream tells of each, and holds it until then
        with contextlib.suppress(RuntimeError):
            SIM.synchronize()
    gc.collect()
    descriptors = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
    held = [each for each in descriptors if re.search(r"memfd|pidfd|socket", each)]
    mapped = re.findall(r"\S*memfd:simccl.*", Path("/proc/self/maps").read_text())
    (me.folder / f"holds {me.rank}").write_text("\n".join(held + mapped))


def fork_rank(me: Rank) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        in_rank(me)
    finally:
        os._exit(0)


def round_of(phase: str, victim: int, at: int, draw: random.Random) -> float:
    """Kill one rank, and return after how many seconds the last of its peers was told."""
    with tempfile.TemporaryDirectory() as name:
        folder, (heard, ready), (death, died), (gate, opened) = Path(name), os.pipe(), os.pipe(), os.pipe()
        pids = [
            fork_rank(Rank(rank, folder, phase if rank == victim else "", phase, at, ready, death, gate))
            for rank in range(WORLD_SIZE)
        ]
        within_s = PHASES[phase]
        if within_s is not None:
            hear(heard)
            time.sleep(draw.random() * within_s)
            os.kill(pids[victim], signal.SIGKILL)
        _, status = os.waitpid(pids[victim], 0)
        killed = time.monotonic()
        os.write(died, b"d" * WORLD_SIZE)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise AssertionError(f"rank {victim} was not killed: {status}")
        peers = [rank for rank in range(WORLD_SIZE) if rank != victim]
        for _ in peers:
            hear(heard)
        os.write(opened, b"o" * WORLD_SIZE)
        for rank in peers:
            os.waitpid(pids[rank], 0)
        for end in (heard, ready, death, died, gate, opened):
            os.close(end)
        last = max(when_told(rank, folder, phase, victim, pids[victim]) - killed for rank in peers)
        left = {path.name for path in folder.iterdir()} - {
            "store",
            *(f"{it} {r}" for it in ("told", "holds") for r in peers),
        }
        if left:
            raise AssertionError(f"left behind: {left}")
        return last


def hear(pipe: int) -> None:
    if not select.select([pipe], [], [], DEADLINE_S)[0]:
        raise AssertionError(f"nothing was heard of a rank for {DEADLINE_S} s")
    os.read(pipe, 1)


def when_told(rank: int, folder: Path, phase: str, victim: int, pid: int) -> float:
    """Return when a peer was told, by the clock of all processes; check what it was told, and that it held nothing."""
    moment, _, told = (folder / f"told {rank}").read_text().partition(" ")
    wanted = rf"rank {victim} \(process {pid}\) (has )?ended"
    if phase == "before it tells its address":
        wanted = "(?i)wait timeout"  # a store knows no processes
    elif phase == "within destroying the group":
        wanted += rf"|rank {victim} has destroyed the group"
    if not re.search(wanted, told):
        raise AssertionError(f"rank {rank} was told: {told}")
    if held := (folder / f"holds {rank}").read_text():
        raise AssertionError(f"rank {rank} still holds {held}")
    return float(moment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--within-s", type=float, help="fail if a peer was told later than this")
    arguments = parser.parse_args()
    draw, phases = random.Random(0), list(PHASES)
    shared = set(os.listdir("/dev/shm"))
    last = 0.0
    for number in range(arguments.rounds):
        turn, phase = number // len(phases), phases[number % len(phases)]
        victim, at = (turn + number) % WORLD_SIZE, turn // WORLD_SIZE % CALLS + 1
        try:
            told_after = round_of(phase, victim, at, draw)
        except AssertionError as error:
            raise AssertionError(f"round {number}, rank {victim} killed {phase}: {error}") from None
        if phase != "before it tells its address":  # of which the store's time limit tells
            last = max(last, told_after)
    left = set(os.listdir("/dev/shm")) - shared
    if left:
        raise AssertionError(f"left behind in /dev/shm: {left}")
    if arguments.within_s is not None and last > arguments.within_s:
        raise AssertionError(f"a peer was told after {last:.3f} s")
    print(f"{arguments.rounds} rounds, told after {last:.3f} s at most")


if __name__ == "__main__":
    main()
