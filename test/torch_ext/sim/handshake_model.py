"""The handshake of csrc/transport/lane.cpp as a machine whose every state can be visited.

Each rank is a program of atomic steps on shared words, in the order in which the C++ takes them; a state is where each
rank is and what the words hold. :func:`explore` visits every state that some interleaving reaches, with a rank killed
at any step if asked to, and returns the first property that fails, with the steps that lead there:

- nobody sleeps for ever: where no rank can take a step, all of them are through
- what a rank reads is what its peer published for this collective
- nobody is told of a death if the dead rank had published the collective; everybody is told otherwise
- each piece of a shared reduction is reduced once, and read by others when it is

The model's memory is sequentially consistent: the words that ranks race on are written and read so in C++. It knows no
time: a rank that sleeps wakes when it is rung, looks around when a peer has died, or, once if asked to, runs into its
time limit whenever it sleeps, and goes on to the next collective. ``FAULTS`` are mistakes that the
protocol could contain; a test shows that the model finds each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["FAULTS", "Protocol", "explore"]

FAULTS = {
    "number before data": "the slot's number is written before what it stands for",
    "look around last": "whether a peer has died is asked after whether it has published",
    "seen late": "the word to sleep on is read after the slots",
    "ring before publishing": "whether all have published is asked before one's own number is written",
    "ring in one case": "only rank 0 rings",
    "no wait for the slot": "a slot is written again before all peers are past it",
    "finished early": "a rank says that it is past a collective before it has read what it needs",
    "claim in two steps": "a piece is found free and claimed in two steps",
    "reduced early": "a piece is marked before it is reduced",
    "no ring for pieces": "nobody is woken when a piece is reduced",
    "silent at its limit": "a rank that has waited too long goes on and does not say that it is past the collective",
    "overtaking at its limit": "a rank that has waited too long says that it is past what it has not come to either",
}


class Broken(Exception):
    """A property does not hold."""


@dataclass
class Machine:
    """One state, written by steps and copied between them. ``memory`` and ``locals`` hold numbers by name."""

    places: list[str]
    memory: dict[str, int]
    locals: list[dict[str, int]]

    def key(self) -> tuple[object, ...]:
        mine = tuple(tuple(sorted(one.items())) for one in self.locals)
        return (tuple(self.places), tuple(sorted(self.memory.items())), mine)

    def copy(self) -> Machine:
        return Machine(list(self.places), dict(self.memory), [dict(one) for one in self.locals])


@dataclass(frozen=True)
class Protocol:
    """What is explored.

    Attributes:
        ranks: how many there are.
        collectives: how many each rank takes part in, one after the other.
        slots: how many can be under way.
        pieces: of the reduction that each collective shares out; 0 if each rank reads for itself.
        deaths: whether one rank may be killed.
        limits: whether one rank may run into its time limit, once.
        fault: one of ``FAULTS``, or none.
    """

    ranks: int = 2
    collectives: int = 3
    slots: int = 2
    pieces: int = 0
    deaths: bool = False
    limits: bool = False
    fault: str = ""
    steps: dict[str, Callable[[Machine, int], str | None]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = ("slot", "data", "number", "count", "ring", "seen", "look", "sleep", "take", "claim", "claimed", "fold")
        found = {name: getattr(self, f"_{name}") for name in (*names, "mark", "pieces_sleep", "finish")}
        object.__setattr__(self, "steps", found)

    def start(self) -> Machine:
        return Machine(["slot"] * self.ranks, {"complete": 0, "reduced": 0}, [{"n": 1} for _ in range(self.ranks)])

    # --- steps: each returns the place of the next one, or None if it cannot be taken now ---

    def _slot(self, m: Machine, r: int) -> str | None:
        """Wait until the slot is free: lane.cpp looks again every millisecond."""
        n = m.locals[r]["n"]
        others = (m.memory.get(f"finished {p}", 0) for p in range(self.ranks) if p != r)
        free = self.fault == "no wait for the slot" or all(done + self.slots >= n for done in others)
        if not free:
            return None
        return {"number before data": "number", "ring before publishing": "count"}.get(self.fault, "data")

    def _data(self, m: Machine, r: int) -> str:
        n = m.locals[r]["n"]
        m.memory[f"data {r} {n % self.slots}"] = n
        for piece in range(self.pieces if r == 0 else 0):  # which lie in the slot of rank 0
            m.memory[f"claim {n % self.slots} {piece}"] = 0
            m.memory[f"value {n % self.slots} {piece}"] = 0
        return "count" if self.fault == "number before data" else "number"

    def _number(self, m: Machine, r: int) -> str:
        n = m.locals[r]["n"]
        m.memory[f"number {r} {n % self.slots}"] = n
        if self.fault == "number before data":
            return "data"
        return "seen" if self.fault == "ring before publishing" else "count"

    def _count(self, m: Machine, r: int) -> str:
        """Read one peer's number in each step; who sees all of them rings."""
        mine = m.locals[r]
        after = "data" if self.fault == "ring before publishing" else "seen"
        peer = mine.get("peer", 0)
        if peer != r and m.memory.get(f"number {peer} {mine['n'] % self.slots}", 0) != mine["n"]:
            mine.pop("peer", None)
            return after
        mine["peer"] = peer + 1
        if mine["peer"] < self.ranks:
            return "count"
        del mine["peer"]
        return after if self.fault == "ring in one case" and r else "ring"

    def _ring(self, m: Machine, r: int) -> str:
        self._wake(m, "complete", "sleep")
        return "data" if self.fault == "ring before publishing" else "seen"

    def _seen(self, m: Machine, r: int) -> str:
        m.locals[r]["seen"] = m.memory["complete"]
        return "look"

    def _look(self, m: Machine, r: int) -> str:
        """Ask of one peer in each half step whether it has died, and whether it has published."""
        mine = m.locals[r]
        n, peer, half = mine["n"], mine.get("peer", 0), mine.get("half", 0)
        dead_first = self.fault != "look around last"
        if half == 0:
            mine["half"], mine["peer"] = 1, peer
            mine["answer"] = self._is_dead(m, peer) if dead_first else self._is_missing(m, peer, n)
            return "look"
        dead = mine["answer"] if dead_first else self._is_dead(m, peer)
        missing = self._is_missing(m, peer, n) if dead_first else mine["answer"]
        del mine["half"], mine["answer"]
        if dead and missing:
            return self._tell(m, peer, n)
        mine["missing"] = mine.get("missing", 0) | missing
        mine["peer"] = peer + 1
        if mine["peer"] < self.ranks:
            return "look"
        del mine["peer"]
        if mine.pop("missing"):
            if self.fault == "seen late":
                mine["seen"] = m.memory["complete"]
            return "sleep"
        del mine["seen"]
        return "finish" if self.fault == "finished early" else "claim" if self.pieces else "take"

    def _sleep(self, m: Machine, r: int) -> str | None:
        """The kernel compares the word and sleeps in one step. A sleeper looks around when somebody has died."""
        if m.memory["complete"] != m.locals[r]["seen"] or "dead" in m.places:
            return "seen"
        return None

    def _take(self, m: Machine, r: int) -> str:
        mine = m.locals[r]
        n, peer = mine["n"], mine.get("peer", 0)
        held = m.memory.get(f"data {peer} {n % self.slots}", 0)
        if held != n:
            raise Broken(f"rank {r} reads for collective {n} what rank {peer} holds for {held}")
        mine["peer"] = peer + 1
        if mine["peer"] < self.ranks:
            return "take"
        del mine["peer"]
        return self._next(m, r) if self.fault == "finished early" else "finish"

    def _claim(self, m: Machine, r: int) -> str | None:
        """Look for a free piece, one in each step; then for one that is not reduced, and sleep."""
        mine = m.locals[r]
        slot, piece = mine["n"] % self.slots, mine.get("piece", 0)
        if piece == 0:
            mine["seen"] = m.memory["reduced"]
        if piece < self.pieces:
            mine["piece"] = piece
            if m.memory[f"claim {slot} {piece}"] == 0:
                if self.fault == "claim in two steps":
                    return "claimed"
                m.memory[f"claim {slot} {piece}"] = 1 + r
                return "mark" if self.fault == "reduced early" else "fold"
            mine["piece"] = piece + 1
            return "claim"
        del mine["piece"]
        claims = [m.memory[f"claim {slot} {one}"] for one in range(self.pieces)]
        if all(claim == -1 for claim in claims):
            for one in range(self.pieces):
                if m.memory[f"value {slot} {one}"] != 1:
                    raise Broken(f"rank {r} copies piece {one}, reduced {m.memory[f'value {slot} {one}']} times")
            del mine["seen"]
            return "finish"
        for claim in claims:
            if claim > 0 and self._is_dead(m, claim - 1):
                return "told"
        return "pieces_sleep"

    def _claimed(self, m: Machine, r: int) -> str:
        mine = m.locals[r]
        m.memory[f"claim {mine['n'] % self.slots} {mine['piece']}"] = 1 + r
        return "fold"

    def _fold(self, m: Machine, r: int) -> str:
        m.memory[f"value {m.locals[r]['n'] % self.slots} {m.locals[r]['piece']}"] += 1
        if self.fault == "reduced early":
            self._wake(m, "reduced", "pieces_sleep")
            return "claim"
        return "mark"

    def _mark(self, m: Machine, r: int) -> str:
        m.memory[f"claim {m.locals[r]['n'] % self.slots} {m.locals[r]['piece']}"] = -1
        if self.fault == "reduced early":
            return "fold"
        if self.fault != "no ring for pieces":
            self._wake(m, "reduced", "pieces_sleep")
        return "claim"

    def _pieces_sleep(self, m: Machine, r: int) -> str | None:
        return "claim" if m.memory["reduced"] != m.locals[r]["seen"] or "dead" in m.places else None

    def _finish(self, m: Machine, r: int) -> str:
        m.memory[f"finished {r}"] = m.locals[r]["n"]
        return "take" if self.fault == "finished early" else self._next(m, r)

    def give_up(self, m: Machine, r: int) -> None:
        """The time limit of a sleeper has passed: it has failed, and is past this collective."""
        n = m.locals[r]["n"]
        m.memory["given up"] = 1
        m.locals[r] = {"n": n}
        if self.fault == "overtaking at its limit":
            m.memory[f"finished {r}"] = n + 1
            m.places[r] = self._next(m, r)
        else:
            m.places[r] = self._next(m, r) if self.fault == "silent at its limit" else "finish"

    # --- what steps have in common ---

    def _next(self, m: Machine, r: int) -> str:
        m.locals[r]["n"] += 1
        if m.locals[r]["n"] <= self.collectives:
            return "slot"
        m.locals[r] = {}
        return "through"

    def _wake(self, m: Machine, word: str, place: str) -> None:
        # Sleepers need not be named: whoever sleeps on a word can go on as soon as it has changed.
        m.memory[word] += 1

    def _is_dead(self, m: Machine, peer: int) -> int:
        return int(m.places[peer] == "dead")

    def _is_missing(self, m: Machine, peer: int, n: int) -> int:
        return int(m.memory.get(f"number {peer} {n % self.slots}", 0) != n)

    def _tell(self, m: Machine, peer: int, n: int) -> str:
        if m.memory.get(f"number {peer} {n % self.slots}", 0) == n:
            raise Broken(f"told of the death of rank {peer}, which had published collective {n}")
        return "told"


def explore(protocol: Protocol, most: int = 2_000_000) -> tuple[int, str]:
    """Visit every state.

    Returns:
        How many there are, and the first property that fails with the steps that lead there; empty if all hold.

    Raises:
        RuntimeError: there are more than ``most``.
    """
    first = protocol.start()
    came_from: dict[object, tuple[object, str]] = {first.key(): (None, "start")}
    waiting = deque([first])
    while waiting:
        machine = waiting.popleft()
        key = machine.key()
        stuck = True
        for step, after in _successors(protocol, machine):
            if isinstance(after, Broken):
                return len(came_from), f"{after}\n{_path(came_from, key)}, {step}"
            stuck = False
            if after.key() not in came_from:
                came_from[after.key()] = (key, step)
                waiting.append(after)
        if stuck and not set(machine.places) <= {"through", "told", "dead"}:
            return len(came_from), f"nobody can go on: {machine.places}\n{_path(came_from, key)}"
        if len(came_from) > most:
            raise RuntimeError(f"more than {most} states")
    return len(came_from), ""


def _successors(protocol: Protocol, machine: Machine) -> Iterator[tuple[str, Machine | Broken]]:
    for rank, place in enumerate(machine.places):
        if place in ("through", "told", "dead"):
            continue
        after = machine.copy()
        try:
            to = protocol.steps[place](after, rank)
        except Broken as broken:
            yield f"{rank} {place}", broken
            continue
        if to is not None:
            after.places[rank] = to
            yield f"{rank} {place}", after
        if protocol.limits and place in ("sleep", "pieces_sleep") and "given up" not in machine.memory:
            after = machine.copy()
            protocol.give_up(after, rank)
            yield f"{rank} gives up", after
        if protocol.deaths and "dead" not in machine.places:
            after = machine.copy()
            after.places[rank] = "dead"
            after.locals[rank] = {}
            yield f"{rank} dies", after


def _path(came_from: dict[object, tuple[object, str]], key: object) -> str:
    steps = []
    while key is not None:
        key, step = came_from[key]
        steps.append(step)
    return ", ".join(reversed(steps))
