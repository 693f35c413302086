"""Which class runs when: the queue and the slots, under a clock that jumps."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from benchmarks.simulate import lower_bound, makespan, simulate
from test.torch_ext.runner.fakes import file
from torch_ext.results import Needs, TestName
from torch_ext.runner.places import Machine
from torch_ext.runner.schedule import Batch, Plan, Queue, make_plan, slots_of
from torch_ext.world.protocol import Devices

# The classes of all suites in a recorded run on two cores: seconds, ranks, number of the file.
RECORDED = [
    (1.3, 4, 0), (1.1, 4, 0), (2.5, 4, 1), (0.5, 4, 1), (0.2, 4, 1), (1.5, 4, 2), (2.2, 4, 2), (0.7, 4, 2),
    (0.4, 4, 2), (9.4, 2, 3), (5.8, 4, 4), (2.1, 4, 4), (4.8, 2, 4), (1.9, 1, 4), (9.2, 4, 4), (0.8, 4, 5),
    (0.8, 4, 5), (0.3, 4, 5), (1.6, 4, 5), (1.2, 2, 6), (0.9, 2, 7), (1.2, 2, 7), (8.0, 4, 8), (5.7, 4, 8),
    (12.5, 4, 8), (2.0, 4, 9), (3.0, 4, 9), (1.7, 4, 10), (7.2, 4, 10), (8.3, 4, 10), (3.9, 4, 10), (4.9, 4, 10),
    (0.7, 4, 10), (0.8, 4, 10), (0.2, 4, 11), (0.2, 4, 11), (1.1, 4, 11), (0.4, 4, 11), (0.1, 2, 12), (1.2, 2, 12),
    (0.7, 2, 12), (0.2, 2, 12), (9.5, 2, 12), (0.8, 4, 12), (8.5, 2, 13), (0.5, 2, 14), (0.3, 2, 15), (0.4, 2, 15),
    (0.6, 2, 15), (0.6, 2, 15), (2.0, 2, 15), (3.2, 2, 15), (0.8, 1, 15), (0.4, 2, 16), (9.6, 2, 17), (5.6, 4, 17),
    (1.1, 2, 18), (1.7, 2, 18), (5.0, 4, 19), (4.1, 4, 19), (30.9, 2, 20), (0.4, 4, 20), (1.6, 2, 21), (0.6, 2, 21),
    (12.9, 2, 22), (0.7, 2, 22), (0.5, 1, 22), (2.9, 3, 23), (40.8, 3, 23), (1.1, 2, 24), (2.6, 3, 25), (0.7, 4, 25),
    (0.2, 2, 25), (3.1, 4, 25), (3.6, 6, 25), (8.3, 3, 25), (6.3, 3, 25), (1.9, 3, 25), (9.2, 3, 25), (3.3, 2, 25),
    (8.3, 2, 25), (4.5, 3, 25), (2.3, 2, 25), (0.8, 3, 25),
]  # fmt: skip


def plan(classes, alone=(), copies=1):
    return Plan(
        tuple(
            Batch(file(f"f{where}"), f"C{number}_{copy}", (), Needs(processes=ranks, alone=number in alone), seconds)
            for number, (seconds, ranks, where) in enumerate(classes)
            for copy in range(copies)
        )
    )


def most_at_once(spans):
    return max(sum(span.begun_s <= each.begun_s < span.ended_s for span in spans) for each in spans)


@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize("copies", [1, 8])
def test_packed_stays_within_a_tenth_of_the_lower_bound(slots, copies):
    recorded = plan(RECORDED, alone=(67, 68), copies=copies)
    assert makespan(recorded, slots) <= 1.1 * lower_bound(recorded, slots)


@pytest.mark.parametrize(("at_once", "in_order"), [(1, True), (3, False), (64, False)])
@pytest.mark.parametrize("slots", [1, 5, 8])
def test_every_class_runs_once_and_no_slot_is_given_twice(at_once, in_order, slots):
    recorded = plan(RECORDED, alone=(4, 68))
    spans = simulate(recorded, slots, at_once, in_order=in_order)
    assert len(spans) == len(recorded.batches) and {span.batch for span in spans} == set(recorded.batches)
    for span in spans:
        assert len(span.slots) == slots_of(span.batch.need, slots)
        for other in spans:
            if other is not span and other.begun_s < span.ended_s and span.begun_s < other.ended_s:
                assert not {*span.slots} & {*other.slots}
                assert not span.batch.need.alone


def test_serial_keeps_the_order_of_the_plan_and_concurrent_classes_stay_below_the_limit():
    recorded = plan(RECORDED)
    spans = simulate(recorded, 64, 1, in_order=True)
    assert [span.batch for span in spans] == list(recorded.batches) and most_at_once(spans) == 1
    assert makespan(recorded, 64, 1, in_order=True) == pytest.approx(sum(batch.expected_s for batch in recorded))
    assert most_at_once(simulate(recorded, 64, 3)) == 3


def test_longest_class_starts_first_and_oversized_class_waits():
    spans = simulate(plan([(1, 2, 0), (5, 3, 0), (4, 2, 0), (2, 1, 0)]), 4, 9)
    assert [(span.batch.cls, span.begun_s) for span in spans] == [
        ("C1_0", 0), ("C3_0", 0), ("C2_0", 5), ("C0_0", 5)
    ]  # fmt: skip


def test_the_last_class_of_a_file_says_so():
    queue = Queue(plan([(1, 1, 0), (1, 1, 1), (1, 1, 0)]), 4, 4)
    first, other, last = (queue.start(), queue.start(), queue.start())
    assert first is not None and other is not None and last is not None and queue.start() is None
    assert [queue.ended(batch) for batch in (first, other, last)] == [False, True, True] and queue.over


def test_a_class_needs_what_the_most_demanding_of_its_tests_needs():
    tests = [TestName("a.py", "A", "1"), TestName("a.py", "A", "2"), TestName("a.py", "B", "1")]
    needs = {tests[0]: Needs(4, 4, 0), tests[1]: Needs(2, 2, 0, alone=True), tests[2]: Needs(4, 1, 0)}
    made = make_plan([file("a")], tests, needs, lambda test: 2.0)
    assert [(batch.need, batch.expected_s) for batch in made] == [(Needs(processes=4, alone=True), 4.0), (Needs(), 2.0)]


@pytest.mark.parametrize("length", [20, 55, 90])
def test_two_classes_never_share_a_temporary_folder(length, monkeypatch):
    """A folder whose path is too long for the address of a socket is reached by a shorter one."""
    base = tempfile.mkdtemp(dir="/tmp", prefix="t")
    try:
        parent = os.path.join(base, "x" * (length - len(base) - 1))
        os.mkdir(parent)
        monkeypatch.setattr(tempfile, "tempdir", parent)
        machine = Machine(os.path.join(parent, "torch_ext-12345678"), {}, Devices(0, ""))
        with machine.place([0], packed=True) as first, machine.place([1], packed=True) as second:
            folders = [place.environment["TMPDIR"] for place in (first, second)]
            for name, folder in enumerate(folders):
                Path(folder, str(name)).touch()
            assert [os.listdir(folder) for folder in folders] == [["0"], ["1"]]
            assert length > 73 or all(len(folder) <= 73 for folder in folders)
        assert not any(os.path.exists(folder) for folder in folders)
    finally:
        shutil.rmtree(base)


def test_classes_of_a_file_and_tests_of_a_class_stand_together():
    order = ["b A 1", "a B 2", "b C 1", "a A 1", "b A 2", "a B 1", "b A 1"]
    tests = [TestName(f"{name}.py", cls, method) for name, cls, method in map(str.split, order)]
    files = [file("a"), file("b"), file("empty")]
    made = make_plan(files, tests)
    assert [(batch.file, batch.cls) for batch in made] == [
        (files[0], "B"), (files[0], "A"), (files[1], "A"), (files[1], "C")
    ]  # fmt: skip
    expected = ["a.py::B::2", "a.py::B::1", "a.py::A::1", "b.py::A::1", "b.py::A::2", "b.py::C::1"]
    assert [test.id for test in made.tests] == expected


def test_a_test_of_an_unknown_file_is_not_dropped_in_silence():
    with pytest.raises(AssertionError, match=r"a\.py::A::test"):
        make_plan([file("b")], [TestName("a.py", "A", "test")])
