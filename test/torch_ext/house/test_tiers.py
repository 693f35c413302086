"""Which rows ``.ci/run`` draws."""

from dataclasses import dataclass

import pytest

from test.torch_ext import tiers


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


def test_as_many_rows_as_marked_are_drawn_from_each_test_and_nothing_from_others():
    drawn, left = tiers.draw_rows(ITEMS, "seed")
    assert sum("a.py::test_marked" in item.nodeid for item in drawn) == 2
    assert all(item in drawn for item in ITEMS[6:])
    assert drawn == [item for item in ITEMS if item in drawn]
    assert sorted(drawn + left, key=ITEMS.index) == ITEMS


def test_a_seed_draws_the_same_rows_in_any_order_and_seeds_together_draw_all():
    assert set(tiers.draw_rows(ITEMS[::-1], "7")[0]) == set(tiers.draw_rows(ITEMS, "7")[0])
    assert {item for seed in range(40) for item in tiers.draw_rows(ITEMS, seed)[0]} == {*ITEMS}
