"""The page in which a rank says what it waits for: its layout, and that ranks inherit it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.world.suites import Suite
from torch_ext.world.protocol import Wait
from torch_ext.world.wait_page import WaitPage

SOURCE = """
import mmap, struct


class TestPage(Case):
    timeout = 3

    def test_page(self):
        number = int(os.environ["TORCH_EXT_WAIT_PAGE"])
        page = mmap.mmap(number, 4096)
        struct.pack_into("=Q", page, 0, 1)
        text = b"2", b"all_reduce", b"model.py:7"
        struct.pack_into("=IiqQ64s40s200s", page, 64, 2, 1 - self.rank, 5, 9, *text)
        os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def page() -> Iterator[tuple[WaitPage, mmap.mmap]]:
    page = WaitPage()
    with mmap.mmap(page.descriptor, 4096) as memory:
        yield page, memory
    page.close()


def write(memory: mmap.mmap, number: int, *, lock: int = 2, peer: int = 1, since: int = 5, sequence: int = 9) -> None:
    struct.pack_into("=Q", memory, 0, 1)
    place = 64 + 504 * number
    struct.pack_into("=IiqQ64s40s200s", memory, place, lock, peer, since, sequence, b"2", b"all_reduce", b"model.py:7")


def test_a_page_that_nobody_has_written_says_nothing(page: tuple[WaitPage, mmap.mmap]) -> None:
    assert page[0].waits() == ()


def test_entries_are_read_in_the_order_of_their_age(page: tuple[WaitPage, mmap.mmap]) -> None:
    write(page[1], 0, since=8, peer=-1, sequence=0)
    write(page[1], 7, since=5, peer=3)
    assert page[0].waits() == (
        Wait("#9 all_reduce in group 2, called at model.py:7", (3,), transport=True),
        Wait("all_reduce in group 2, called at model.py:7", (), transport=True),
    )


@pytest.mark.parametrize("broken", [{"lock": 3}, {"since": 0}])
def test_an_entry_that_is_free_or_being_changed_is_left_out(
    page: tuple[WaitPage, mmap.mmap], broken: dict[str, int]
) -> None:
    write(page[1], 0, **broken)
    assert page[0].waits() == ()


def test_a_page_of_another_layout_is_not_read(page: tuple[WaitPage, mmap.mmap]) -> None:
    write(page[1], 0)
    struct.pack_into("=Q", page[1], 0, 2)
    assert page[0].waits() == ()


def test_what_a_rank_wrote_is_in_the_report_though_it_cannot_answer(tmp_path: Path) -> None:
    suite = Suite(tmp_path, SOURCE)
    try:
        run = suite.run()
    finally:
        suite.end_survivors()
    assert run.status == {"test_page": "failed"}, run
    assert "was in #9 all_reduce in group 2, called at model.py:7" in run.text["test_page"], run
