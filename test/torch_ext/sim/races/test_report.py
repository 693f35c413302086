"""The text of reports, without folders and line numbers."""

from __future__ import annotations

import re

import pytest

from test.torch_ext.sim.races import zoo_memory, zoo_streams
from test.torch_ext.sim.races.stage import Stage, pairs_of
from torch_ext.sim import races

EXPECTED = {
    "one_column_and_not_its_neighbour": """\
race 1: aten::fill_ writes what aten::mul reads
  memory   bytes 4 to 1592 of a block of device memory, allocated at stage.py:N
  earlier  aten::fill_ writes float32 [100] on stream S of sim:0
             zoo_streams.py:N in one_column_and_not_its_neighbour
  later    aten::mul reads float32 [100] on the default stream of sim:0
             zoo_streams.py:N in one_column_and_not_its_neighbour
  missing  the default stream of sim:0 must wait for stream S of sim:0 between zoo_streams.py:N and zoo_streams.py:N""",
    "gradient_read_on_the_side": """\
race 1: aten::add writes what aten::mul reads
  memory   bytes 0 to 1024 of a block of device memory, allocated at zoo_streams.py:N
  earlier  aten::add in AccumulateGrad writes float32 [256] on the default stream of sim:0
  later    aten::mul reads float32 [256] on stream S of sim:0
             zoo_streams.py:N in gradient_read_on_the_side
  missing  stream S of sim:0 must wait for the default stream of sim:0 after backward's AccumulateGrad and before zoo_streams.py:N""",  # noqa: E501 - as printed
    "copy_between_devices": """\
race 1: aten::copy_ writes what aten::mul reads
  memory   bytes 0 to 1024 of a block of device memory, allocated at stage.py:N
  earlier  aten::copy_ writes float32 [256] on the default stream of sim:0
             zoo_streams.py:N in copy_between_devices
  later    aten::mul reads float32 [256] on stream S of sim:1 (made at zoo_streams.py:N)
             zoo_streams.py:N in copy_between_devices
  missing  stream S of sim:1 must wait for the default stream of sim:0 between zoo_streams.py:N and zoo_streams.py:N""",
    "freed_while_in_use": """\
race 1: aten::mul reads what aten::fill_ writes
  memory   bytes 0 to 1024 of a block of device memory, allocated at zoo_memory.py:N, handed out again since the earlier access
  earlier  aten::mul reads float32 [256] on stream S of sim:0
             zoo_memory.py:N in freed_while_in_use
  later    aten::fill_ writes float32 [256] on the default stream of sim:0
             zoo_memory.py:N in freed_while_in_use
  missing  the tensor was freed at zoo_memory.py:N while stream S of sim:0 could still use it: call record_stream() with that stream before, or have the stream it was allocated on wait for stream S of sim:0""",  # noqa: E501 - as printed
    "host_overwrites_what_is_being_sent": """\
race 1: aten::copy_ reads what aten::fill_ writes
  memory   bytes 0 to 1024 of a block of pinned memory
  earlier  aten::copy_ reads float32 [256] on the default stream of sim:0
             zoo_memory.py:N in host_overwrites_what_is_being_sent
  later    aten::fill_ writes float32 [256] on the host
             zoo_memory.py:N in host_overwrites_what_is_being_sent
  missing  the host must wait for the default stream of sim:0 between zoo_memory.py:N and zoo_memory.py:N: synchronize the stream or an event""",  # noqa: E501 - as printed
}


def report_of(name: str) -> str:
    """Return the report of a program of the zoo, without what differs between machines and runs."""
    (program,) = (pair.program for pair in pairs_of(zoo_streams, zoo_memory) if pair.name == name)
    stage = Stage()
    races.start()
    program(stage, False)
    text = races.render(races.stop())
    text = re.sub(r"(\S*/)?(\w+\.py):\d+", r"\2:N", text)
    text = re.sub(r"\bstream \d+", "stream S", text)
    # The frames in which pytest called the program.
    return re.sub(r"\n +(?!zoo_)\w+\.py:N in .*|\n +and \d+ frames that called it", "", text)


@pytest.mark.parametrize("name", EXPECTED)
def test_report_text(name: str) -> None:
    heading, _, text = report_of(name).partition("\n\n")
    assert heading == "1 race: accesses to the same memory that nothing orders"
    assert text == EXPECTED[name]
