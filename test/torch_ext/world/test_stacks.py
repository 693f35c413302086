"""Reading the stacks of ranks that hang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.world.suites import Suite

HANG = """
from torch_ext.world import provider, rank, wording
from torch_ext.world.follow import RankTask, start_world
from torch_ext.world.settings import Limits


def decode_record():
    time.sleep(1)
    return ""


def hang_with_a_slow_record():
    rank._flight_record = decode_record
    print("hangs")
    time.sleep(1000)


if __name__ == "__main__":
    wording._hidden.clear()  # the listener is what this is about
    with start_world(provider.zygote_for("__main__"), [RankTask(hang_with_a_slow_record)]) as world:
        (outcome,) = world.wait(Limits(test_s=2))
    print(outcome.ending, outcome.output, outcome.stacks)
"""


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    suite = Suite(tmp_path, HANG)
    yield suite
    suite.end_survivors()


def test_the_listener_rests_while_stacks_are_read(suite: Suite) -> None:
    """A thread that runs while faulthandler walks its frames can crash the rank in the middle of the report."""
    run = suite.finish(suite.start([str(suite.file)]), lambda run: None)
    assert "Ending.TIMED_OUT hangs" in run.out, run
    assert "in hang_with_a_slow_record" in run.out, run
    assert "in _listen" in run.out, run
    assert "in decode_record" not in run.out, run
