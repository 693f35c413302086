"""A rank's output is captured, trimmed to its end, and forwarded line by line with a rank prefix."""

from __future__ import annotations

import os

import pytest

from torch_ext.world.output import open_capture


def test_kept_output_is_cut_to_its_last_16_kib() -> None:
    capture, writer = open_capture(3, show=False)
    assert capture.live is None
    os.write(writer, b"x" * (1 << 20) + b"end\n")
    os.close(writer)
    tail = capture.tail()
    assert len(tail) == 16 << 10
    assert tail.endswith("xend\n")
    capture.close()
    assert capture.tail() == ""


def test_reading_does_not_move_the_writer() -> None:
    capture, writer = open_capture(0, show=False)
    for word in (b"one ", b"two ", b"three"):
        os.write(writer, word)
        capture.tail()
    assert capture.tail() == "one two three"
    os.close(writer)
    capture.close()


def test_lines_are_passed_on_whole_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    capture, writer = open_capture(3, show=True)
    os.write(writer, b"one\ntw")
    assert capture.pass_through()
    assert capsys.readouterr().out == "[rank 3] one\n"
    os.write(writer, b"o\n\xffthree")
    assert capture.pass_through()
    os.close(writer)
    assert not capture.pass_through()
    assert capsys.readouterr().out == "[rank 3] two\n[rank 3] \\xffthree\n"
    assert capture.tail() == "one\ntwo\n\N{REPLACEMENT CHARACTER}three"
    capture.close()


def test_closing_gives_the_descriptors_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for show in (False, True):
        capture, writer = open_capture(0, show)
        os.close(writer)
        capture.close()
        capture.close()
    assert len(os.listdir("/proc/self/fd")) == before
