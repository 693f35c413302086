"""A fault in a rank gives the right status and report, leaves nothing behind, and spares the next test.

One class runs them one after another. After each, the counts of processes, descriptors and files are as they were.
"""

import pytest

from test.torch_ext.world.programs import check_rows, class_of

SOURCE = """
from test.torch_ext.world.faults import Census

CENSUS = Census(os.environ["CENSUS"])


def print_50_mb():
    for _ in range(50):
        os.write(1, (b"y" * 1023 + b"\\n") * 1024)
    print("the last line")


def leave_child():
    subprocess.Popen(["sleep", "6543"], start_new_session=True)


class Counted(Ranks):
    timeout = 4

    def setUp(self):
        self.addCleanup(CENSUS.note, self._testMethodName)  # the first to be added runs last
        super().setUp()

    def reduce(self):
        dist.all_reduce(torch.ones(3))
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
AT = "at test_suite.py:"
# The ending of a fault's test, and the act of the rank at fault.
FAULTS = {
    "raise": (f"failed by {{rank}}: ^raised ValueError {AT}", "raise ValueError('injected')"),
    "skip": (
        "failed: ^rank {rank} skipped (injected), and rank {other} did not: make",
        "self.skipTest('injected')",
    ),
    "exit": (f"failed by {{rank}}: ^exited with code 3 {AT}", "sys.exit(3)"),
    "leave": (f"failed by {{rank}}: ^exited with code 0 {AT}", "os._exit(0)"),
    "sigkill": (f"failed by {{rank}}: ^was killed by SIGKILL {AT}", KILL),
    "sigsegv": (f"failed by {{rank}}: was killed by SIGSEGV {AT}...Segmentation fault", "ctypes.string_at(0)"),
    "thread": (
        f"failed by {{rank}}: was killed by SIGSEGV {AT}...Current thread...in run...in forever",
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSEGV)).start(); forever()",
    ),
    "hang": (f"failed by {{rank}}: timed out {AT}...Stacks of rank {{rank}}:...in forever", "forever()"),
    "flood": ("passed", "print_50_mb()"),
    "flood_and_raise": ("failed by {rank}: Output of rank {rank}:...the last line", "print_50_mb(); self.fail('no')"),
    "child": ("passed", "leave_child()"),
    "child_and_death": (
        "failed by {rank}: left a process behind, which was ended: sleep 6543",
        f"leave_child(); {KILL}",
    ),
}
# Acts of both ranks.
BOTH = {
    "0_warm": ("passed", "self.check()"),  # torch keeps files of the first tests open in the parent half
    "1_warm": ("passed", "self.check()"),
    "all_die": ("failed by 0, 1: ^ranks 0, 1 were killed by SIGKILL", KILL),
    "no_peer": (
        "failed by 1: Collectives: rank 0 called #1 gloo:all_reduce([3] Float)...which rank 1 never called.",
        "self.join_group(); self.rank or self.reduce()",
    ),
    "hang_in_collective": (
        "failed by 1: never called all_reduce...was in #1 gloo:all_reduce([3] Float)...in forever",
        "self.join_group(); (forever if self.rank else self.reduce)()",
    ),
    "death_in_collective": (
        "failed by 1: was killed by SIGKILL...<- first...(because of that)",
        f"self.join_group(); self.rank and {KILL}; self.reduce()",
    ),
}


@pytest.mark.costly
def test_each_fault_is_reported_and_leaves_nothing(tmp_path):
    rows = dict(BOTH)
    for number, (name, (end, act)) in enumerate(FAULTS.items()):
        rank = number % 2
        rows[name] = (end.format(rank=rank, other=1 - rank), f"if self.rank == {rank}: {act}")
    rows |= {f"{name}_next": ("passed", "self.check()") for name in rows if "warm" not in name}
    run = check_rows(tmp_path, SOURCE + class_of("TestFaults", "Counted", rows, on="True"))
    assert run.out.count("left a process behind, which was ended: sleep 6543") >= 2
    assert len(max(run.text.values(), key=len)) < 40_000, "of a flood, its end is shown"
    assert len(run.census) == len(rows)
    counts = [{**each, "test": ""} for each in run.census]
    changed = [each["test"] for each, same in zip(run.census, counts, strict=True) if same != counts[1]]
    assert [test for test in changed if test != "test_0_warm"] == [], run.census
