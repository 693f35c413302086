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
