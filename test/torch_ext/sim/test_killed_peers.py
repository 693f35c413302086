"""Peers of a rank that is killed get an error that names it, in every phase, and keep no resource of the group.

In some phases the rank kills itself at one place, before its peers have any data of that step. In the others a timer
kills it at a random moment, within about the duration of the phase.
"""

import contextlib
import gc
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from test.torch_ext.sim import ranks
from test.torch_ext.sim.ranks import store
from torch_ext.sim import _native, faults

WORLD_SIZE = 3
CALLS = 8  # of all steps together
TIMEOUT = timedelta(hours=1)  # only the death itself can end a wait
UNMET = timedelta(milliseconds=400)  # peers cannot know a rank that never joined
# Within how many seconds the timer kills the rank; None: the rank kills itself.
PHASES = {
    "before it tells its address": None,
    "before it reads its peers' addresses": None,
    "while the group is made": 0.003,
    "between two peers that open its memory": None,
    "at a call": None,
    "between calls": 0.02,
    "within publishing": 0.006,
    "after publishing": None,
    "within waiting": 0.03,
    "within copying out": 0.01,
    "within destroying the group": 0.001,
}
SIM = torch.get_device_module("sim")


@dataclass
class Rank:
    rank: int
    phase: str
    victim: int
    at: int  # the call at which the victim dies, in the phase "at a call"
    after_s: float  # how long the victim lives in a phase that ends by a timer

    @property
    def dies(self):
        return self.rank == self.victim

    def dies_in(self, phase):
        if self.dies and self.phase == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def dies_soon_in(self, phase):
        if self.dies and self.phase == phase:
            signal.setitimer(signal.ITIMER_REAL, max(self.after_s, 1e-6))

    def reads_addresses(self, met):
        """Called once, before this rank reads the first one."""
        if self.phase == "before it reads its peers' addresses":
            self.dies_in(self.phase)
            self.await_death()  # so that peers look for a dead process
        if self.phase == "between two peers that open its memory":
            early = (self.victim + 1) % WORLD_SIZE
            if self.dies:
                threading.Thread(target=self._close_and_die, args=(met, early), daemon=True).start()
            elif self.rank != early:
                store().wait(["closed"])

    def _close_and_die(self, met, early):
        """Close this rank's memory when ``early`` alone has opened it, as a process does that ends, and end later."""
        addresses = [met.get(f"address/{rank}").decode().split() for rank in range(WORLD_SIZE)]
        inodes, file, own = {inode for *_others, inode in addresses}, *addresses[self.rank][-2:]
        pid = store().get(f"process of {early}").decode()
        while not (own in inodes_mapped_by(pid) and inodes <= inodes_mapped_by("self")):
            time.sleep(0.001)
        time.sleep(0.05)  # until this rank has said that it is ready
        os.close(int(file))
        store().set("closed", "")
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    def await_death(self):
        ranks.wait_for_end_of(int(store().get("victim")))


class MeetingPlace(dist.Store):
    """A store in which a rank may die."""

    def __init__(self, met, me):
        super().__init__()
        self.store, self.me, self.has_read = met, me, False

    def set(self, key, value):
        self.me.dies_in("before it tells its address")
        self.store.set(key, value)
        self.me.dies_soon_in("while the group is made")

    def check(self, keys):
        return self.store.check(keys)

    def wait(self, keys, timeout=TIMEOUT):
        self.store.wait(keys, timeout)

    def get(self, key):
        if not self.has_read:
            self.has_read = True
            self.me.reads_addresses(self.store)
        return self.store.get(key)


def steps(group, me):
    """The steps of each rank: a small and a large reduction, a gather, and a ring of transfers."""
    small, large = torch.ones(4, device="sim"), torch.ones(1 << 18, device="sim")
    gathered = torch.empty(WORLD_SIZE * 4, device="sim")
    after, before = (me.rank + 1) % WORLD_SIZE, (me.rank - 1) % WORLD_SIZE

    def pass_on():
        group.send([small], after, 0).wait()
        group.recv([small], before, 0).wait()

    def launch_two():
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


def one_large(group, me):
    """A gather whose parts a rank can be killed between: it publishes 8 MiB, waits, and copies 24 MiB out."""
    mine, gathered = (torch.ones(size << 21, device="sim") for size in (1, WORLD_SIZE))
    SIM.synchronize()
    me.dies_soon_in("within publishing")
    work = group._allgather_base(gathered, mine)
    me.dies_in("after publishing")
    me.dies_soon_in("within waiting")
    if me.dies and me.phase == "within copying out":
        time.sleep(0.02)  # its peers have published
        me.dies_soon_in("within copying out")
    work.wait()
    SIM.synchronize()


def take_part(me):
    """Meet the peers, and do things with them for ever, or for as long as the phase says."""
    met = MeetingPlace(dist.PrefixStore("killed", store()), me)
    timeout = UNMET if me.phase == "before it tells its address" else TIMEOUT
    group = _native.ProcessGroupSimCCL(met, me.rank, list(range(WORLD_SIZE)), timeout)
    if me.phase in ("at a call", "between calls"):
        todo = steps(group, me)
        if me.dies and me.phase == "at a call":
            faults.kill(at=me.at)
        me.dies_soon_in("between calls")
        while True:
            for step in todo:
                step()
                SIM.synchronize()
    if me.phase == "within destroying the group":
        group.barrier(c10d.BarrierOptions()).wait()
        me.dies_soon_in(me.phase)
        if me.dies:
            group.shutdown()
            signal.pause()
    if me.phase == "within waiting" and not me.dies:
        me.await_death()  # the victim dies while it waits for its peers
    while True:
        one_large(group, me)


def error_of(me):
    try:
        take_part(me)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    raise AssertionError("no error")


def inodes_mapped_by(pid):
    return set(re.findall(r"(\d+)\s+\S*memfd:simccl", Path(f"/proc/{pid}/maps").read_text()))


def held():
    """Return the descriptors and the mapped segments of this process, which may have equal names."""
    links = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # other threads close theirs meanwhile
            links.append(os.readlink(f"/proc/self/fd/{each}"))
    mapped = re.findall(r"\S*memfd:simccl.*", Path("/proc/self/maps").read_text())
    return Counter(each for each in (*links, *mapped) if re.search(r"memfd|pidfd|socket", each))


def _round(rank, world_size, phase, victim, at, after_s):
    me, before = Rank(rank, phase, victim, at, after_s), held()
    if me.dies:
        store().set("victim", str(os.getpid()))
    pid = int(store().get("victim"))
    message = error_of(me)
    wanted = rf"rank {victim} \(process {pid}\) (has )?ended"
    if phase == "before it tells its address":
        wanted = "(?i)wait timeout"  # a store knows no processes
    elif phase == "within destroying the group":
        wanted += rf"|rank {victim} has destroyed the group"
    assert re.search(wanted, message), message
    # Stay until all peers have their error: leaving would cause another.
    store().set(f"failed {rank}", "")
    store().wait([f"failed {peer}" for peer in range(world_size) if peer != victim])
    for _ in range(2):  # launched at once; the stream raises the error of each, and holds it until then
        with contextlib.suppress(RuntimeError):
            SIM.synchronize()
    gc.collect()
    assert not held() - before
    ranks.leave()


@pytest.mark.parametrize("phase", PHASES)
def test_peers_of_a_killed_rank_get_an_error_whenever_it_dies(phase, request):
    draw, longest_s = random.Random(phase), PHASES[phase]
    for _ in range(100 if request.config.getoption("--long", default=False) else 1):
        victim, at = draw.randrange(WORLD_SIZE), draw.randint(1, CALLS)
        by = signal.SIGKILL if longest_s is None else signal.SIGALRM
        after_s = draw.random() * (longest_s or 0)
        ranks.run(WORLD_SIZE, _round, phase, victim, at, after_s, killed=victim, by=by)


@ranks.world_of(3)
def test_rank_that_left_is_named_to_one_that_comes_late(rank, world_size):
    if rank == 1:
        dist.destroy_process_group()
        ranks.leave()
    if rank == 2:
        # Rank 0 comes to the operation too and ends by its error: rank 1 is to blame.
        ranks.wait_for_end_of(int(store().get("process of 0")))
    with pytest.raises(dist.DistBackendError, match="rank 1 has destroyed the group and takes no part"):
        dist.all_reduce(ranks.full())
        SIM.synchronize()
    ranks.leave()
