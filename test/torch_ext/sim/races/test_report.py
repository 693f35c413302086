"""The text of reports, without folders and line numbers."""

import re

import pytest
import torch

from test.torch_ext.sim.races import zoo_memory, zoo_streams
from test.torch_ext.sim.races.stage import SIM, Stage, pairs_of
from torch_ext.sim import races
from torch_ext.sim.races._report import missing

EXPECTED = {
    "one_column_and_not_its_neighbour": """\
race 1: aten::fill_ writes what aten::mul reads
  missing  the default stream of sim:0 must wait for stream S of sim:0 between zoo_streams.py:N and zoo_streams.py:N
  earlier  aten::fill_ writes float32 [100] on stream S of sim:0
             zoo_streams.py:N in one_column_and_not_its_neighbour
  later    aten::mul reads float32 [100] on the default stream of sim:0
             zoo_streams.py:N in one_column_and_not_its_neighbour
  memory   bytes 4 to 1592 of a block of device memory, allocated at stage.py:N""",
    "gradient_read_on_the_side": """\
race 1: aten::add writes what aten::mul reads
  missing  stream S of sim:0 must wait for the default stream of sim:0 after backward's AccumulateGrad and before zoo_streams.py:N
  earlier  aten::add in AccumulateGrad writes float32 [256] on the default stream of sim:0
  later    aten::mul reads float32 [256] on stream S of sim:0
             zoo_streams.py:N in gradient_read_on_the_side
  memory   bytes 0 to 1024 of a block of device memory, allocated at zoo_streams.py:N""",  # noqa: E501 - as printed
    "copy_between_devices": """\
race 1: aten::copy_ writes what aten::mul reads
  missing  stream S of sim:1 must wait for the default stream of sim:0 between zoo_streams.py:N and zoo_streams.py:N
  earlier  aten::copy_ writes float32 [256] on the default stream of sim:0
             zoo_streams.py:N in copy_between_devices
  later    aten::mul reads float32 [256] on stream S of sim:1 (made at zoo_streams.py:N)
             zoo_streams.py:N in copy_between_devices
  memory   bytes 0 to 1024 of a block of device memory, allocated at stage.py:N""",
    "freed_while_in_use": """\
race 1: aten::mul reads what aten::fill_ writes
  missing  the tensor was freed at zoo_memory.py:N while stream S of sim:0 could still use it: call record_stream() with that stream before, or have the stream it was allocated on wait for stream S of sim:0
  earlier  aten::mul reads float32 [256] on stream S of sim:0
             zoo_memory.py:N in freed_early
  later    aten::fill_ writes float32 [256] on the default stream of sim:0
             zoo_memory.py:N in freed_early
  memory   bytes 0 to 1024 of a block of device memory, allocated at zoo_memory.py:N, handed out again since the earlier access""",  # noqa: E501 - as printed
    "host_overwrites_what_is_being_sent": """\
race 1: aten::copy_ reads what aten::fill_ writes
  missing  the host must wait for the default stream of sim:0 between zoo_memory.py:N and zoo_memory.py:N: synchronize the stream or an event
  earlier  aten::copy_ reads float32 [256] on the default stream of sim:0
             zoo_memory.py:N in host_overwrites_what_is_being_sent
  later    aten::fill_ writes float32 [256] on the host
             zoo_memory.py:N in host_overwrites_what_is_being_sent
  memory   bytes 0 to 1024 of a block of pinned memory""",  # noqa: E501 - as printed
}


def report_of(name):
    """Return the report of a program of the zoo, without what differs between machines and runs."""
    (program,) = (pair.program for pair in pairs_of(zoo_streams, zoo_memory) if pair.name == name)
    races.start()
    for _ in range(32):
        SIM.Stream()  # an earlier check saw where the streams were made, which a stage gets again
    races.stop()
    stage = Stage()
    races.start()
    program(stage, False)
    text = races.render(races.stop())
    text = re.sub(r"(\S*/)?(\w+\.py):\d+", r"\2:N", text)
    text = re.sub(r"\bstream \d+", "stream S", text)
    # The frames in which pytest called the program.
    return re.sub(r"\n +(?!zoo_)\w+\.py:N in .*|\n +and \d+ more frames", "", text)


@pytest.mark.parametrize("name", EXPECTED)
def test_report_text(name):
    heading, _, text = report_of(name).partition("\n\n")
    assert heading == f"1 race: {re.search('  missing  (.*)', text)[1]}"
    assert text == EXPECTED[name]


def access(operator, lane, line, sequence=None):
    """Make an access of a program, called by torch."""
    kind = "host" if lane == "the host" else "communication" if lane.startswith("the collectives") else "stream"
    stack = (races.Frame(torch.__file__, 1, "call"), races.Frame("train.py", line, "step"))
    return races.Access(operator, sequence, None, None, True, lane, kind, None, "torch.float32", (4,), stack)


def race(earlier, later, freed=0):
    where = (races.Frame("train.py", freed, "step"),) if freed else None
    return races.Race(earlier, later, 0, 16, pinned=False, reused=bool(freed), allocated=None, freed=where)


GROUP = "the collectives of group 0 on sim:0"


@pytest.mark.parametrize(
    ("lane", "freed", "expected"),
    [
        ("stream 5 of sim:0", 0, "call wait() on the work of gather number 3 with stream 5 of sim:0 current, between train.py:1 and train.py:9"),  # noqa: E501
        ("the host", 0, "call wait() on the work of gather number 3, and synchronize the stream that is current there, between train.py:1 and train.py:9"),  # noqa: E501
        (GROUP, 0, "call wait() on the work of gather number 3 with the stream current that is current at train.py:9, between train.py:1 and train.py:9"),  # noqa: E501
        ("stream 5 of sim:0", 7, "the tensor was freed at train.py:7 while gather number 3 could still use it: keep it until wait() was called on that work, with the stream current that the tensor was allocated on"),  # noqa: E501
    ],
)  # fmt: skip
def test_advice_names_no_lane_of_a_group(lane, freed, expected):
    later = access("mul", lane, 9, 4 if lane == GROUP else None)
    assert missing(race(access("gather", GROUP, 1, 3), later, freed)) == expected


def test_stacks_have_the_programs_lines_alone():
    text = races.render([race(access("add", "stream 5 of sim:0", 1), access("mul", "the default stream of sim:0", 9))])
    assert "train.py:1 in step" in text and torch.__file__ not in text


def test_pytests_frames_are_not_the_programs():
    assert races.Frame(pytest.__file__, 1, "main").is_library
    assert not races.Frame("/home/me/pytest/train.py", 1, "main").is_library
