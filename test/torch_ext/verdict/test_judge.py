"""The judge, fed with every order of events: a pass is a full set of valid receipts and clean ends, and nothing else.

No process and no clock. All that these tests know of the classes that they test is in :class:`Judge`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ext.world.protocol import Receipt, Said, Ticket
from torch_ext.world.verdict import Judgement, Verdict, judge
from torch_ext.world.watch import Act, Limits, Watch

RANKS = 3
SAYS = {"passes": Said.PASSED, "fails": Said.FAILED, "skips": Said.SKIPPED, "somebody else passes": Said.PASSED}
ENDS = {"ends with 0": 0, "leaves with 0": 0, "ends with 3": 3, "is killed": -9}
TICKET, PIDS = Ticket("test_a", 4), (100, 101, 102)
LATE = Receipt(Said.PASSED, 0.0, ticket=Ticket("test_a", 3), pid=100)
FORKED = Receipt(Said.PASSED, 0.0, ticket=TICKET, pid=7)


class Event(NamedTuple):
    """One thing that happens to one rank. ``somebody else``: a receipt of another test or process on its line."""

    rank: int
    what: str


EVENTS = [Event(rank, what) for rank in range(RANKS) for what in (*SAYS, *ENDS)]


class Judge:
    """A watch and the verdict on its outcomes, as a world uses them.

    Args:
        stands: the ranks live on after the test.
    """

    def __init__(self, stands: bool = False) -> None:
        limits = Limits(test_s=60.0, grace_s=1.0, exit_s=15.0)
        self._watch = Watch(RANKS, limits, 0.0, keep=stands, ticket=TICKET, pids=PIDS)
        self._now_s = 0.0
        self.ended: dict[int, str] = {}

    @property
    def done(self) -> bool:
        return self._watch.done

    def happens(self, event: Event) -> None:
        """Take in one event, a tenth of a second after the one before."""
        self._now_s += 0.1
        if event.what == "somebody else passes":
            for receipt in (LATE, FORKED):
                self._watch.received(event.rank, receipt)
        elif event.what in SAYS:
            receipt = Receipt(SAYS[event.what], self._now_s, "its own", ticket=TICKET, pid=PIDS[event.rank])
            self._watch.received(event.rank, receipt)
        else:
            if event.what == "ends with 0":
                self._watch.left(event.rank)
            self._ends(event.rank, event.what, ENDS[event.what])
        self._advance()

    def verdict(self) -> Verdict:
        """Let time pass until all is over, as nothing else happens; return the verdict."""
        self._advance()
        while not self._watch.done:
            assert self._watch.deadline_s < float("inf"), "it waits for what will not come"
            self._now_s = max(self._now_s, self._watch.deadline_s)
            self._advance()
        return judge(self._watch.outcomes())

    def _advance(self) -> None:
        for step in self._watch.advance(self._now_s):
            if step.act is Act.STOP:
                for rank in step.ranks:
                    self._ends(rank, "is stopped", -9)

    def _ends(self, rank: int, how: str, code: int) -> None:
        if rank not in self.ended:
            self.ended[rank] = how
            self._watch.ended(rank, code, self._now_s)


def play(events: Iterable[Event], stands: bool = False) -> tuple[Judge, dict[int, str]]:
    """Have those events happen that can (a rank that ended says nothing); return the judge and what each rank said."""
    judge, said = Judge(stands), dict[int, str]()
    for event in events:
        if judge.done:
            break
        own = event.what != "somebody else passes"
        if own and event.rank in judge.ended:
            continue
        judge.happens(event)
        if own and event.what in SAYS:
            said.setdefault(event.rank, event.what)
    return judge, said


def is_a_pass(judge: Judge, said: dict[int, str], stands: bool) -> bool:
    """The rule, in its own words: every rank said that it passed, and ended cleanly if it was to end."""
    if [said.get(rank) for rank in range(RANKS)] != ["passes"] * RANKS:
        return False
    return not judge.ended if stands else set(judge.ended.values()) == {"ends with 0"}


def check(events: Iterable[Event], stands: bool = False) -> None:
    judge, said = play(events, stands)
    verdict = judge.verdict()
    expected = is_a_pass(judge, said, stands)
    assert (verdict.judgement is Judgement.PASSED) == expected, (events, verdict, judge.ended)
    if verdict.judgement is Judgement.FAILED:
        assert verdict.culprits and not set(verdict.culprits) & set(verdict.victims), (events, verdict)
        dead = {rank for rank, how in judge.ended.items() if how in ("is killed", "ends with 3")}
        # Whoever failed or died by itself stands among the culprits, and before whoever was stopped.
        assert not dead or dead & set(verdict.culprits), (events, verdict)
    if verdict.judgement is Judgement.SKIPPED:
        assert [said.get(rank) for rank in range(RANKS)] == ["skips"] * RANKS, (events, verdict)


def test_every_sequence_of_up_to_four_events() -> None:
    """Ranks are alike, so that the first event may as well be on rank 0."""
    check(())
    first = [event for event in EVENTS if event.rank == 0]
    for length in range(1, 5):
        for events in itertools.product(first, *[EVENTS] * (length - 1)):
            check(events)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_drawn_sequences_of_up_to_twelve_events(events: list[Event]) -> None:
    check(events)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_drawn_sequences_over_ranks_that_stand(events: list[Event]) -> None:
    check(events, stands=True)


@settings(max_examples=300, deadline=None)
@given(
    st.permutations([Event(rank, what) for rank in range(RANKS) for what in ("passes", "ends with 0")]),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(EVENTS)), max_size=3),
)
def test_nearly_clean_worlds(clean: list[Event], strays: list[tuple[int, Event]]) -> None:
    events = list(clean)
    for place, stray in strays:
        events.insert(place, stray)
    check(events)


def test_a_clean_world_passes() -> None:
    for clean in itertools.permutations(
        Event(rank, what) for rank in range(RANKS) for what in ("passes", "ends with 0")
    ):
        check(clean)
