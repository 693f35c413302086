"""Which tests ``.ci/run`` draws, and whether the nightly run reaches all that it leaves out."""

import runpy
from dataclasses import dataclass

import pytest

from test.torch_ext import tiers
from test.torch_ext.house.source import CHECKOUT


@dataclass(eq=False)
class Item:
    nodeid: str
    mark: pytest.Mark | None = None

    def get_closest_marker(self, name):
        return self.mark if self.mark and self.mark.name == name else None


TWO, THREE, OTHER_TWO = (pytest.mark.drawn(n).mark for n in (2, 3, 2))
COSTLY = [pytest.mark.costly.with_args().mark for _ in range(13)]
ITEMS = [
    *(Item(f"test_a.py::test_marked[{row}]", TWO) for row in range(4)),
    *(Item(f"test_a.py::test_{name}", TWO) for name in ("shares", "too")),
    *(Item(f"test_a.py::test_plain[{row}]") for row in range(3)),
    *(Item(f"test_b.py::test_marked[{row}]", THREE) for row in "yzx"),
    *(Item(f"test_b.py::test_other[{row}]", OTHER_TWO) for row in range(5)),
    *(
        Item(f"test_c.py::test_{number}[{row}]", mark)
        for number, mark in enumerate(COSTLY)
        for row in range(1 + number)
    ),
]


def test_a_seed_draws_as_many_as_marked_the_same_in_any_order_and_seeds_together_all():
    drawn, left = tiers.draw(ITEMS, "7")
    assert [sum(item.mark is mark for item in drawn) for mark in (None, TWO, THREE, OTHER_TWO)] == [3, 2, 3, 2]
    assert drawn == [item for item in ITEMS if item in drawn] and sorted(drawn + left, key=ITEMS.index) == ITEMS
    assert {*tiers.draw(ITEMS[::-1], "7")[0]} == {*drawn}
    assert {item for seed in range(60) for item in tiers.draw(ITEMS, seed)[0]} == {*ITEMS}


def test_a_twelfth_of_the_costly_marks_is_drawn_each_with_all_of_its_tests_and_as_often_as_another():
    draws = [tiers.draw(ITEMS, seed)[0] for seed in range(300)]
    counts = [[sum(item.mark is mark for item in draw) for mark in COSTLY] for draw in draws]
    assert all(sorted(count > 0 for count in each) == [False] * 11 + [True] * 2 for each in counts)
    assert all(count in (0, size) for each in counts for size, count in enumerate(each, 1))
    # Of 300 draws, 2 in 13 are 46, and five standard deviations 31.
    assert all(15 <= sum(count > 0 for count in column) <= 77 for column in zip(*counts, strict=True))


def test_the_nightly_run_reaches_every_test_that_is_marked_long():
    steps = [step for part in runpy.run_path(str(CHECKOUT / ".ci" / "nightly"))["PARTS"].values() for step in part]
    reached = {CHECKOUT / word for step in steps if " --long " in step for word in step.split() if word[:5] == "test/"}
    files = [path for path in (CHECKOUT / "test" / "torch_ext").rglob("test_*.py") if ".mark.long" in path.read_text()]
    assert any(step.endswith("run_test.py -q") for step in steps)  # all suites, of which a commit draws half
    assert len(files) > 20 and [file for file in files if not reached & {file, *file.parents}] == []
