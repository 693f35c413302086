"""Every start of ranks is judged once, every part that fails is told, and limits that are none are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from test.torch_ext.verdict.programs import Programs, first_line, named_first, programs
from test.torch_ext.world.suites import Run

# How a class evades the harness, as a body of the class.
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
IN_THREADS = ("bare", "hook_put_back", "hook_of_import_put_back")
REFUSED = ("float('nan')", "0", "-1", "float('inf')", "True", "'60'")
SOURCE = (
    """
import _thread

HOOK = threading.excepthook


class Starts(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        if not hasattr(self, "_world"):
            super().setUp()
        self._spawn_processes()


def raise_():
    raise ValueError("in a thread")


def join(thread):
    thread.start()
    thread.join()


class InThreads:
    def bare(self):
        if self.rank == 1:
            _thread.start_new_thread(raise_, ())
            time.sleep(0.3)

    def hook_put_back(self):
        if self.rank == 1:
            threading.excepthook = threading.__excepthook__
            join(threading.Thread(target=raise_))

    def hook_of_import_put_back(self):
        if self.rank == 1:
            threading.excepthook = HOOK
            join(threading.Thread(target=raise_))


class TestParts(Ranks):
    def test_sub_tests(self):
        for x in range(4):
            with self.subTest("case", x=x):
                if x == 0:
                    self.skipTest("none")
                self.assertFalse(x == 1 or x + self.rank == 3, f"x is {x}")

    def test_ranks_skip_different_ones(self):
        for x in range(2):
            with self.subTest(x=x):
                if x == self.rank:
                    self.skipTest("not here")

    def test_sub_test_fails_before_a_hang(self):
        self.join_group()
        with self.subTest(x=1):
            if self.rank == 1:
                raise ValueError("the cause")
            dist.barrier()
        self.rank == 1 and dist.barrier()

    @unittest.expectedFailure
    def test_class_cleanup_fails_after_an_expected_failure(self):
        type(self).addClassCleanup(raise_)
        self.fail("as expected")


@unittest.expectedFailure
class TestExpected(Threads):
    def test_cleanup_fails_after_an_expected_failure(self):
        self.addCleanup(sys.exit, 3)
        self.fail("as expected")
"""
    + "".join(
        f"\n\nclass TestThreads_{base}(InThreads, {base}):\n"
        + "".join(
            f"    test_{name} = InThreads.{name}\n" for name in ("bare", "hook_put_back", "hook_of_import_put_back")
        )
        for base in ("Ranks", "Threads", "Standing")
    )
    + "".join(
        f"""

class TestEvades_{name}_{base}({base}):
    Base = {base}

    def own(self):
        pass

    def test_it(self):
        self.fail("it ran")

    {body}
"""
        for name, body in EVADES.items()
        for base in ("Starts", "Threads", "Standing")
        if (name, base) not in (("starts_twice", "Standing"), ("starts_twice", "Threads"))
    )
    + "".join(
        f"""

class TestRefused_{attribute}({base}):
    {attribute} = property(lambda self: ({", ".join(REFUSED)})[int(self._testMethodName[-1])])
"""
        + "".join(f"\n    def test_{number}(self):\n        pass\n" for number in range(len(REFUSED)))
        for attribute, base in (("timeout", "Ranks"), ("world_size", "Threads"))
    )
)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("judged"), SOURCE) as suite:
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    return suite.finish(suite.start_runner("--timeout", "20", "-k", "not TestRefused"), deadline_s=300)


def text_of(run: Run, cls: str, method: str = "test_it") -> str:
    """Return the report of a failed test; empty if it did not fail."""
    found = re.search(rf"^FAILED \S+::{cls}::{method}  [\d.]+ s\n(.*?)^rerun: ", run.out, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


@pytest.mark.parametrize("base", ["Starts", "Threads", "Standing"])
@pytest.mark.parametrize("name", EVADES)
def test_ranks_that_nobody_waits_for_fail_the_test(run: Run, name: str, base: str) -> None:
    if f"TestEvades_{name}_{base}" in SOURCE:
        assert "ran and nobody asked what became of them" in text_of(run, f"TestEvades_{name}_{base}"), run


def test_unittest_and_pytest_do_not_pass_them_either(suite: Programs) -> None:
    classes = [f"TestEvades_{name}_Starts" for name in EVADES if name != "overrides_run"]
    found = suite.run_unittest(*classes)
    assert len(re.findall("^(?:ERROR|FAIL): test_it", found.err, re.MULTILINE)) >= len(classes), found
    assert found.code == 1
    found = suite.run_unittest("TestEvades_overrides_run_Starts")
    assert "nobody asked" in found.err and found.code == 1, found
    found = suite.run_pytest("-k", " or ".join(classes))
    assert found.code == 1 and " passed" not in found.out.splitlines()[-1], found


@pytest.mark.parametrize("base", ["Ranks", "Threads", "Standing"])
@pytest.mark.parametrize("name", IN_THREADS)
def test_thread_that_fails_fails_the_test(run: Run, name: str, base: str) -> None:
    text = text_of(run, f"TestThreads_{base}", f"test_{name}")
    assert "ValueError: in a thread" in text, run
    assert named_first(text) == {1} or (base, name) == ("Threads", "bare"), text  # nobody knows whose thread that was


def test_each_sub_test_that_failed_is_listed_with_its_ranks(run: Run) -> None:
    text = text_of(run, "TestParts", "test_sub_tests")
    listed = "    [case] (x=1) on ranks 0, 1\n    [case] (x=3) on rank 0\n    [case] (x=2) on rank 1\n"
    assert f"Sub-tests that failed:\n{listed}" in text, text
    assert all(f"x is {x}" in text for x in (1, 2, 3)), text


def test_ranks_that_skip_different_sub_tests_disagree(run: Run) -> None:
    text = text_of(run, "TestParts", "test_ranks_skip_different_ones")
    assert "rank 0 skipped sub-test (x=0) (not here), and rank 1 did not: make the condition" in first_line(text)


def test_sub_test_that_failed_before_a_hang_is_told(run: Run) -> None:
    text = text_of(run, "TestParts", "test_sub_test_fails_before_a_hang")
    assert "sub-test (x=1) failed: ValueError: the cause" in text or "Sub-tests that failed:\n    (x=1)" in text, text


@pytest.mark.parametrize("name", ["class_cleanup", "cleanup"])
def test_cleanup_that_fails_is_no_expected_failure(run: Run, name: str) -> None:
    assert run.status[f"test_{name}_fails_after_an_expected_failure"] == "failed", run


@pytest.fixture(scope="module")
def refused(suite: Programs) -> Run:
    return suite.finish(suite.start_runner("-k", "TestRefused"), deadline_s=300)


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=REFUSED)
def test_limits_and_world_sizes_that_are_none_are_refused(refused: Run, number: int) -> None:
    text = text_of(refused, "TestRefused_timeout", f"test_{number}")
    assert f"is {eval(REFUSED[number])!r}; expected a finite number of seconds above 0" in text, refused
    if REFUSED[number] == "0":  # as many ranks as a machine without devices has devices
        assert f"TestRefused_world_size::test_{number}  skipped" in refused.out, refused
    else:
        text = text_of(refused, "TestRefused_world_size", f"test_{number}")
        assert "expected the number of ranks as an int" in text, refused
