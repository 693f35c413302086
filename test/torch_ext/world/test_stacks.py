"""Reading the stacks of ranks that hang."""

from __future__ import annotations

from pathlib import Path

from test.torch_ext.world.suites import suite_of

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


def test_the_listener_rests_while_stacks_are_read(tmp_path: Path) -> None:
    """A thread that runs while faulthandler walks its frames can crash the rank in the middle of the report."""
    with suite_of(tmp_path, HANG) as suite:
        run = suite.finish(suite.start([str(suite.file)]))
    assert "Ending.TIMED_OUT hangs" in run.out, run
    assert "in hang_with_a_slow_record" in run.out, run
    assert "in _listen" in run.out, run
    assert "in decode_record" not in run.out, run
