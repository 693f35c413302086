"""What a rank that hangs shows: the page in which it records its wait, and its stacks."""

import mmap
import struct

import pytest

from test.torch_ext.world.suites import suite_of
from torch_ext.world.operations import WaitPage, waits_of_threads
from torch_ext.world.protocol import Wait


@pytest.fixture
def page():
    page = WaitPage()
    with mmap.mmap(page.descriptor, 4096) as memory:
        yield page, memory
    page.close()


def write(memory, number, *, lock=2, peer=1, since=5, sequence=9):
    struct.pack_into("=Q", memory, 0, 2)
    text = b"2", b"all_reduce", b"model.py:7"
    until_ns, thread = 7_500_000_000, 40 + number
    struct.pack_into(
        "=IiqQ64s40s200sqi", memory, 64 + 504 * number, lock, peer, since, sequence, *text, until_ns, thread
    )


def test_entries_are_read_in_the_order_of_their_age(page):
    write(page[1], 0, since=8, peer=-1, sequence=0)
    write(page[1], 7, since=5, peer=3)
    assert page[0].waits() == (
        Wait("#9 all_reduce in group 2, called at model.py:7", (3,), transport=True),
        Wait("all_reduce in group 2, called at model.py:7", (), transport=True),
    )


@pytest.mark.parametrize("broken", [{"lock": 3}, {"since": 0}])
def test_an_entry_that_is_free_or_being_changed_is_left_out(page, broken):
    assert page[0].waits() == (), "nobody has written anything"
    write(page[1], 0, **broken)
    assert page[0].waits() == ()
    write(page[1], 0)
    assert page[0].waits()
    struct.pack_into("=Q", page[1], 0, 1)  # another layout
    assert page[0].waits() == ()


def test_a_process_reads_its_own_page_by_thread(page, monkeypatch):
    write(page[1], 3)
    monkeypatch.setenv("TORCH_EXT_WAIT_PAGE", str(page[0].descriptor))
    assert waits_of_threads() == {43: (5, page[0].waits()[0], 43, 7.5)}


def test_files_that_are_no_pages_are_ignored(monkeypatch, tmp_path):
    """A program may close the page and open another file under its number."""
    monkeypatch.delenv("TORCH_EXT_WAIT_PAGE", raising=False)
    assert waits_of_threads() == {}
    with open(tmp_path / "other", "w+b") as other:
        other.write(struct.pack("=Q", 2) + bytes(4088))
        other.flush()
        for number in (str(other.fileno()), "-1", "no number", "1000000"):
            monkeypatch.setenv("TORCH_EXT_WAIT_PAGE", number)
            assert waits_of_threads() == {}


HANG = """
from torch_ext.world import provider, rank, wording
from torch_ext.world.follow import start_world
from torch_ext.world.start import RankTask
from torch_ext.world.settings import Limits


def decode_record():
    time.sleep(1)
    return ""


def hang_with_a_slow_record():
    rank._flight_record = decode_record
    print("hangs")
    time.sleep(1000)


if __name__ == "__main__":
    wording._HIDDEN = ()  # the listener is what this is about
    with start_world(provider.zygote_for("__main__"), [RankTask(hang_with_a_slow_record)]) as world:
        (outcome,) = world.wait(Limits(test_s=2))
    print(outcome.ending, outcome.output, outcome.stacks)
"""


@pytest.mark.costly
def test_the_listener_rests_while_stacks_are_read(tmp_path):
    """A thread that runs while faulthandler walks its frames can crash the rank in the middle of the report."""
    with suite_of(tmp_path, HANG) as suite:
        run = suite.finish(suite.start([str(suite.file)]))
    assert "Ending.TIMED_OUT hangs" in run.out, run
    assert "in hang_with_a_slow_record" in run.out, run
    assert "in _listen" in run.out, run
    assert "in decode_record" not in run.out, run
