"""Bodies that a plain call does not run: what unittest runs is run, the rest is refused in words. None passes unrun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.torch_ext.verdict.programs import BASES, Programs, programs
from test.torch_ext.world.suites import Run

# Kinds of bodies that pass unseen where their call is all that happens.
KINDS = {
    "coroutine_function": "async def {name}(self):\n        self.fail('it ran')",
    "generator_function": "def {name}(self):\n        self.fail('it ran')\n        yield",
    "async_generator": "async def {name}(self):\n        self.fail('it ran')\n        yield",
    "returned_coroutine": "def {name}(self):\n        return go(self)",
    "decorated_coroutine": "@decorated\n    async def {name}(self):\n        self.fail('it ran')",
}
WORDS = ("async", "coroutine", "generator", "await")

SOURCE = """
import asyncio, functools
from torch_ext.testing._internal.common_fsdp import FSDPTest, FSDPTestContinuous, FSDPTestMultiThread


async def go(case):
    case.fail("it ran")


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper


class TestUnittestsOwn(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.was_set_up = True

    async def test_own_passes(self):
        await asyncio.sleep(0)
        self.assertTrue(self.was_set_up)

    async def test_own_fails(self):
        await asyncio.sleep(0)
        self.fail("it ran to its end")


@spawn_threads_and_init_comms(world_size=2)
async def in_threads(self):
    self.fail("it ran")


class TestSpawnedThreads(TestCase):
    test_spawned_threads = in_threads
""" + "".join(
    f"""
class Test_{base}({written}):
    world_size = 2
"""
    + "".join(f"\n    {body.format(name=f'test_{base}_{kind}')}\n" for kind, body in KINDS.items())
    for base, written in BASES.items()
)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("bodies"), SOURCE) as suite:
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    return suite.run()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_a_body_that_a_call_does_not_run_is_refused_in_words(run: Run, base: str, kind: str) -> None:
    name = f"test_{base}_{kind}"
    assert run.status.get(name) == "failed", run
    assert any(word in run.text[name] for word in WORDS), run.text[name]


def test_a_coroutine_in_spawned_threads_is_refused(run: Run) -> None:
    assert run.status.get("test_spawned_threads") == "failed", run


def test_what_unittest_runs_is_run(run: Run) -> None:
    assert run.status.get("test_own_passes") == "passed", run
    assert "it ran to its end" in run.text["test_own_fails"]


def test_no_body_passes_unrun(run: Run, suite: Programs) -> None:
    number = len(KINDS) * len(BASES) + 2
    assert run.out.splitlines()[-1] == f"1 passed, {number} failed, 0 skipped", run
    assert run.code == 1
    suite.assert_nothing_left()


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_other_runners_do_not_pass_it_either(suite: Programs, runner: str) -> None:
    if runner == "unittest":
        run = suite.run_unittest("Test_MultiProcessTestCase")
    else:
        run = suite.run_pytest("-k", "Test_MultiProcessTestCase")
    assert sorted(run.status.values()) == ["failed"] * len(KINDS), run


FIXTURES = """
async def go():
    raise AssertionError("it ran")


class TestIsolated(unittest.IsolatedAsyncioTestCase):
    @classmethod
    async def setUpClass(cls):
        pass

    async def test_isolated(self):
        pass


class TestPlain(unittest.TestCase):
    @classmethod
    async def tearDownClass(cls):
        pass

    def test_plain(self):
        pass


class Base(Standing):
    @classmethod
    async def setUpClass(cls):
        pass


class TestDerived(Base):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()

    def test_derived(self):
        pass


class TestSetUp(Threads):
    async def setUp(self):
        pass

    def test_set_up(self):
        pass


class TestGenerator(Ranks):
    def tearDown(self):
        yield

    def test_generator(self):
        pass


class TestClassCleanup(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.addClassCleanup(go)

    def test_class_cleanup(self):
        pass


class TestCleanups(unittest.TestCase):
    def test_cleanup(self):
        self.addCleanup(go)


class TestCleanupsOfRanks(Ranks):
    def test_cleanup_of_ranks(self):
        self.addCleanup(go)


class TestAwaited(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.addAsyncCleanup(self.leave)

    async def leave(self):
        note("awaited")

    async def test_awaited(self):
        pass
"""
MODULE = """
async def setUpModule():
    pass


class TestOfModule(unittest.TestCase):
    def test_of_module(self):
        pass
"""


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Programs, Run]]:
    with programs(tmp_path_factory.mktemp("fixtures"), FIXTURES, "test_fixtures.py") as suite:
        suite.add("test_module.py", MODULE)
        yield suite, suite.run()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("TestIsolated", "setUpClass() of TestIsolated is `async def`"),
        ("TestPlain", "tearDownClass() of TestPlain is `async def`"),
        ("TestDerived", "setUpClass() of Base is `async def`"),
        ("TestSetUp", "setUp() of TestSetUp is `async def`"),
        ("TestGenerator", "tearDown() of TestGenerator is a generator function"),
        ("TestClassCleanup", "the cleanup go() returned a coroutine"),
        ("test_cleanup", "the cleanup go() returned a coroutine"),
        ("test_cleanup_of_ranks", "the cleanup go() returned a coroutine"),
        ("TestOfModule", "setUpModule() returned a coroutine"),
    ],
)
def test_fixture_that_a_call_does_not_run_is_refused_in_words(
    fixtures: tuple[Programs, Run], where: str, words: str
) -> None:
    assert fixtures[1].status[where] == "failed", fixtures[1]
    assert words in fixtures[1].text[where], fixtures[1]


def test_cleanup_that_unittest_awaits_is_awaited(fixtures: tuple[Programs, Run]) -> None:
    suite, run = fixtures
    assert run.status["test_awaited"] == "passed", run
    assert (suite.folder / "awaited").exists()


def test_other_runners_refuse_fixtures_of_ranks_too(fixtures: tuple[Programs, Run]) -> None:
    run = fixtures[0].run_unittest("TestDerived")
    assert "setUpClass() of Base is `async def`" in run.err, run
    assert run.code == 1
