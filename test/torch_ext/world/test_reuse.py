"""``--reuse class``: ranks serve the tests of a class until one fails, and a failure costs its own test alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.torch_ext.world.suites import Suite

SOURCE = """
from torch_ext.testing._internal.common_fsdp import FSDPTest

FOUND = []


def note(case):
    FOUND.append(case._testMethodName)
    with open(os.path.join(os.path.dirname(__file__), f"{case._testMethodName}_{case.rank}"), "w") as stream:
        stream.write(f"{os.getpid()} {len(FOUND)}")


class TestA(Case):
    def test_1(self):
        note(self)
        self.check()

    def test_2_has_a_group_of_its_own(self):
        note(self)
        self.check()

    def test_3_skips(self):
        note(self)
        self.join_group()
        self.skipTest("no reason")

    def test_4_fails(self):
        note(self)
        self.assertFalse(dist.is_initialized())
        if self.rank == 1:
            raise ValueError("this is rank 1")
        self.check()

    def test_5(self):
        note(self)
        self.check()

    def test_6_dies(self):
        note(self)
        os.kill(os.getpid(), 9)

    def test_7(self):
        note(self)
        self.check()


class TestF(FSDPTest):
    world_size = 2

    def test_8(self):
        note(self)
        type(self).group = dist.group.WORLD

    def test_9_has_the_group_of_the_one_before(self):
        note(self)
        reuses = os.environ.get("TORCH_EXT_REUSE") == "class"
        assert (getattr(type(self), "group", None) is dist.group.WORLD) == reuses
        new = dist.new_group()
        dist.barrier(new)
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path, SOURCE)


def ranks(suite: Suite) -> dict[str, tuple[str, int]]:
    """For each test the pid of its rank 0, and as how manieth it ran there."""
    found = {}
    for path in suite.folder.glob("test_[1-9]*_0"):
        pid, number = path.read_text().split()
        found[path.name.split("_")[1]] = (pid, int(number))
    return found


def test_ranks_serve_all_tests_until_one_fails(suite: Suite) -> None:
    run = suite.run("--reuse", "class")
    assert run.code == 1
    failed = {name for name, status in run.status.items() if status == "failed"}
    assert failed == {"test_4_fails", "test_6_dies"} and len(run.status) == 9, run
    assert "this is rank 1" in run.text["test_4_fails"] and "SIGKILL" in run.text["test_6_dies"]
    found = ranks(suite)
    assert [found[name][1] for name in "123456789"] == [1, 2, 3, 4, 1, 2, 1, 1, 2]
    assert len({found[name][0] for name in "1234"}) == 1 and len({found[name][0] for name in "4578"}) == 4
    assert suite.survivors() == {} and suite.files_left() == []


def test_without_it_every_test_has_ranks_of_its_own(suite: Suite) -> None:
    run = suite.run("-k", "test_1 or test_2 or test_8 or test_9")
    assert run.code == 0, run
    assert [found[1] for found in ranks(suite).values()] == [1, 1, 1, 1]


BRIEF = """
class TestBrief(Case):
    pass


for number in range(40):
    setattr(TestBrief, f"test_{number}", lambda self: self.join_group())
"""


def test_no_rank_ends_a_group_that_another_one_is_still_making(tmp_path: Path) -> None:
    """Without a collective, nothing else keeps them together."""
    run = Suite(tmp_path, BRIEF).run("--reuse", "class")
    assert run.code == 0 and list(run.status.values()) == ["passed"] * 40, run


POLLUTED = """
STATE = {}


class TestA(Case):
    def test_1_pollutes(self):
        STATE["dirty"] = True

    def test_2_is_harmless(self):
        pass

    def test_3_is_a_victim(self):
        self.assertNotIn("dirty", STATE)

    def test_4_is_harmless_too(self):
        pass


class TestB(Case):
    def test_5(self):
        self.check()

    def test_6(self):
        self.check()
"""


def test_the_audit_names_polluter_and_victim(tmp_path: Path) -> None:
    suite = Suite(tmp_path, POLLUTED)
    run = suite.run("--audit-order", "--timeout", "60")
    assert run.code == 1, run
    name = "test_suite.py::TestA::"
    assert f"victim    {name}test_3_is_a_victim\n" in run.out, run
    assert f"passes on fresh ranks and fails after this:\npolluter  {name}test_1_pollutes\n" in run.out
    rerun = f"-j 1 --reuse class -i {name}test_1_pollutes {name}test_3_is_a_victim --root "
    assert rerun in run.out and " --timeout 60\n" in run.out
    assert "1 of 6 tests depend on the tests before them" in run.out
    assert suite.survivors() == {} and suite.files_left() == []


def test_the_audit_of_independent_tests_finds_nothing(tmp_path: Path) -> None:
    run = Suite(tmp_path, POLLUTED).run("--audit-order", "-i", "TestB")
    assert run.code == 0 and "3 runs: 0 of 2 tests depend on the tests before them" in run.out, run
