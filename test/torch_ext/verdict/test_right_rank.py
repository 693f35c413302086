"""The first line of a report: the rank at fault, the line, and the cause, by programs whose fault is known."""

import random
from concurrent.futures import ThreadPoolExecutor

from test.torch_ext.verdict.drawn_faults import FAULTS, judge_report, source_of
from test.torch_ext.world.programs import check_rows, class_of
from test.torch_ext.world.suites import SLOWER, suite_of
from torch_ext import cache

# Rank 1 is to blame in each of these. They wait in ways that no drawn program does, or cannot be heard.
FIRST = "if self.rank == 1: {}\n"
STUCK = FIRST.format("forever()")
REDUCES = "dist.all_reduce(torch.ones(3))"
ACTS = {
    "rendezvous_ends_first": f"{STUCK}self.join_group(2)",
    "store_ends_first": f"store = self.join_group(2)\n{STUCK}store.wait(['a key that rank 1 sets'])",
    "has_a_clock_of_its_own": f"self.join_group()\n{FIRST.format('raise ValueError()')}"
    "time.sleep(0.4)\nfreeze_clocks()\nraise ValueError('the second')",
    "holds_the_gil": f"self.join_group()\n{FIRST.format('ctypes.PyDLL(None).sleep(1000)')}{REDUCES}",
    "is_stopped": f"self.join_group()\n{FIRST.format('os.kill(os.getpid(), signal.SIGSTOP)')}{REDUCES}",
    **dict.fromkeys(("eof", "pipe", "words"), "fail_in_turn(self)"),
}
OF_THREE = {
    "takes_a_collective_for_a_new_group": f"{FIRST.format('dist.barrier()')}dist.new_group([0, 1, 2])",
    "skips_a_subgroup": f"group = dist.new_group([1, 2])\n{STUCK}"
    "if self.rank == 2: dist.all_reduce(torch.ones(3), group=group)\ndist.barrier()",
    "sends_nothing": f"{STUCK}dist.recv(torch.ones(3), src={{0: 1, 2: 0}}[self.rank])",
}
SILENT = """
# Not in a line of a traceback, which would show the words on both ranks.
ERRORS = {
    "test_eof": ValueError("unexpected EOF in the configuration"),
    "test_pipe": BrokenPipeError("Broken pipe: the pager is gone"),
    "test_words": AssertionError("'connection closed' != 'socket closed'"),
}


def fail_in_turn(test):
    test.join_group()
    if test.rank == 1:
        raise ERRORS[test._testMethodName]
    time.sleep(0.4)
    raise KeyError("later")
"""


def silent_rows():
    source = SILENT
    for name, act in (ACTS | OF_THREE).items():  # each in its class, since most take all of the limit
        size, join = (3, "self.join_group()\n") if name in OF_THREE else (2, "")
        end = "failed by 1: ^stopped by a signal" if name == "is_stopped" else "failed by 1"
        source += class_of(f"TestSilent_{name}", "Ranks", {name: (end, join + act)}, on="True")
        source += f"\n    world_size = {size}\n"
    return source


# State that a test leaves behind must not reach the next one.
LATE = """
class TestLateThreads(Threads):
    def test_1_leaves_a_rank_behind(self):  # failed
        if self.rank == 1:
            await_note("the next test waits")
            try:
                dist.all_reduce(torch.full((3,), 40.0))
            finally:
                note("the late rank has called")
                raise ValueError("of the test before")
        self.check()

    def test_2_next(self):
        if self.rank == 0:
            note("the next test waits")
            await_note("the late rank has called")
        self.check()

    def test_3_last(self):
        self.check()
""" + "".join(
    f"""

class TestStanding_{name}(Standing):  # failed: rank 1 failed at...test_1_leaves_a_thread_behind, thread '{name}'
    def test_1_leaves_a_thread_behind(self):
        def fail():
            await_note("{name}")
            try:
                raise ValueError("too late")
            finally:
                note("{name}: failed")

        if self.rank == 1:
            threading.Thread(target=fail, name="{name}").start()

    def end(self):
        note("{name}")
        await_note("{name}: failed")
        time.sleep(0.5)

    def tearDown(self):
        super().tearDown()
        if "{name}" == "between" and "test_1" in self._testMethodName:
            self.end()

    def test_2_next(self):
        self.end()
        self.check()
"""
    for name in ("between", "late")
)


def test_absent_or_first_failed_rank_is_named(tmp_path):
    limit = str(round(8 * (1 + SLOWER) / 2))  # some rows take all of it
    check_rows(tmp_path, {"test_silent.py": silent_rows(), "test_late.py": LATE}, "--timeout", limit, "--slots", "32")


# Drawn programs

# How many of each kind, by default and with --long; and how many ranks run at a time. Threads compute more than they
# wait, since each class imports the modules of its process.
_EACH, _EACH_LONG, _SLOTS = 8, 67, {"gloo": 32, "sim": 24, "threads": 12}


def _run_drawn(kind, number, folder, seed):
    text, made = source_of(random.Random(seed + kind), kind, number)
    with suite_of(folder, text) as suite:
        extra = {"TORCH_EXT_HANG_AFTER": "4", "TORCH_EXT_CACHE": str(cache.folder())}
        limit = ("--timeout", str(round((20 if number == _EACH else 60) * SLOWER)), "--slots", str(_SLOTS[kind]))
        process = suite.start_runner(*limit, "--device", "sim" if kind == "sim" else "cpu", extra=extra)
        return made, suite.finish(process, deadline_s=60 + 12 * number * SLOWER)


def test_the_first_line_names_the_rank_the_line_and_the_cause_of_a_drawn_fault(tmp_path, request):
    long = request.config.getoption("--long")
    seed, number = ("drawn", _EACH) if not long else (str(random.SystemRandom().random()), _EACH_LONG)
    wrong, right = [], 0
    with ThreadPoolExecutor() as pool:
        for made, run in pool.map(lambda kind: _run_drawn(kind, number, tmp_path / kind, seed), FAULTS):
            source = (tmp_path / made[0].kind / "test_suite.py").read_text().splitlines()
            for program in made:
                text = run.text.get(program.name, "")
                why = judge_report(program, text, source) if text else f"it {run.status.get(program.name, 'never ran')}"
                right += not why
                if why:
                    wrong.append(f"{program.kind}, rank {program.guilty} of {program.size}, {program.fault}: {why}")
                    wrong += [program.text, text or str(run)[-3000:]]
    print(f"right in the first line: {right} of {number * len(FAULTS)}, seed {seed}")
    assert not wrong, f"right: {right} of {number * len(FAULTS)}, seed {seed}\n" + "\n".join(wrong)
