"""Which ranks to release, inspect and stop, and how each one ended: scripted events, no processes and no clock."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ext.world.outcome import Ending
from torch_ext.world.protocol import Progress, RankStatus, Receipt, Ticket
from torch_ext.world.settings import Limits
from torch_ext.world.verdict import Judgement, judge
from torch_ext.world.watch import Act, Measures, Step, Watch, silence_text
from torch_ext.world.wording import ranks_phrase

INF = float("inf")
LIMITS = Limits(test_s=60.0, grace_s=1.0, exit_s=15.0)


def receipt(status: RankStatus = RankStatus.PASSED, time_s: float = 0.0, reason: str = "") -> Receipt:
    return Receipt(status, time_s, reason)


def endings(watch: Watch) -> list[Ending]:
    return [outcome.ending for outcome in watch.outcomes()]


# Events, with the numbers of ranks: `p0` rank 0 reports that it passed, `f0` that it failed, `s0` that it skipped;
# `l0` it leaves by itself; `d0=3` it ends with code 3. `=5` sets the clock to 5; `@5` also advances the watch, which
# then does nothing (`.`), releases ranks 0 and 1 (`R01`), or inspects and stops rank 1 (`X1`). `!6` is its deadline.
SCRIPTS = {
    "all pass and are released together": "p0 @0.1 . p1 @0.2 R01 @0.3 . !15.2 l0 l1 d0=0 open d1=0 done PASSED PASSED",
    "a rank that failed waits for no peer": "f0 p1 @0.1 R1",
    "a kill gives peers a moment": "=5 d1=-9 @5 . !6 @5.9 . @6 X0 d0=-9 STOPPED KILLED",
    "so does an exit": "=5 d1=3 @5 . !6 @5.9 . @6 X0 d0=-9 STOPPED EXITED",
    "and a silent one": "=5 d1=0 @5 . !6 @5.9 . @6 X0 d0=-9 STOPPED SILENT",
    "later deaths do not put that off": "=5 d1=-11 @5 . =5.9 d0=-11 @5.9 . done",
    "the time limit stops all once": "!60 p0 @59.9 . @60 X01 @1e9 . d0=-9 d1=-9 TIMED_OUT TIMED_OUT",
    "a rank that hangs as it leaves": "p0 p1 @1 R01 l1 d1=0 @16 . !17 @17 X0 d0=-9 TIMED_OUT PASSED",
    "an abort just before the stop counts": "=5 d1=3 @5 . @6 X0 d0=-6 KILLED EXITED",
    "so does an end before it": "p0 p1 @1 R01 l0 @16 . @17 X01 =16.9 d0=0 =17.1 d1=0 PASSED TIMED_OUT",
    "death after a passing receipt": "p0 p1 =1 d0=-11 d1=-11 KILLED KILLED",
    "an end of one's own after it": "p0 p1 =1 d0=0 l1 d1=0 EXITED PASSED",
    "the first receipt counts": "f0 p0 f1 =1 d0=10 d1=10 FAILED FAILED",
    "words after the stop count for nothing": "@60 X01 f0 d0=-9 d1=-9 TIMED_OUT TIMED_OUT",
    "without a limit for hangs nobody looks": "!60 @50 .",
}
OF_OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"expected_exit": -9}, "d0=-9 @1 . !60 d1=3 done"),
    ({"any_exit": True}, "d0=77 @1 . !60"),
    ({"keep": True}, "p0 open s1 @0.1 . done PASSED SKIPPED"),
    ({"keep": True}, "p0 @60 X1"),
]
SAYS = {"p": RankStatus.PASSED, "f": RankStatus.FAILED, "s": RankStatus.SKIPPED}


@pytest.mark.parametrize(("how", "script"), [({}, script) for script in SCRIPTS.values()] + OF_OTHERS)
def test_a_watch_follows_its_script(how: dict[str, Any], script: str) -> None:
    watch, now_s, steps = Watch(2, LIMITS, 0.0, **how), 0.0, list[Step]()
    ended: list[str] = []
    for word in script.split():
        kind, rest = word[0], word[1:]
        if kind in "=@":
            now_s = float(rest)
            steps = watch.advance(now_s) if kind == "@" else steps
        elif kind in ".RX":
            ranks = tuple(map(int, rest))
            acts = {".": (), "R": (Act.RELEASE,), "X": (Act.INSPECT, Act.STOP)}[kind]
            assert steps == [Step(act, ranks) for act in acts], (script, word)
        elif kind == "!":
            assert watch.deadline_s == pytest.approx(float(rest)), (script, word)
        elif word in ("open", "done"):
            assert watch.done == (word == "done"), script
        elif kind in SAYS:
            watch.received(int(rest), receipt(SAYS[kind]))
        elif kind == "l":
            watch.left(int(rest))
        elif kind == "d":
            watch.ended(int(rest[0]), int(rest[2:]), now_s)
        else:
            ended.append(word)
    assert not ended or [ending.name for ending in endings(watch)] == ended, script


def test_exit_after_the_receipt_is_reported_with_it() -> None:
    for code, words in ((-11, "was killed by SIGSEGV"), (0, "exited with code 0")):
        watch = Watch(1, LIMITS, 0.0)
        watch.received(0, receipt())
        watch.ended(0, code, 1.0)
        assert watch.outcomes()[0].describe() == f"{words} after its test had passed"


def leave(computed: Callable[[int, float], float], released_s: float = 1.0, ends: Mapping[int, float] = {}) -> float:
    """Return when two passed ranks are stopped; ``computed`` gives the CPU time of each up to some time."""
    now_s = released_s
    watch = Watch(2, LIMITS, 0.0, Measures(lambda rank: computed(rank, now_s)))
    for rank in (0, 1):
        watch.received(rank, receipt())
    assert watch.advance(now_s) == [Step(Act.RELEASE, (0, 1))]
    while True:
        now_s = watch.deadline_s
        for rank, end_s in ends.items():
            if now_s >= end_s:
                watch.ended(rank, 0, end_s)
        alive = tuple(rank for rank in (0, 1) if now_s < ends.get(rank, 1e9))
        steps = watch.advance(now_s)
        if steps:
            assert steps == [Step(Act.INSPECT, alive), Step(Act.STOP, alive)]
            return now_s


def test_computing_rank_is_not_stopped_at_the_exit_limit() -> None:
    assert leave(lambda rank, now_s: 0.0) == 17.0
    assert leave(lambda rank, now_s: 0.1 * now_s * rank) == 46.0
    assert leave(lambda rank, now_s: 0.1 * min(now_s, 21.0)) == 22.0
    assert leave(lambda rank, now_s: 5.0, ends={1: 16.5}) == 18.0, "one that ends is progress of the other"
    for released_s in (40.0, 50.0, 59.0):  # at the latest when the watcher of the test would give up
        assert leave(lambda rank, now_s: now_s, released_s) == LIMITS.test_s + LIMITS.exit_s


def test_failure_while_ranks_exit_ends_the_extension() -> None:
    watch = Watch(2, LIMITS, 0.0, Measures(lambda rank: now_s))
    for rank in (0, 1):
        watch.received(rank, receipt())
    for now_s in (1.0, 16.0, 17.0):
        assert [step.act for step in watch.advance(now_s)] == [Act.RELEASE][: now_s == 1.0]
    watch.ended(1, -11, 17.1)
    now_s = 17.1
    watch.advance(now_s)
    now_s = 18.2
    assert watch.advance(now_s) == [Step(Act.INSPECT, (0,)), Step(Act.STOP, (0,))]
    watch.ended(0, -9, 18.3)
    assert endings(watch) == [Ending.STOPPED, Ending.KILLED]


@pytest.mark.parametrize(
    ("share", "end_s"), [(0.0, 6.0), (0.04, 6.0), (0.3, 11.0)], ids=["has what it needs", "nearly", "waits for a core"]
)
def test_peer_that_waits_for_a_core_has_more_time_to_fail_by_itself(share: float, end_s: float) -> None:
    now = [5.0]
    watch = Watch(2, LIMITS, 0.0, Measures(lambda rank: now[0], lambda rank: share * now[0]))
    watch.ended(1, -11, 5.0)
    steps = watch.advance(5.0)
    while not steps:
        now[0] = max(now[0], watch.deadline_s)
        steps = watch.advance(now[0])
    assert (steps, now[0]) == ([Step(Act.INSPECT, (0,)), Step(Act.STOP, (0,))], end_s)
    watch.ended(0, -9, end_s)
    assert endings(watch) == [Ending.STOPPED, Ending.KILLED]


# Fault schedules


@dataclass(frozen=True)
class Script:
    """The acts of a rank that is not stopped: its receipt, its exit code, and the seconds at which they come."""

    status: RankStatus | None
    reports_s: float
    ends: bool
    code: int
    ends_s: float


TIMES = st.floats(0.0, 100.0, allow_nan=False)
SCRIPTS = st.builds(
    Script,
    status=st.sampled_from([None, *RankStatus]),
    reports_s=TIMES,
    ends=st.booleans(),
    code=st.sampled_from([0, 0, 0, 1, 3, 10, -9, -11, -6]),
    ends_s=TIMES,
)


def play(scripts: list[Script], seed: int) -> Watch:
    """Drive a watch with the scripts as a world would; the clock jumps from event to event."""
    watch = Watch(len(scripts), LIMITS, 0.0)
    events = [(s.reports_s, rank, "says") for rank, s in enumerate(scripts) if s.status is not None]
    events += [(s.reports_s + s.ends_s, rank, "ends") for rank, s in enumerate(scripts) if s.ends]
    random.Random(seed).shuffle(events)
    events.sort(key=lambda event: event[0])
    gone: set[int] = set()
    now_s = 0.0
    while not watch.done:
        for step in watch.advance(now_s):
            if step.act is Act.STOP:
                for rank in step.ranks:
                    gone.add(rank)
                    watch.ended(rank, -9, now_s)
        if watch.done:
            break
        if events and events[0][0] <= watch.deadline_s:
            now_s, rank, what = events.pop(0)
            script = scripts[rank]
            if rank in gone:
                continue
            if what == "says" and script.status is not None:
                watch.received(
                    rank, Receipt(script.status, now_s, reason="its own" if script.status != RankStatus.PASSED else "")
                )
            else:
                gone.add(rank)
                watch.left(rank)
                watch.ended(rank, script.code, now_s)
        else:
            assert watch.deadline_s != float("inf"), "the watch waits for an event that never comes"
            now_s = watch.deadline_s
    return watch


@given(scripts=st.lists(SCRIPTS, min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_every_schedule_ends_and_is_judged_by_the_receipt_and_exit_code_of_every_rank(
    scripts: list[Script], seed: int
) -> None:
    """A failure names a culprit, and never one that was stopped."""
    outcomes = play(scripts, seed).outcomes()
    assert [outcome.rank for outcome in outcomes] == list(range(len(scripts)))
    assert all(outcome.exit_code is not None for outcome in outcomes)
    verdict = judge(outcomes)
    for status, judgement in ((RankStatus.PASSED, Judgement.PASSED), (RankStatus.SKIPPED, Judgement.SKIPPED)):
        clean = all(o.receipt is not None and o.receipt.status is status and o.exit_code == 0 for o in outcomes)
        assert (verdict.judgement is judgement) == clean
    if verdict.judgement is not Judgement.FAILED:
        return
    assert verdict.culprits
    assert not set(verdict.culprits) & set(verdict.victims)
    stopped = {outcome.rank for outcome in outcomes if outcome.ending is Ending.STOPPED}
    assert not stopped & set(verdict.culprits)
    by_themselves = {o.rank for o in outcomes if o.ending in (Ending.KILLED, Ending.EXITED, Ending.SILENT)}
    if by_themselves:
        assert by_themselves <= set(verdict.culprits)
    phrases = ranks_named(verdict.summary)
    assert verdict.culprits[0] in phrases[0]
    assert set(verdict.culprits) <= set().union(*phrases)
    assert not set(verdict.victims) & set().union(*phrases)


def ranks_named(summary: str) -> list[set[int]]:
    """Return the ranks behind each ``rank 2`` or ``ranks 0-3, 6`` in ``summary``."""
    found = []
    for phrase in re.findall(r"\branks? (\d[\d, -]*)", summary):
        ends = [[int(end) for end in part.split("-")] for part in phrase.rstrip(" ,").split(", ")]
        found.append({rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)})
    return found


@pytest.mark.parametrize("ranks", [[2], [0, 1], [0, 1, 2, 3, 6], [0, 2, 4]])
def test_ranks_phrase_can_be_parsed_back(ranks: list[int]) -> None:
    assert ranks_named(f"{ranks_phrase(ranks)} of 12 failed; rank 9 too") == [set(ranks), {9}]


@pytest.mark.parametrize(
    "foreign",
    [
        Receipt(RankStatus.PASSED, 0.1, ticket=Ticket("test_a", 0), pid=7),
        Receipt(RankStatus.PASSED, 0.1, ticket=Ticket("test_b", 1), pid=7),
        Receipt(RankStatus.PASSED, 0.1, ticket=Ticket("test_a", 1), pid=8),
    ],
    ids=["of an earlier attempt", "of another test", "of another process"],
)
def test_receipt_of_another_run_is_ignored(foreign: Receipt) -> None:
    watch = Watch(1, LIMITS, 0.0, ticket=Ticket("test_a", 1), pids=[7])
    watch.received(0, foreign)
    assert watch.advance(0.2) == []
    watch.received(0, Receipt(RankStatus.PASSED, 0.1, ticket=Ticket("test_a", 1), pid=7))
    assert watch.advance(0.3) == [Step(Act.RELEASE, (0,))]


HANGS = Limits(test_s=1000.0, hang_s=8.0)
BLOCKED = Progress(True, INF, "1:2")
FREE = Progress(False, INF, "1:2", may_act=("thread 'MainThread' sleeps",))
STOPS = [Step(Act.INSPECT, (0, 1)), Step(Act.STOP, (0, 1))]


class Looks:
    """A watch of two ranks with scripted ``answers`` to its samples (by rank; -1: the parent half), every second."""

    def __init__(
        self, limits: Limits = HANGS, starved_s: Callable[[int], float] = lambda rank: 0.0, **how: Any
    ) -> None:
        self.now_s = 0.0
        self.others: tuple[str, ...] = ()
        self.cpu_time_s = 0.0
        measures = Measures(lambda rank: rank * self.cpu_time_s, starved_s, lambda: self.others)
        self.watch = Watch(2, limits, 0.0, measures, **how)
        self.answers: dict[int, Progress | None] = {0: BLOCKED, 1: BLOCKED, -1: Progress(True, INF, "")}

    def until(self, end_s: float) -> list[Step]:
        """Return the steps besides samples, up to the first second that has any."""
        while self.now_s < end_s:
            self.now_s += 1.0
            steps = self.watch.advance(self.now_s)
            for look in [step for step in steps if step.act is Act.LOOK]:
                for rank in (*look.ranks, -1):
                    answer = self.answers[rank]
                    if answer is not None:
                        self.watch.hangs.observed(rank, answer)
                steps = [step for step in steps if step is not look] + self.watch.advance(self.now_s)
            if steps:
                return steps
        return []


def test_hang_is_found_when_all_looks_show_the_same_blocked_waits() -> None:
    looks = Looks()
    assert looks.until(8.0) == []
    assert looks.until(9.0) == STOPS  # from the first look on, in the first second
    for rank in (0, 1):
        looks.watch.ended(rank, -9, 9.1)
    assert endings(looks.watch) == [Ending.HUNG, Ending.HUNG]


@pytest.mark.parametrize("who", [0, 1, -1])
@pytest.mark.parametrize(
    "once",
    [FREE, Progress(True, INF, "1:3"), Progress(True, 900.0, "1:2")],
    ids=["one thread may go on", "a thread has run", "its own limit ends before the test's"],
)
def test_look_with_a_runnable_rank_delays_the_proof(once: Progress, who: int) -> None:
    looks = Looks()
    assert looks.until(4.0) == []
    before = looks.answers[who]
    looks.answers[who] = once
    assert looks.until(5.0) == []
    looks.answers[who] = before
    assert looks.until(13.0) == []
    assert looks.until(14.0) == STOPS


def test_unanswered_look_proves_nothing_and_blocks_the_next() -> None:
    looks = Looks()
    looks.answers[1] = None
    assert looks.until(30.0) == []
    looks.watch.hangs.observed(1, BLOCKED)
    looks.answers[1] = BLOCKED
    assert looks.until(38.0) == []
    assert looks.until(39.0) == STOPS


def test_a_look_that_begins_late_proves_nothing_before_it_is_answered() -> None:
    """This process may wait for a core for longer than the proof of a hang takes."""
    looks = Looks()
    assert looks.until(1.0) == []
    looks.now_s, looks.answers[1] = 30.0, None
    assert looks.until(50.0) == []
    looks.watch.hangs.observed(1, FREE)
    looks.answers[1] = FREE
    assert looks.until(59.0) == []


def test_other_process_that_may_act_prevents_the_proof_except_in_ranks_memory() -> None:
    looks = Looks()
    looks.others = ("process 7 (sleep 100)",)
    assert looks.until(20.0) == []
    assert looks.watch.hangs.reasons == looks.others
    looks.answers.update(dict.fromkeys((0, 1), replace(BLOCKED, among_ranks=True)))
    assert looks.until(40.0) == STOPS


def test_event_restarts_the_proof() -> None:
    """Rank 1 passes, which may be the event that rank 0 waited for."""
    looks = Looks(keep=True)
    assert looks.until(6.0) == []
    looks.watch.received(1, receipt())
    assert looks.until(14.0) == []
    assert looks.until(15.0) == [Step(Act.INSPECT, (0,)), Step(Act.STOP, (0,))]


def test_thread_left_by_a_finished_rank_may_act() -> None:
    looks = Looks(keep=True)
    looks.watch.received(1, receipt())
    looks.answers[1] = FREE
    assert looks.until(30.0) == []


@pytest.mark.parametrize(
    ("lock_s", "raises_s", "hangs"), [(90.0, INF, True), (40.0, INF, False), (INF, 15.0, True), (INF, 12.0, False)]
)
def test_long_wait_counts_as_endless(lock_s: float, raises_s: float, hangs: bool) -> None:
    """An operation, which raises at its limit, is distinguished from a lock."""
    looks = Looks(Limits(test_s=INF, hang_s=8.0, endless_s=60.0, raises_later_s=5.0))
    looks.answers[1] = Progress(True, lock_s, "1:2", raises_s=raises_s)
    assert looks.until(10.0) == (STOPS if hangs else [])


def test_a_hang_that_is_reported_ends_nothing_and_is_reported_once() -> None:
    looks = Looks(replace(HANGS, end_hangs=False))
    assert looks.until(9.0) == [Step(Act.REPORT_HANG, (0, 1))]
    assert looks.until(200.0) == []
    looks.answers[0] = replace(BLOCKED, fingerprint="1:3")
    assert looks.until(208.0) == []
    assert looks.until(209.0) == [Step(Act.REPORT_HANG, (0, 1))], "they went on, and hang elsewhere"


def test_silence_is_reported_once() -> None:
    looks = Looks()
    looks.answers[0] = FREE
    assert looks.until(60.0) == [Step(Act.REPORT_SILENCE, (0, 1))]
    assert looks.watch.hangs.reasons == ("thread 'MainThread' sleeps of rank 0",)
    assert looks.until(200.0) == []
    looks.answers[1] = replace(BLOCKED, record="a collective")
    assert looks.until(260.0) == []
    assert looks.until(261.0) == [Step(Act.REPORT_SILENCE, (0, 1))]


def test_silence_report_names_who_may_act_and_each_stack_once() -> None:
    reasons = [f"thread {number}" for number in range(5)]
    text = silence_text(reasons, {0: "in wait of rank 0", 1: "in wait of rank 1", 2: ""})
    assert text.splitlines() == [
        "no progress for 60 s; not proven to hang, because these may act: thread 0; thread 1; thread 2; and 2 more",
        "Stacks of ranks 0, 1:",
        "    in wait of rank 0",
        "Stacks of rank 2:",
        "    (cannot be shown)",
    ]


def test_computing_rank_or_receipt_is_progress() -> None:
    looks = Looks(keep=True)
    looks.answers[0] = FREE
    for _ in range(100):
        looks.cpu_time_s += 0.2
        assert looks.until(looks.now_s + 1.0) == []
    assert looks.until(130.0) == []
    looks.watch.received(1, receipt())
    assert looks.until(190.0) == []
    assert looks.until(191.0) == [Step(Act.REPORT_SILENCE, (0,))]


def test_ranks_that_wait_for_one_that_died_are_stopped_and_do_not_hang() -> None:
    """Ranks that wait for a core get longer than their grace, so that samples may prove the cause of their waits."""
    looks = Looks(replace(HANGS, hang_s=1.0), starved_s=lambda rank: looks.now_s)
    looks.watch.ended(1, -9, 0.5)
    assert looks.until(5.0) == []
    assert looks.until(9.0) == [Step(Act.INSPECT, (0,)), Step(Act.STOP, (0,))]
    looks.watch.ended(0, -9, 9.1)
    assert endings(looks.watch) == [Ending.STOPPED, Ending.KILLED]
