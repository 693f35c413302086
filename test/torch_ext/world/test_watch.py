"""Which ranks to release, inspect and stop, and how each one ended: scripted events, no processes and no clock."""

import random
import re
from dataclasses import dataclass, replace

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
HANGS = Limits(test_s=1000.0, hang_s=8.0)
BLOCKED = Progress(True, INF, "1:2")
# The answers of a rank that is looked at.
ANSWERS = {
    "blocked": BLOCKED,
    "free": Progress(False, INF, "1:2", may_act=("thread 'MainThread' sleeps",)),
    "moved": replace(BLOCKED, fingerprint="1:3"),
    "ends": replace(BLOCKED, until_s=900.0),
    "private": replace(BLOCKED, among_ranks=True),
    "called": replace(BLOCKED, record="a collective"),
    "lock90": replace(BLOCKED, until_s=90.0),
    "lock40": replace(BLOCKED, until_s=40.0),
    "raises15": replace(BLOCKED, raises_s=15.0),
    "raises12": replace(BLOCKED, raises_s=12.0),
}
SAYS = {"p": RankStatus.PASSED, "f": RankStatus.FAILED, "s": RankStatus.SKIPPED}
ACTS = {
    ".": (),
    "R": (Act.RELEASE,),
    "X": (Act.INSPECT, Act.STOP),
    "H": (Act.REPORT_HANG,),
    "S": (Act.REPORT_SILENCE,),
}


class Scene:
    """A watch of two ranks, whose measures and answers a script sets. At first all answer that they are blocked."""

    def __init__(self, limits=LIMITS, starved=0.0, **how):
        self.now_s = self.cpu_time_s = self.computes = 0.0
        self.others: tuple[str, ...] = ()
        self.answers: dict[int, Progress | None] = dict.fromkeys((0, 1, -1), BLOCKED)
        measures = Measures(lambda rank: rank * self.cpu_time_s, lambda rank: starved * self.now_s, lambda: self.others)
        self.watch = Watch(2, limits, 0.0, measures, **how)

    def play(self, script):
        """Follow a script, with the numbers of ranks; -1 is the parent half.

        ``p0`` rank 0 reports that it passed, ``f0`` that it failed, ``s0`` that it skipped; ``l0`` it leaves by itself;
        ``d0=3`` it ends with code 3; ``0:free`` it answers so from now on, or not at all (``0:none``); ``0!free`` it
        also answers the open question. ``c0.1`` rank 1 computes for this share of the time. ``=5`` sets the clock to 5;
        ``@5`` also advances the watch, and ``>5`` does so each second until it acts. It then does nothing (``.``),
        releases ranks 0 and 1 (``R01``), inspects and stops rank 1 (``X1``), or reports a hang (``H01``) or silence
        (``S01``). ``!6`` is its deadline. Last, the endings of both ranks.
        """
        steps, ended = list[Step](), list[str]()
        for word in script.split():
            kind, rest = word[0], word[1:]
            if kind in "=@>":
                steps = self._advance(kind, float(rest))
            elif kind in ACTS and not rest.isalpha():
                assert steps == [Step(act, tuple(map(int, rest))) for act in ACTS[kind]], (script, word)
            elif kind == "!":
                assert self.watch.deadline_s == pytest.approx(float(rest)), (script, word)
            elif word in ("open", "done"):
                assert self.watch.done == (word == "done"), script
            elif not self._happens(word):
                ended.append(word)
        assert not ended or [outcome.ending.name for outcome in self.watch.outcomes()] == ended, script
        return self

    def _happens(self, word):
        """Let an event of a rank happen. Return False if ``word`` is none."""
        kind, rest = word[0], word[1:]
        if kind in SAYS:
            self.watch.received(int(rest), Receipt(SAYS[kind], 0.0))
        elif kind == "l":
            self.watch.left(int(rest))
        elif kind == "d":
            self.watch.ended(int(rest[0]), int(rest[2:]), self.now_s)
        elif kind == "c":
            self.computes = float(rest)
        elif found := re.fullmatch(r"(-?\d)([:!])(\w+)", word):
            rank, answer = int(found[1]), ANSWERS.get(found[3])
            self.answers[rank] = answer
            if found[2] == "!" and answer is not None:
                self.watch.hangs.observed(rank, answer)
        else:
            return False
        return True

    def _advance(self, kind, end_s):
        steps = []
        if kind != ">":
            self.now_s = end_s
            return self.watch.advance(end_s) if kind == "@" else []
        while self.now_s < end_s and not steps:
            self.now_s = min(self.now_s + 1.0, end_s)
            self.cpu_time_s += self.computes
            steps = self.watch.advance(self.now_s)
            for look in [step for step in steps if step.act is Act.LOOK]:
                for rank in (*look.ranks, -1):
                    if (answer := self.answers[rank]) is not None:
                        self.watch.hangs.observed(rank, answer)
                steps = [step for step in steps if step is not look] + self.watch.advance(self.now_s)
        return steps


SCRIPTS = {
    "all pass and are released together": "p0 @0.1 . p1 @0.2 R01 @0.3 . !15.2 l0 l1 d0=0 open d1=0 done PASSED PASSED",
    "a rank that failed waits for no peer": "f0 p1 @0.1 R1",
    "a kill gives peers a moment": "=5 d1=-9 @5 . !6 @5.9 . @6 X0 d0=-9 STOPPED KILLED",
    "so does an exit": "=5 d1=3 @5 . !6 @5.9 . @6 X0 d0=-9 STOPPED EXITED",
    "and a silent one": "=5 d1=0 @5 . !6 @5.9 . @6 X0 d0=-9 STOPPED SILENT",
    "later deaths do not put that off": "=5 d1=-11 @5 . =5.9 d0=-11 @5.9 . done",
    "the time limit stops all once": "!60 p0 @59.9 . @60 X01 @1e9 . d0=-9 d1=-9 TIMED_OUT TIMED_OUT",
    "a rank that hangs as it leaves": "p0 p1 @1 R01 l1 d1=0 @16 . !17 @17 X0 d0=-9 TIMED_OUT PASSED",
    "two of them": "p0 p1 @1 R01 >16.9 . >17 X01",
    "one that computes is not stopped at that limit": "p0 p1 @1 R01 c0.1 >45 . >46 X01",
    "until it stops computing": "p0 p1 @1 R01 c0.1 >21 . c0 >22 X01",
    "an end is progress of the other": "p0 p1 @1 R01 c1 >2 c0 >16 . =16.5 l1 d1=0 @17 . @18 X0",
    "at the latest when the test's watcher would give up": "p0 p1 @40 R01 c1 >74 . >75 X01",
    "however late they pass": "p0 p1 @59 R01 c1 >74 . >75 X01",
    "a failure ends the extension": "p0 p1 @1 R01 c1 >17 . =17.1 d1=-11 @17.1 . @18.2 X0 d0=-9 STOPPED KILLED",
    "an abort just before the stop counts": "=5 d1=3 @5 . @6 X0 d0=-6 KILLED EXITED",
    "so does an end before it": "p0 p1 @1 R01 l0 @16 . @17 X01 =16.9 d0=0 =17.1 d1=0 PASSED TIMED_OUT",
    "death after a passing receipt": "p0 p1 =1 d0=-11 d1=-11 KILLED KILLED",
    "an end of one's own after it": "p0 p1 =1 d0=0 l1 d1=0 EXITED PASSED",
    "the first receipt counts": "f0 p0 f1 =1 d0=10 d1=10 FAILED FAILED",
    "words after the stop count for nothing": "@60 X01 f0 d0=-9 d1=-9 TIMED_OUT TIMED_OUT",
    "without a limit for hangs nobody looks": "!60 @50 .",
}
DEATH = "=5 d1=-11 @5 . "
# Looks, each second: a hang is proven when all show the same blocked waits for eight seconds.
LOOKS = {
    "from the first one on, in the first second": ">8 . >9 X01 d0=-9 d1=-9 HUNG HUNG",
    **{
        f"{who} {answer} once": f">4 . {who}:{answer} >5 . {who}:blocked >13 . >14 X01"
        for who in (0, 1, -1)
        for answer in ("free", "moved", "ends")
    },
    "an unanswered one proves nothing and blocks the next": "1:none >30 . 1!blocked >38 . >39 X01",
    # This process may wait for a core for longer than the proof takes.
    "nor does one that begins late, before it is answered": ">1 . =30 1:none >50 . 1!free >59 .",
}
OTHERS = Limits(test_s=INF, hang_s=8.0, endless_s=60.0, raises_later_s=5.0)
OF_OTHERS = [
    ({"expected_exit": -9}, "d0=-9 @1 . !60 d1=3 done"),
    ({"any_exit": True}, "d0=77 @1 . !60"),
    ({"keep": True}, "p0 open s1 @0.1 . done PASSED SKIPPED"),
    ({"keep": True}, "p0 @60 X1"),
    # A peer that waits for a core has more time to fail by itself.
    *(({"starved": share}, f"{DEATH}>5.9 . >6 X0 d0=-9 STOPPED KILLED") for share in (0.0, 0.04)),
    ({"starved": 0.3}, f"{DEATH}>10.9 . >11 X0 d0=-9 STOPPED KILLED"),
    # Samples may prove the cause of its wait in that time, and it does not hang.
    ({"starved": 1.0, "limits": replace(HANGS, hang_s=1.0)}, "=0.5 d1=-9 >5 . >9 X0 d0=-9 STOPPED KILLED"),
    # A receipt may be the event that the other rank waited for, and its rank's threads may act.
    ({"keep": True, "limits": HANGS}, ">6 . p1 >14 . >15 X0"),
    ({"keep": True, "limits": HANGS}, "p1 1:free >30 ."),
    # A long wait counts as endless. An operation, which raises at its limit, is distinguished from a lock.
    *(({"limits": OTHERS}, f"1:{wait} >10 X01") for wait in ("lock90", "raises15")),
    *(({"limits": OTHERS}, f"1:{wait} >10 .") for wait in ("lock40", "raises12")),
    # They went on, and hang elsewhere.
    ({"limits": replace(HANGS, end_hangs=False)}, ">9 H01 >200 . 0:moved >208 . >209 H01"),
    # A collective, computing and a receipt are progress.
    ({"limits": HANGS}, "0:free >59 . >60 S01 >200 . 1:called >260 . >261 S01"),
    ({"limits": HANGS, "keep": True}, "0:free c0.2 >100 . c0 >130 . p1 >190 . >191 S0"),
]


@pytest.mark.parametrize(
    ("how", "script"),
    [
        *(({}, script) for script in SCRIPTS.values()),
        *(({"limits": HANGS}, script) for script in LOOKS.values()),
        *OF_OTHERS,
    ],
)
def test_a_watch_follows_its_script(how, script):
    Scene(**how).play(script)


def test_reasons_against_a_hang_are_processes_besides_ranks_and_threads_that_may_act():
    scene = Scene(HANGS)
    scene.others = ("process 7 (sleep 100)",)
    assert scene.play(">20 .").watch.hangs.reasons == scene.others
    scene.play("0:private 1:private >40 X01")  # no other process sees that memory
    assert Scene(HANGS).play("0:free >5 .").watch.hangs.reasons == ("thread 'MainThread' sleeps of rank 0",)


def test_silence_report_names_who_may_act_and_each_stack_once():
    reasons = [f"thread {number}" for number in range(5)]
    text = silence_text(reasons, {0: "in wait of rank 0", 1: "in wait of rank 1", 2: ""})
    assert text.splitlines() == [
        "no progress for 60 s; not proven to hang, because these may act: thread 0; thread 1; thread 2; and 2 more",
        "Stacks of ranks 0, 1:",
        "    in wait of rank 0",
        "Stacks of rank 2:",
        "    (cannot be shown)",
    ]


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
RANKS = st.builds(
    Script,
    status=st.sampled_from([None, *RankStatus]),
    reports_s=TIMES,
    ends=st.booleans(),
    code=st.sampled_from([0, 0, 0, 1, 3, 10, -9, -11, -6]),
    ends_s=TIMES,
)


def play(scripts, seed):
    """Drive a watch with the scripts as a world would; the clock jumps from event to event."""
    watch = Watch(len(scripts), LIMITS, 0.0)
    events = [(s.reports_s, rank, "says") for rank, s in enumerate(scripts) if s.status is not None]
    events += [(s.reports_s + s.ends_s, rank, "ends") for rank, s in enumerate(scripts) if s.ends]
    random.Random(seed).shuffle(events)
    events.sort(key=lambda event: event[0])
    gone = set()
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


@given(scripts=st.lists(RANKS, min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_every_schedule_ends_and_is_judged_by_the_receipt_and_exit_code_of_every_rank(scripts, seed):
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


def ranks_named(summary):
    """Return the ranks behind each ``rank 2`` or ``ranks 0-3, 6`` in ``summary``."""
    found = []
    for phrase in re.findall(r"\branks? (\d[\d, -]*)", summary):
        ends = [[int(end) for end in part.split("-")] for part in phrase.rstrip(" ,").split(", ")]
        found.append({rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)})
    return found


@pytest.mark.parametrize("ranks", [[2], [0, 1], [0, 1, 2, 3, 6], [0, 2, 4]])
def test_ranks_phrase_can_be_parsed_back(ranks):
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
def test_receipt_of_another_run_is_ignored(foreign):
    watch = Watch(1, LIMITS, 0.0, ticket=Ticket("test_a", 1), pids=[7])
    watch.received(0, foreign)
    assert watch.advance(0.2) == []
    watch.received(0, Receipt(RankStatus.PASSED, 0.1, ticket=Ticket("test_a", 1), pid=7))
    assert watch.advance(0.3) == [Step(Act.RELEASE, (0,))]
