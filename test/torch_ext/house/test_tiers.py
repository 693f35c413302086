"""Which rows ``.ci/run`` draws, and whether the nightly run reaches all that it leaves out."""

import runpy
from dataclasses import dataclass

import pytest

from test.torch_ext import tiers
from test.torch_ext.house.source import CHECKOUT


@dataclass(frozen=True)
class Item:
    nodeid: str
    rows: int | None

    def get_closest_marker(self, name):
        return getattr(pytest.mark, name)(self.rows).mark if name == "rows" and self.rows else None


ITEMS = [
    *(Item(f"test_a.py::test_marked[{row}]", 2) for row in range(6)),
    *(Item(f"test_a.py::test_plain[{row}]", None) for row in range(3)),
    *(Item(f"test_b.py::test_marked[{row}]", 3) for row in "yzx"),
]


def test_a_seed_draws_as_many_rows_as_marked_the_same_in_any_order_and_seeds_together_all():
    drawn, left = tiers.draw_rows(ITEMS, "7")
    assert sum("a.py::test_marked" in item.nodeid for item in drawn) == 2
    assert drawn == [item for item in ITEMS if item in drawn] and {*ITEMS[6:9]} <= {*drawn}
    assert sorted(drawn + left, key=ITEMS.index) == ITEMS
    assert {*tiers.draw_rows(ITEMS[::-1], "7")[0]} == {*drawn}
    assert {item for seed in range(40) for item in tiers.draw_rows(ITEMS, seed)[0]} == {*ITEMS}


def test_the_nightly_run_reaches_every_test_that_is_marked_long():
    steps = [step for part in runpy.run_path(str(CHECKOUT / ".ci" / "nightly"))["PARTS"].values() for step in part]
    reached = {CHECKOUT / word for step in steps if " --long " in step for word in step.split() if word[:5] == "test/"}
    files = [path for path in (CHECKOUT / "test" / "torch_ext").rglob("test_*.py") if ".mark.long" in path.read_text()]
    assert len(files) > 20 and [file for file in files if not reached & {file, *file.parents}] == []
