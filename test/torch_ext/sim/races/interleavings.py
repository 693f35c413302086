"""Small programs over streams, and everything that can happen when they run: the reference for the race checker.

A program is the host's sequence of steps. Streams run their steps in order, at any time. ``explore`` visits every state
that any interleaving can reach. Two accesses are unordered if some state could do either next.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace

from torch_ext.sim import _native

HOST = -1
FRESH = -1


@dataclass(frozen=True)
class View:
    begin: int  # bytes from the start of the block
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # elements

    @property
    def bytes(self):
        places = (
            self.begin + self.itemsize * sum(i * stride for i, stride in zip(index, self.strides, strict=True))
            for index in itertools.product(*map(range, self.sizes))
        )
        return frozenset(place + byte for place in places for byte in range(self.itemsize))


@dataclass(frozen=True)
class Use:
    """A lane reads some views and writes some views of tensors."""

    lane: int  # a stream, or HOST
    reads: tuple[tuple[int, View], ...] = ()
    writes: tuple[tuple[int, View], ...] = ()


@dataclass(frozen=True)
class Record:
    stream: int
    event: int


@dataclass(frozen=True)
class Wait:
    lane: int  # HOST: synchronize
    event: int


@dataclass(frozen=True)
class Allocate:
    tensor: int
    stream: int


@dataclass(frozen=True)
class Free:
    tensor: int


@dataclass(frozen=True)
class RecordStream:
    tensor: int
    stream: int


Step = Use | Record | Wait | Allocate | Free | RecordStream

# Mistakes that a checker could make; `check` makes one on request.
FAULTS = {
    "deaf streams": "a stream that waits for an event joins nothing",
    "deaf host": "the host that waits for an event joins nothing",
    "first record": "an event that is recorded again keeps what it was recorded after first",
    "late record": "a wait joins what the stream has been given by then, not by the record",
    "no users": "a block that is freed forgets whom it was recorded for",
    "new memory": "a block that is freed forgets its accesses",
    "no reads": "reads are no accesses",
    "no strides": "a view is all between its first byte and its last",
    "one stream": "the last two streams are one lane",
}


def collective(stream, lane, use, done, own):
    """An asynchronous collective: its lane takes over from the stream, and records event ``done`` at its end.

    ``own`` is an event that nothing else uses.
    """
    uses = [Use(lane, each.reads, each.writes) for each in use]
    return [Record(stream, own), Wait(lane, own), *uses, Record(lane, done)]


@dataclass(frozen=True)
class Life:
    """One owner of a block: the facts that the steps of a program decide before any of them runs."""

    block: int
    home: int  # the stream it was allocated on
    users: tuple[int, ...] = ()  # named in RecordStream


@dataclass
class Plan:
    """A program with the facts that its order of steps decides: lives of blocks, and which record a wait is for."""

    steps: list[Step]
    lives: dict[tuple[int, int], int] = field(default_factory=dict)  # (step, tensor) -> life
    all_lives: list[Life] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)  # step of a wait -> step of the record it waits for
    # step that allocates -> for a block that had users, how many steps of each were given to it before it was freed
    guards: dict[int, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self):  # noqa: C901
        owners = {}
        pools = {}
        recorded = {}
        given = {}
        blocks = itertools.count()
        for at, step in enumerate(self.steps):
            match step:
                case Use(lane, reads, writes):
                    for tensor, _ in reads + writes:
                        self.lives[at, tensor] = owners[tensor]
                    if lane != HOST:
                        given[lane] = given.get(lane, 0) + 1
                case Record(stream, event):
                    recorded[event] = at
                    given[stream] = given.get(stream, 0) + 1
                case Wait(lane, event):
                    if event in recorded:
                        self.waits[at] = recorded[event]
                    if lane != HOST:
                        given[lane] = given.get(lane, 0) + 1
                case Allocate(tensor, stream):
                    pool = pools.get(stream, [])
                    block, users = pool.pop() if pool else (next(blocks), {})
                    if users:
                        self.guards[at] = users
                    self.lives[at, tensor] = owners[tensor] = len(self.all_lives)
                    self.all_lives.append(Life(block, stream))
                case RecordStream(tensor, stream):
                    life = self.all_lives[owners[tensor]]
                    self.all_lives[owners[tensor]] = replace(life, users=(*life.users, stream))
                case Free(tensor):
                    self.lives[at, tensor] = owners.pop(tensor)
                    life = self.all_lives[self.lives[at, tensor]]
                    pools.setdefault(life.home, []).append((life.block, {u: given.get(u, 0) for u in life.users}))


@dataclass(frozen=True)
class State:
    host: int  # next step of the host
    done: tuple[int, ...]  # steps that each stream has done
    fresh: frozenset[int]  # lives that got another block, because an earlier owner's users were not done


class Machine:
    """All executions of a program on ``streams`` streams."""

    def __init__(self, steps, streams):
        self.plan = Plan(steps)
        self.steps = steps
        self.queues: list[list[int]] = [[] for _ in range(streams)]
        for at, step in enumerate(steps):
            if isinstance(step, Use | Wait) and step.lane != HOST:
                self.queues[step.lane].append(at)
            elif isinstance(step, Record):
                self.queues[step.stream].append(at)
        self.place = {at: (s, i) for s, queue in enumerate(self.queues) for i, at in enumerate(queue)}

    def is_done(self, state, at):
        stream, index = self.place[at]
        return state.done[stream] > index

    def ready(self, state):
        """The steps that may happen next: the host's, and the first that each stream has not done."""
        heads = [queue[done] for queue, done in zip(self.queues, state.done, strict=True) if done < len(queue)]
        for at in [
            *(head for head in heads if head < state.host),
            *([state.host] if state.host < len(self.steps) else []),
        ]:
            blocked = at in self.plan.waits and not self.is_done(state, self.plan.waits[at])
            if at in self.place and at == state.host:
                blocked = False  # the host only hands it to its stream
            if not blocked:
                yield at

    def act(self, state, at):
        if at in self.place and at < state.host:
            stream, _ = self.place[at]
            done = tuple(count + (s == stream) for s, count in enumerate(state.done))
            return replace(state, done=done)
        moved = replace(state, host=state.host + 1)
        if at in self.place:
            return moved
        users = self.plan.guards.get(at, {})
        step = self.steps[at]
        if isinstance(step, Allocate) and any(state.done[user] < count for user, count in users.items()):
            return replace(moved, fresh=state.fresh | {self.plan.lives[at, step.tensor]})
        return moved

    def block(self, state, at, tensor):
        life = self.plan.lives[at, tensor]
        block = self.plan.all_lives[life].block
        # If an owner got another block, later owners get that block.
        strayed = [each for each in state.fresh if each <= life and self.plan.all_lives[each].block == block]
        return (FRESH - max(strayed), life) if strayed else (block, life)

    def conflict(self, state, one, other):
        first, second = self.steps[one], self.steps[other]
        if not isinstance(first, Use) or not isinstance(second, Use):
            return False

        def reached(at, views):
            return {(self.block(state, at, tensor)[0], byte) for tensor, view in views for byte in view.bytes}

        mine, theirs = reached(one, first.writes), reached(other, second.writes)
        return bool(mine & theirs or mine & reached(other, second.reads) or reached(one, first.reads) & theirs)

    def explore(self):
        """Return the unordered conflicting pairs of steps."""
        start = State(0, (0,) * len(self.queues), frozenset())
        known, todo = {start}, [start]
        racing = set()
        while todo:
            state = todo.pop()
            ready = list(self.ready(state))
            acting = sorted(at for at in ready if at not in self.place or at < state.host)
            racing.update(pair for pair in itertools.combinations(acting, 2) if self.conflict(state, *pair))
            following = {self.act(state, at) for at in ready} - known
            known |= following
            todo.extend(following)
        return racing


def whole(view):
    return View(min(view.bytes), 1, (max(view.bytes) + 1 - min(view.bytes),), (1,))


def check(steps, streams, fault=""):  # noqa: C901
    """Feed a program to the race checker, in the order of its steps, and return the pairs of steps that it reports.

    ``fault`` is one of ``FAULTS``, or none.
    """
    plan = Plan(steps)
    checker = _native.RaceChecker()
    lanes = {HOST: checker.HOST, **{stream: checker.lane() for stream in range(streams)}}
    if fault == "one stream":
        lanes[streams - 1] = lanes[streams - 2]
    memories = defaultdict(_native.RaceMemory)
    events = {}
    recorded_on = {}

    def memory(at, tensor):
        return memories[plan.all_lives[plan.lives[at, tensor]].block]

    for at, step in enumerate(steps):
        match step:
            case Use(lane, reads, writes):
                for is_write, views in ((False, () if fault == "no reads" else reads), (True, writes)):
                    for tensor, exact in views:
                        view = whole(exact) if fault == "no strides" else exact
                        place = memory(at, tensor)
                        checker.access(
                            lanes[lane], place, is_write, view.begin, view.itemsize, view.sizes, view.strides, at
                        )
            case Record(stream, event):
                if not (fault == "first record" and event in events):
                    events[event] = checker.record(lanes[stream])
                    recorded_on[event] = stream
            case Wait(lane, event):
                if event in events and fault != ("deaf host" if lane == HOST else "deaf streams"):
                    late = fault == "late record"
                    checker.wait(lanes[lane], checker.record(lanes[recorded_on[event]]) if late else events[event])
            case Free(tensor):
                life = plan.all_lives[plan.lives[at, tensor]]
                checker.free(memory(at, tensor), [lanes[user] for user in life.users if fault != "no users"])
                if fault == "new memory":
                    del memories[life.block]
            case Allocate() | RecordStream():
                pass
    return sorted(set(checker.races()))
