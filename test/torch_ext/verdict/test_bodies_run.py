"""A test passes only if unittest has run its body and fixtures, in every rank, and the ranks agree on what ran."""

import os
import re

from test.torch_ext.world.programs import check_rows, class_of
from test.torch_ext.world.suites import CHECKOUT, suite_of

HELPERS = """
async def go(*_):
    raise AssertionError("it ran")


class Limited(Ranks):
    timeout = 6


class TestUnrun(Ranks):
    def test_has_a_cleanup(self):  # failed: the cleanup go() returned a coroutine
        self.addCleanup(go)


class TestPlainUnrun(unittest.TestCase):
    def test_has_a_cleanup(self):  # failed: the cleanup go() returned a coroutine
        self.addCleanup(go)


class Bad(unittest.TestCase):
    def test_twin(self):  # failed: AssertionError: no
        self.fail("no")


class Good(unittest.TestCase):
    def test_twin(self):
        pass


# Each goes by the name that its file knows it by.
Bad.__name__ = Bad.__qualname__ = Good.__name__ = Good.__qualname__ = "TestTwin"


class TestSpawned(TestCase):
    @spawn_threads_and_init_comms(world_size=2)
    async def test_in_threads(self):  # failed: async|coroutine
        self.fail("it ran")
"""
# Fixtures that a call does not execute, each in its class.
FIXTURES = {
    "Plain": ("unittest.TestCase", "async def tearDownClass(cls): pass", "tearDownClass() of TestPlain is `async def`"),
    "Asked": ("Base", "def setUpClass(cls): super().setUpClass()", "setUpClass() of Base is `async def`"),
    "Added": (
        "unittest.TestCase",
        "def setUpClass(cls): cls.addClassCleanup(go)",
        "the cleanup go() returned a coroutine",
    ),
    "Ranks": ("Ranks", "def tearDown(self): yield", "tearDown() of TestRanks is a generator function"),
}
FIXED = """

class Base(Standing):
    @classmethod
    async def setUpClass(cls):
        pass
""" + "".join(
    f"""

class Test{name}({base}):  # failed: {words}
    {"@classmethod" if "cls" in code else ""}
    {code}

    def test_it(self):{"" if name == "Added" else "  # none"}
        pass
"""
    for name, (base, code, words) in FIXTURES.items()
)
MODULE = """
async def setUpModule():
    pass


class TestOfModule(unittest.TestCase):  # failed: setUpModule() returned a coroutine
    def test_of_module(self):  # none
        pass
"""
# A `_run` that leaves the body out on rank 1, or swallows its failure.
SKIPS_OR_SWALLOWS = """if {rank} == 0 or "returns" not in name:
            with contextlib.suppress(AssertionError):
                getattr(self, name)()"""
OVERRIDES = f"""

class Overrides(Ranks):
    @classmethod
    def _run(cls, rank, name, file_name, pipe, **kwargs):
        assert set(kwargs) == {{"fake_pg"}}, kwargs
        self = cls(name)
        self.rank, self.file_name = rank, file_name
        {SKIPS_OR_SWALLOWS.format(rank="rank")}


class StandingOverrides(Standing):
    @classmethod
    def _run_test_given_id(cls, test_id, **kwargs):
        name = test_id.rpartition(".")[2]
        self = cls(name)
        {SKIPS_OR_SWALLOWS.format(rank="cls.rank")}


class ThreadsOverrides(Threads):
    @classmethod
    def _run(cls, test_name, rank, world_size, **kwargs):
        pass


class TestThreadsOverrides(ThreadsOverrides):
    def test_never_called(self):  # failed by 0, 1: before its test was over
        self.fail("it ran")


class Exits(Ranks):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe):  # as in suites of older releases
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        self.run_test(test_name, pipe)
        sys.exit({{"test_code_3": 3, "test_in_words": "words"}}.get(test_name, 0))
"""
EXITS = {
    "code_0": ("passed", "pass"),
    "code_3": ("failed by 0, 1: ^exited with code 3", "pass"),
    "in_words": ("failed", "pass"),
    "fails": ("failed by 0, 1: AssertionError", "self.fail('no')"),
    "inside": ("failed by 1", "self.rank and sys.exit(0)"),
    # The test method has run to its end once, inside itself.
    "inside_after_itself": (
        "failed by 1",
        "if hasattr(self, 'again'): return\nself.again = True\ngetattr(self, self._testMethodName)()\n"
        "self.rank and sys.exit(0)",
    ),
}
RETURNED = "failed by 1: ^the test method has not run to its end"
OVERRIDDEN = {
    "calls": ("passed", "pass"),
    "returns": (RETURNED, "pass"),
    "swallows": (RETURNED, "self.fail('no')"),
}
FAILS_ALONE = "self.rank == 0 and self.fail('as expected')\n"
EXPECTED = {
    "is_killed": ("failed by 1", "self.rank and os.kill(os.getpid(), signal.SIGKILL)"),
    "hangs": ("failed by 1", "self.rank and forever()"),
    "leaves": ("failed by 1", "self.rank and os._exit(0)"),
    "disagrees": ("failed", "self.rank and self.skipTest('alone')"),
    "skips_alone": ("failed", "self.rank and self.skipTest('alone')\nself.fail('as expected')"),
    "thread_fails": ("failed", "in_a_thread()"),
    "fails_at_exit": ("failed", "atexit.register(self.fail)"),
    # The body fails as expected, and another failure follows.
    "fails_and_a_thread_too": ("failed", "threading.Timer(0.3, raise_).start()\nself.fail('as expected')"),
    "fails_and_at_exit_too": ("failed", "atexit.register(raise_)\nself.fail('as expected')"),
    "fails_while_its_peer_waits": ("expected failure", f"self.join_group()\n{FAILS_ALONE}dist.barrier()"),
    "fails_beside_a_hang": ("failed by 1", f"{FAILS_ALONE}threading.Event().wait()"),
    "fails_before_a_death": ("failed by 1", f"{FAILS_ALONE}time.sleep(2)\nos.kill(os.getpid(), signal.SIGKILL)"),
    "fails_before_a_skip": ("failed", f"{FAILS_ALONE}time.sleep(2)\nself.skipTest('alone')"),
    "fails_and_leaves_later": ("failed", "atexit.register(os._exit, 0)\nself.fail('as expected')"),
}
# How a class evades the harness, as a body of the class, so that no code waits for its ranks.
EVADES = {
    "starts_twice": "def setUp(self):\n        super().setUp()\n        super(self.Base, self).setUp()",
    "skips_late": "def setUp(self):\n        super().setUp()\n        self.skipTest('late')",
    "puts_method_back": "def __init__(self, *args, **kwargs):\n        super().__init__(*args, **kwargs)\n"
    "        self.test_it = self.own",
    "hides_method": "def __getattribute__(self, name):\n"
    "        return super().__getattribute__('own' if name.startswith('test_') else name)",
    "overrides_run": "def run(self, result=None):\n        result.startTest(self)\n        self.setUp()\n"
    "        result.addSuccess(self)\n        result.stopTest(self)",
}
EVADED = """

class Starts(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        if not hasattr(self, "_world"):
            super().setUp()
        self._spawn_processes()
""" + "".join(
    f"""

class TestEvades_{name}_{base}({base}):{"  # failed" if (name, base) == ("overrides_run", "Standing") else ""}
    Base = {base}

    def own(self):
        pass

    def test_it(self):  # failed: ran and this test ended without waiting for them
        self.fail("it ran")

    {body}
"""
    for name, body in EVADES.items()
    for base in ("Starts", "Threads", "Standing")
    if name != "starts_twice" or base == "Starts"
)
SUB_TESTS = """

class TestNoDevices(Threads):
    world_size = 0

    def test_it(self):  # skipped
        pass


class TestSubTests(Ranks):
    def test_each_is_listed(self):  # failed: (x=1) on ranks 0, 1...[case] (x=3) on rank 0...(x=2) on rank 1
        for x in range(4):
            with self.subTest("case", x=x):
                if x == 0:
                    self.skipTest("none")
                self.assertFalse(x == 1 or x + self.rank == 3, f"x is {x}")

    def test_class_cleanup_skips_alone(self):
        if self.rank:
            type(self).addClassCleanup(self.skipTest, "alone")

    def test_skip_different_ones(self):  # failed: ^rank 0 skipped sub-test (x=0) (not here), and rank 1 did not
        for x in range(2):
            with self.subTest(x=x):
                if x == self.rank:
                    self.skipTest("not here")

    def test_fails_before_a_hang(self):  # failed: sub-test (x=1) failed: ValueError|tests that failed:...(x=1)
        self.join_group()
        with self.subTest(x=1):
            if self.rank == 1:
                raise ValueError("the cause")
            dist.barrier()
        self.rank == 1 and dist.barrier()
"""


def source():
    text = HELPERS + FIXED + OVERRIDES + EVADED + SUB_TESTS
    for base in ("Overrides", "StandingOverrides"):
        text += class_of(f"Test{base}", base, OVERRIDDEN)
    text += class_of("TestExits", "Exits", EXITS, on="True")
    both = {"fails_and_a_thread_too": ("failed", "in_a_thread()\nself.fail('as expected')")}
    for expected in (
        class_of("TestExpected", "Limited", EXPECTED, on="True"),
        *(class_of(f"TestExpected{base}", base, both, on="True") for base in ("Standing", "Threads")),
    ):
        text += f"\n\n@unittest.expectedFailure\n{expected.lstrip()}"
    return text


# Files of one name in two folders, which are not taken for each other.
OF_ONE_NAME = {
    f"{folder}/test_same.py": class_of("TestSame", "unittest.TestCase", {"folder": (end, statement)}, on="True")
    for folder, end, statement in (
        ("one", "passed", "pass"),
        ("other", "failed: not the same", "raise_('not the same')"),
    )
}


def test_each_body_ends_as_its_row_states(tmp_path):
    files = {"test_suite.py": source(), "test_module.py": MODULE, **OF_ONE_NAME}
    path = os.pathsep.join([str(tmp_path / "other"), str(CHECKOUT)])  # as of a runner started in the second folder
    check_rows(tmp_path, files, extra={"TORCH_EXT_HANG_AFTER": "4", "PYTHONPATH": path}, deadline_s=200)


def test_unittest_and_pytest_pass_no_invalid_body(tmp_path):
    evading = [f"TestEvades_{name}_Starts" for name in EVADES]
    killed = "TestExpected.test_is_killed"  # no test may expect a kill, and no runner judges again
    with suite_of(tmp_path, source()) as suite:
        found = suite.run_unittest("TestUnrun", "TestAsked", killed, *evading)
        assert "setUpClass() of Base is `async def`" in found.err and found.code == 1, found
        assert len(re.findall("ended without waiting for them", found.err)) >= len(EVADES), found
        assert len(re.findall("^(?:ERROR|FAIL): test_", found.err, re.MULTILINE)) >= len(EVADES) - 1 + 3, found
        evading.remove("TestEvades_overrides_run_Starts")  # pytest reports no failure for it
        names = ["TestUnrun", killed.replace(".", " and "), *evading]
        found = suite.run_pytest("-k", " or ".join(names))
        assert found.code == 1 and not re.search(" passed| xfailed", found.out.splitlines()[-1]), found
        assert found.status["test_is_killed"] == "failed", found
