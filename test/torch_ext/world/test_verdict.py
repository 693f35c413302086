"""The verdict on scripted outcomes, and the report that a user reads."""

import asyncio
import gc
import json
import warnings
from dataclasses import replace

import pytest

from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import RankStatus, Receipt, Wait
from torch_ext.world.verdict import Judgement, Verdict, WorldFailure, WorldReport, check_ran, judge


def text_of(outcomes, took_s):
    return str(WorldFailure(WorldReport(tuple(outcomes), judge(outcomes), took_s)))


def passed(rank):
    return Outcome(rank, Ending.PASSED, 0, 1.0, Receipt(RankStatus.PASSED, 1.0))


def skipped(rank, reason="no device"):
    return Outcome(rank, Ending.SKIPPED, 0, 1.0, Receipt(RankStatus.SKIPPED, 1.0, reason))


def failed(rank, reason="ValueError: no", time_s=1.0, trace=""):
    receipt = Receipt(RankStatus.FAILED, time_s, reason, trace or reason, transport=reason is PEER_GONE)
    return Outcome(rank, Ending.FAILED, 10, time_s, receipt)


def killed(rank, number=9, time_s=1.0):
    return Outcome(rank, Ending.KILLED, -number, time_s)


def stopped(rank):
    return Outcome(rank, Ending.STOPPED, -9, 2.0)


def timed_out(rank, collectives=""):
    return Outcome(rank, Ending.TIMED_OUT, -9, 60.0, collectives=collectives)


PEER_GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


def entry(number, name, state="started"):
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[3]],
        "input_dtypes": ["Float"],
        "state": state,
    }


def record(*calls):
    return json.dumps(
        [entry(number, f"gloo:{name}", "completed" if over else "started") for number, name, over in calls]
    )


def of_two(*entries, **more):
    """The record of one of two ranks."""
    return json.dumps({"entries": entries, "groups": {"0": [0, 1]}, **more})


def waited(message, *, transport=True, **more):
    """Rank 0, whose collective failed with the error ``message``."""
    receipt = Receipt(RankStatus.FAILED, 1.0, message, message, transport=transport, waits=more.get("waits", ()))
    return Outcome(0, Ending.FAILED, 1, 1.0, receipt, **more)


SENDER = "DistBackendError: simccl on rank 0: rank 2 has destroyed the group and sends nothing more for recv."
PEER = "DistBackendError: simccl on rank 0: rank 1 has destroyed the group and takes no part in what rank 0 called"
ALL = {"*": "test_a.py:5"}  # every process group was destroyed in that line
LEFT = replace(passed(1), collectives=of_two(groups={}, destroyed=ALL))
IN_REDUCE = (Wait("all_reduce() in test_b (test_a.py:7)", transport=True),)
MEMORY = "OutOfMemoryError: out of memory. Device sim:{} is full"
PLACES = (
    '  File "/lib/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
    '  File "/home/u/test_a.py", line 12 in test_b\n'
)
FATAL = f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n{PLACES}"

# The outcomes of ranks, the blamed ranks and their victims, and how the summary begins. Only the last two skip.
CASES = [
    *(
        ([passed(0), bad, passed(2)], (1,), (), f"rank 1 {words}")
        for bad, words in (
            (
                replace(killed(1), out_of_memory=True),
                "was killed by SIGKILL, most likely by the kernel's out-of-memory",
            ),
            (Outcome(1, Ending.SILENT, 0), "exited with code 0 by os._exit() or the like, before its test was over"),
            (timed_out(1), "timed out"),
        )
    ),
    # A death comes before the failures that it caused, whatever their times.
    ([failed(0, PEER_GONE, 1.0), killed(1, time_s=1.5)], (1,), (0,), "rank 1 was killed by SIGKILL"),
    # A lost connection alone is still the fault of a rank.
    ([failed(0, PEER_GONE, 2.0), failed(1, PEER_GONE, 1.0), stopped(2)], (1,), (0, 2), "rank 1 raised RuntimeError"),
    # Equal failures are reported together, whatever their devices, and others are counted.
    ([failed(0), failed(1), killed(2, time_s=9.0)], (0, 1, 2), (), "ranks 0, 1 raised ValueError: no; rank 2 failed"),
    ([failed(rank, MEMORY.format(rank)) for rank in (0, 1)], (0, 1), (), "ranks 0, 1 raised OutOfMemoryError"),
    (
        [passed(0), skipped(1), passed(2)],
        (1,),
        (),
        "rank 1 skipped (no device), and ranks 0, 2 did not: make the condition the same on every rank",
    ),
    (
        [timed_out(0, record((1, "all_reduce", False))), timed_out(1, record())],
        (1,),
        (0,),
        "rank 1 never called all_reduce, which rank 0 waited in",
    ),
    # The error appears where the host synchronizes with the device, and no collective shows the waiting ranks.
    ([waited(SENDER), passed(1), passed(2)], (2,), (0,), "rank 2 kept rank 0 waiting in a collective; its test was"),
    ([waited(SENDER, transport=False), passed(1), passed(2)], (0,), (), ""),  # a test's own words
    ([waited(SENDER), passed(1), failed(2, time_s=2.0)], (2,), (0,), ""),
    # On the host, gloo says that the connection was closed, also in a barrier that no record has.
    ([waited(PEER_GONE), LEFT], (1,), (0,), "rank 1 destroyed the process group at test_a.py:5, while rank 0 was in"),
    (
        [
            waited(PEER, collectives=of_two(entry(1, "simccl:barrier", "scheduled"))),
            replace(passed(1), collectives=of_two()),
        ],
        (1,),
        (0,),
        "rank 1 never called barrier, which rank 0 waited in; its test was over",
    ),
    (
        [
            waited(PEER_GONE, waits=IN_REDUCE, collectives=of_two(entry(1, "gloo:all_reduce", "scheduled"))),
            LEFT,
        ],
        (1,),
        (0,),
        "rank 1 destroyed the process group at test_a.py:5, while rank 0 was in all_reduce (test_a.py:7)",
    ),
    # A barrier that names the absent rank is in no record. A rank that has a group again did not destroy this one.
    (
        [waited(SENDER, waits=IN_REDUCE), passed(1), replace(passed(2), collectives=of_two(groups={}, destroyed=ALL))],
        (2,),
        (0,),
        "rank 2 destroyed the process group at test_a.py:5, while rank 0 was in all_reduce (test_a.py:7)",
    ),
    (
        [waited(SENDER, waits=IN_REDUCE), passed(1), replace(passed(2), collectives=of_two(destroyed=ALL))],
        (2,),
        (0,),
        "rank 2 kept rank 0 waiting in all_reduce (test_a.py:7); its test was over",
    ),
    *(
        ([waited(f"DistBackendError: simccl{report}"), failed(1, time_s=2.0)], (1,), (0,), "")
        for report in (
            " on rank 0: rank 1 (process 7) has ended and takes no part in what rank 0 called",
            " on rank 0: rank 1 (process 7) has ended and sends nothing more for recv",
            " on rank 0: rank 1 (process 7) has ended within all_reduce",
            ": rank 1 (process 7) ended while the group was made",
        )
    ),
    # The place of a death is read from the output of the process.
    (
        [passed(0), replace(killed(1, 11), output=FATAL)],
        (1,),
        (),
        "rank 1 was killed by SIGSEGV in all_reduce, called at test_a.py:12",
    ),
    (
        [passed(0), Outcome(1, Ending.EXITED, 3, stacks=PLACES.splitlines()[1])],
        (1,),
        (),
        "rank 1 exited with code 3 at test_a.py:12 before its test was over",
    ),
    ([], (), (), "no rank was started, because the test's world_size is 0"),
    ([skipped(0, "a"), skipped(1, "b"), skipped(2, "a")], (), (), "a; b"),
]


@pytest.mark.parametrize(("outcomes", "culprits", "victims", "summary"), CASES)
def test_the_verdict_names(outcomes, culprits, victims, summary):
    verdict = judge(outcomes)
    assert verdict.judgement is (Judgement.FAILED if culprits else Judgement.SKIPPED)
    assert (verdict.culprits, verdict.victims) == (culprits, victims)
    assert verdict.summary.startswith(summary)


@pytest.mark.parametrize(
    ("outcomes", "how", "passes"),
    [
        ([passed(0), passed(1)], {}, True),
        # An expected exit code must be met by every rank without a receipt, and excuses nothing else.
        ([killed(0), killed(1)], {"expected_exit": -9}, True),
        ([killed(0), passed(1)], {"expected_exit": -9}, True),
        ([killed(0), killed(1, 11)], {"expected_exit": -9}, False),
        *(([killed(0), bad], {"expected_exit": -9}, False) for bad in (timed_out(1), stopped(1), failed(1))),
        # Any exit excuses endings, and no failures.
        ([killed(0), Outcome(1, Ending.EXITED, 3)], {"any_exit": True}, True),
        ([killed(0), failed(1)], {"any_exit": True}, False),
        ([killed(0), timed_out(1)], {"any_exit": True}, False),
    ],
)
def test_a_world_passes_if_each_rank_does_or_ends_as_expected(outcomes, how, passes):
    verdict = judge(outcomes, **how)
    assert (verdict == Verdict(Judgement.PASSED)) is passes
    assert ("(expected exit code -9)" in verdict.summary) == (not passes and "expected_exit" in how)


# The text


def test_report_shows_every_ending_first_death_and_consequences():
    outcomes = [failed(0, PEER_GONE), killed(1, 11), stopped(2)]
    lines = text_of(outcomes, 1.23).splitlines()
    assert lines[:2] == ["rank 1 was killed by SIGSEGV", ""]
    assert lines[2] == "What each rank did in 1.2 s:"
    assert lines[3] == f"  rank 0 raised {PEER_GONE}  (because of that)"
    assert lines[4] == "  rank 1 was killed by SIGSEGV  <- first"
    assert lines[5] == "  rank 2 was stopped while its test was running"
    assert text_of([waited(PEER_GONE), LEFT], 1.0).endswith("\n  rank 1 passed  <- too early")
    text = text_of([failed(0, PEER_GONE), failed(1, "KeyError: 'x'")], 1.0)
    assert "Traceback of rank 1:" in text and "Traceback of rank 0:" not in text, "a consequence needs no traceback"
    text = text_of([failed(0, "IndexError: 'y'", time_s=2.0), failed(1, "KeyError: 'x'")], 1.0)
    assert text.index("Traceback of rank 1:") < text.index("Traceback of rank 0:"), "the culprit comes first"


def test_report_shows_that_timed_out_ranks_waited_for_a_core():
    late, prompt, hung = timed_out(0), timed_out(1), Outcome(2, Ending.HUNG)
    late.delayed_s, prompt.delayed_s, hung.delayed_s = 61.04, 29.9, 120.0
    lines = text_of([late, prompt, hung], 120.0).splitlines()
    assert [number for number, line in enumerate(lines) if "waited for a core" in line] == [4]
    assert lines[3].startswith("  rank 0 timed out") and lines[4] == "    waited for a core for 61.0 s of that time"
    assert lines[7:9] == [
        "",
        "This machine was overloaded: run fewer tests at once (-j, --slots), or raise --timeout.",
    ]
    late.delayed_s = 29.9
    assert "core" not in text_of([late, prompt, hung], 120.0)


def test_equal_tracebacks_are_shown_once_with_their_ranks():
    outcomes = [failed(rank, trace=f"Traceback:\n  at 0x7f{rank} in rank {rank}\nValueError: no") for rank in range(3)]
    text = text_of(outcomes, 1.0)
    assert text.count("Traceback of ranks 0-2:") == 1
    assert text.count("Traceback:") == 1


def test_long_output_is_cut_at_its_beginning():
    outcome = killed(0)
    outcome.output = "\n".join(f"line {number}" for number in range(70))
    outcome.left_behind = ["sleep 60"]
    text = text_of([outcome], 1.0)
    assert "left a process behind, which was ended: sleep 60" in text
    assert "    ... 10 lines before these\n    line 10\n" in text
    assert "line 9\n" not in text
    assert text.endswith("line 69")


def test_collectives_are_named_with_the_one_that_does_not_match():
    outcomes = [
        timed_out(0, record((1, "all_reduce", True), (2, "broadcast", False))),
        timed_out(1, record((1, "all_reduce", True), (2, "all_gather", False))),
    ]
    text = text_of(outcomes, 60.0)
    assert text.startswith("ranks 0, 1 called different collectives: rank 0 called broadcast([3] Float)")
    assert "Collectives:" not in text, "the first line says it"
    assert "    called #1 gloo:all_reduce([3] Float) in group 0 (default_pg)\n    was in #2 gloo:broadcast" in text


def disagrees(rank, own, peer, other, time_s):
    message = (
        f"DistBackendError: simccl on rank {rank}: collective 2 of group 0: ranks disagree in the operation: "
        f"rank {rank} called {own} at /home/u/test_a.py:{10 + rank}; "
        f"rank {peer} called {other} at /home/u/test_a.py:{10 + peer}."
    )
    receipt = Receipt(RankStatus.FAILED, time_s, message, message, transport=True, place="test_a.py:99")
    return Outcome(rank, Ending.FAILED, 1, time_s, receipt)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_smaller_party_is_to_blame_for_a_disagreement(first):
    calls = [("all_reduce of 4", 2, "barrier"), ("all_reduce of 4", 2, "barrier"), ("barrier", 0, "all_reduce of 4")]
    outcomes = [disagrees(rank, *call, 1.0 + (rank != first)) for rank, call in enumerate(calls)]
    verdict = judge(outcomes)
    assert (verdict.culprits, verdict.victims) == ((2,), (0, 1))
    assert verdict.summary == (
        "rank 2 called barrier at test_a.py:12, where ranks 0, 1 called all_reduce of 4 (test_a.py:10)"
    )
    verdict = judge([disagrees(0, "a", 1, "b", 2.0), disagrees(1, "b", 0, "a", 1.0)])
    assert verdict.culprits == (0, 1) and verdict.summary.startswith("ranks 0, 1 called different collectives: ")
    at_its_end = replace(disagrees(1, "barrier", 0, "a", 1.0), waits=(Wait("the barrier", transport=True, over=True),))
    verdict = judge([disagrees(0, "a", 1, "barrier", 2.0), at_its_end])
    assert (verdict.culprits, verdict.victims) == ((1,), (0,))
    assert verdict.summary == "rank 1 never called a, which rank 0 waited in (test_a.py:10); its test was over"
    peers = [disagrees(rank, "a", 1 - rank, "b", 2.0) for rank in (0, 1)]
    assert judge([*peers, failed(2)]).culprits[0] == 2, "it raised before the others disagreed"


# The value of a call shows whether its body ran


async def async_generator():
    raise AssertionError("it ran")
    yield


class Awaitable:
    def __await__(self):
        raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: asyncio.sleep(0), "a coroutine"),
        (lambda: (int("x") for _ in range(1)), "a generator"),
        (async_generator, "an asynchronous generator"),
        (Awaitable, r"an awaitable \(Awaitable\)"),
    ],
)
def test_body_that_has_not_run_is_refused_and_closed(call, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "was never awaited"
        with pytest.raises(TypeError, match=rf"^test_a\(\) returned {kind}, so its body has not run\. Write it as"):
            check_ran(call(), "test_a")
        gc.collect()


@pytest.mark.parametrize("returned", [None, True, 3, [], [1].__iter__(), "text", object()])
def test_other_return_values_are_accepted(returned):
    check_ran(returned, "test_a")
