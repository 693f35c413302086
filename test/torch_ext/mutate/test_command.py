"""``torch_ext mutate`` on a package of a few lines and its suite, in ranks and without."""

import html
import json
import re
from types import SimpleNamespace

import pytest

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.interpreter import python
from torch_ext.mutate.diagnosis import diagnoses, diagnosis
from torch_ext.mutate.report import assertions
from torch_ext.results import TestName

COSTLY = pytest.mark.costly  # one mark: these tests share a run
PACKAGE = """\
import torch
import torch.distributed as dist


def total(tensor):
    dist.all_reduce(tensor)
    return tensor


def limit(value):
    if value < 3:
        return value
    return 3


def unchecked(value):
    return value + 1


def never(value):
    return value + 1


def late(value):
    return value + 1


def spin(number):
    while number:
        number -= 1


def in_a_thread_of_autograd(value):
    return value * 2


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return in_a_thread_of_autograd(gradient)
"""
SUITE = """\
import os
import unittest

import torch
import torch.distributed as dist

import toy.ops
from torch_ext.testing._internal.common_distributed import DistributedTestBase

NOTE = os.path.join(os.path.dirname(__file__), "note")


class TestRanks(DistributedTestBase):
    world_size = 2

    def test_total(self):
        self.create_pg("cpu")
        self.assertEqual(toy.ops.total(torch.ones(2)), 2 * torch.ones(2), msg="no\\n" * 1500 + "the sum over all ranks")

    def test_gradient(self):
        value = torch.ones(1, requires_grad=True)
        toy.ops.Twice.apply(value).sum().backward()
        self.assertEqual(value.grad, 2 * torch.ones(1))

    def test_spin(self):
        toy.ops.spin(3)


class TestPlain(unittest.TestCase):
    def test_limit(self):
        self.assertEqual([toy.ops.limit(value) for value in (2, 5)], [2, 3])

    def test_unchecked(self):
        toy.ops.unchecked(1)
        with open(NOTE + "2", "a") as stream:
            stream.write("x")

    def test_first_run_alone_passes(self):
        toy.ops.unchecked(1)
        with open(NOTE, "a") as stream:
            stream.write("x")
        self.assertLess(os.path.getsize(NOTE), 2)

    def test_first_two_runs_fail(self):
        self.assertEqual(toy.ops.late(1), 2)
        with open(NOTE + "3", "a") as stream:
            stream.write("x")
        self.assertGreater(os.path.getsize(NOTE + "3"), 2)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    for name, text in {"toy/__init__.py": "", "toy/ops.py": PACKAGE, "tests/test_toy.py": SUITE}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def mutate(toy, *arguments):
    report, more = toy / "report.json", {"TORCH_EXT_CACHE": str(toy / "cache"), "PYTHONPATH": f"{CHECKOUT}:{toy}"}
    report.unlink(missing_ok=True)
    command = ("-m", "torch_ext", "mutate", *arguments, "--root", toy / "tests", "--device", "cpu", "--json", report)
    command += ("--html", toy / "report.html")
    ran = python(*command, **more)
    found = json.loads(report.read_text()) if report.exists() else {}
    by_place = {(one["id"].rpartition(":")[0], one["operator"]): one for one in found.get("mutants", ())}
    return ran, found, {(place.partition(":")[2], operator): one for (place, operator), one in by_place.items()}


OPERATORS = ("collective", "arithmetic", "boundary", "statement")


@pytest.fixture(scope="module")
def first(toy):
    return mutate(toy, "toy", "--operators", *OPERATORS)


@COSTLY
@pytest.mark.parametrize(
    ("place", "expected"),
    {
        ("total", "collective dropped"): "caught",
        ("limit", "boundary"): "survived",
        ("unchecked", "arithmetic"): "survived",
        ("never", "arithmetic"): "unreached",
        ("late", "arithmetic"): "unreached",  # its test fails: with marks in the functions, and without
        ("spin", "statement deleted"): "caught",  # by its time
        ("in_a_thread_of_autograd", "arithmetic"): "caught",
        ("Twice.forward", "arithmetic"): "survived",  # nothing reads its value
    }.items(),
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_each_mutant_has_the_result_that_its_tests_give(first, place, expected):
    ran, _, mutants = first
    assert ran.returncode == 0, ran.stderr
    assert mutants[place]["result"] == expected, mutants[place]


@COSTLY
def test_a_catch_has_its_test_and_its_failure(first):
    caught = first[2]["total", "collective dropped"]
    assert caught["test"] == "test_toy.py::TestRanks::test_total" and caught["ran"] == 1
    assert caught["says"].endswith("the sum over all ranks")
    assert "timed out at ops.py:29" in first[2]["spin", "statement deleted"]["says"]


@COSTLY
def test_what_survives_is_shown_with_the_tests_that_reach_it(first):
    ran, found, mutants = first
    reached_by = mutants["unchecked", "arithmetic"]["reached_by"]
    assert reached_by == ["test_toy.py::TestPlain::test_unchecked"]  # the other one is flaky
    shown = "+    return (value - 1)\ntests that reach it: 1, the quickest test_toy.py"
    assert f"-    return value + 1\n{shown}" in ran.stdout
    assert re.search(r"no test reaches it", ran.stdout)
    compared = "self.assertEqual([toy.ops.limit(value) for value in (2, 5)], [2, 3])"
    assert mutants["limit", "boundary"]["compared"] == [compared] and f"test_limit\n    {compared}\n" in ran.stdout
    number = len(mutants)
    assert found["caught"] + found["survived"] + found["unreached"] == number == len(found["mutants"])
    assert found["functions"]["toy.ops:never"] == [0, 1]


@COSTLY
def test_the_page_has_what_survives_as_text(toy, first):
    _, found, mutants = first
    text = (toy / "report.html").read_text()
    assert text.count("<details") == found["survived"] + found["unreached"] > 2
    assert html.escape(mutants["limit", "boundary"]["diff"], quote=False) in text and "&lt;" in text
    assert f"score {found['score']:.1%}" in text and "<td>0 of 1</td><td>toy.ops:never</td>" in text


@COSTLY
def test_a_second_run_goes_on_and_a_changed_function_runs_again(toy, first):
    note = toy / "tests/note2"
    before = len(note.read_text())
    again = mutate(toy, "toy", "--operators", *OPERATORS)[2]
    changed = {place: one["result"] for place, one in again.items() if one != first[2][place]}
    assert changed == {("late", "arithmetic"): "caught"}  # a test's failure is not kept, and now it passes
    assert len(note.read_text()) == before
    (toy / "toy/ops.py").write_text(PACKAGE.replace("return value + 1", "return value + 7", 1))
    ran, _, mutants = mutate(toy, "toy", "--operators", *OPERATORS)
    (toy / "toy/ops.py").write_text(PACKAGE)
    assert len(note.read_text()) == before + 2, ran.stderr  # once for its lines, once with the one new mutant
    assert "value - 7" in mutants["unchecked", "arithmetic"]["diff"]


def test_assertions_are_those_of_the_test_and_of_the_methods_that_it_mentions(tmp_path):
    (tmp_path / "test_a.py").write_text(
        """\
class Other:
    def _check(self):
        self.assertTrue("of the other class")

class TestA:
    def _check(self):
        with self.assertRaises(ValueError):
            self._again()

    def _again(self):
        self._check()
        optimizer.step()
        torch.testing.assert_close(one, two)
        self.check()

    def check(self):
        check_parity(self, 1)
        assert_close(3, 4)
        parity.check_shards()
        recheck()

    def step(self):
        assert "not mentioned"

    def test_a(self):
        self.run_subtests({}, self._check)
        assert 1

    def test_a_size(self):
        assert 2

    def test_none(self):
        pass
"""
    )
    expected = {"test_a_kind_x": ["assert 1", "self.assertRaises(ValueError)", "torch.testing.assert_close(one, two)"]}
    expected["test_a_kind_x"] += ["check_parity(self, 1)", "assert_close(3, 4)", "parity.check_shards()"]
    expected |= {"test_a_size_3": ["assert 2"], "test_a_sizes_3": [*expected["test_a_kind_x"]], "test_none": []}
    expected |= {"test_gone": []}
    for method, lines in expected.items():
        name, file = TestName("test_a.py", "TestA", method), SimpleNamespace(path=tmp_path / "test_a.py")
        assert [*assertions(SimpleNamespace(name=name, file=file))] == lines, method


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AssertionError: gradient of 0.weight differs", "named"),
        ("AssertionError: 3 is not 4\n  File of step_gradient", "unrelated"),
        ("RuntimeError: Connection reset by peer", "reset connection"),
    ],
)
def test_a_failure_about_the_same_subject_is_named(text, expected):
    mutant = mutant_of("Unit.finish", "-x.grad = None")
    assert diagnosis(mutant, text, "test_a.py::TestA::test_a") == expected


def test_a_rare_word_of_the_name_names_and_a_common_one_does_not():
    names = ["pack_quantized", "broadcast_stages", *(f"stage_{number}" for number in range(18))]
    tests = ["quantization", "the_stages", *("the_stages" for _ in range(18))]
    caught = [(mutant_of(name), "Error: no", f"a.py::T::test_{test}") for name, test in zip(names, tests, strict=True)]
    found, by_chance = diagnoses(caught)
    assert found == ["named", *["unrelated"] * 19]
    assert by_chance == 0.0
    assert diagnoses([(mutant_of("total"), "ops.py, in total", "test_a")] * 3) == (["named"] * 3, 1.0)
    assert diagnoses([]) == ([], 0.0)


def mutant_of(function, changed="-pass"):
    return SimpleNamespace(
        module="pack.ops", function=function, operator="cache not invalidated", diff=f"@@ a.py:1\n{changed}"
    )


@COSTLY
def test_equivalent_mutants_do_not_count_and_stale_entries_are_errors(toy, first):
    boundary = first[2]["limit", "boundary"]["id"]
    (toy / "known.json").write_text(json.dumps({boundary: "both return 3 for 3", "elsewhere:f:00": "not this package"}))
    ran, found, _ = mutate(
        toy, "toy:limit", "--operators", "boundary", "collective", "--equivalent", toy / "known.json"
    )
    assert (found["equivalent"], found["score"]) == (1, 0.0), ran.stderr
    (toy / "known.json").write_text(json.dumps({boundary[:-2]: "another function"}))
    ran, _, _ = mutate(toy, "toy", "--equivalent", toy / "known.json")
    assert ran.returncode == 2 and f"are none any more: {boundary[:-2]}" in ran.stderr


def test_a_sample_depends_on_its_seed_alone(toy):
    listed = [mutate(toy, "toy", "--list", "--sample", "6", "--seed", seed)[0].stdout for seed in ("1", "1", "2")]
    assert listed[0] == listed[1] != listed[2]
    assert listed[0].count("\n@@ ") == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("toy:no_such_*",), "no function fits"),
        (("toy.nothing",), "there is no toy.nothing"),
        (("toy", "--since", "HEAD"), "--since HEAD needs git"),
        (("toy", "--tests", "no_such_test"), "no_such_test"),
        (("toy", "--sample", "0"), "at least 1"),
    ],
)
def test_a_wrong_use_says_what_is_wrong(toy, arguments, says):
    ran, _, _ = mutate(toy, *arguments)
    assert ran.returncode == 2 and says in ran.stderr, ran.stderr
