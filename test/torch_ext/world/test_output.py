"""A rank's output is captured, trimmed to its end, and forwarded line by line with a rank prefix."""

import os

from torch_ext.world import files
from torch_ext.world.files import Live, open_capture


def test_lines_are_passed_on_whole_with_their_rank(capsys):
    before = os.listdir("/proc/self/fd")
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
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_an_unfinished_line_is_passed_on_at_the_latest_when_the_capture_is_closed(capsys):
    capture, writer = open_capture(0, Live(prefix=""))  # as for a class process; a process left behind holds `writer`
    os.write(writer, b"one\ntw")
    assert capture.pass_through()
    capture.close()
    assert capsys.readouterr().out == "one\ntw\n"
    os.close(writer)


def test_output_is_passed_on_byte_for_byte_without_delay(capfdbinary, monkeypatch):
    monkeypatch.setattr(files, "_LINE_BYTES", 50_000)
    monkeypatch.setattr(files, "_KEPT_BYTES", 60_000)
    capture, writer = open_capture(0, Live(verbatim=True))
    os.write(writer, b"\xff\x00\x1b[1m\r\n10%\r20%\r\n" + b"x" * 20_000)
    assert capture.pass_through()
    assert capfdbinary.readouterr().out == b"[rank 0] \xff\x00\x1b[1m\n[rank 0] 20%\n"
    for _ in range(2):
        os.write(writer, b"x" * 20_000)
        assert capture.pass_through()
    os.write(writer, b"yz\n")
    os.close(writer)
    assert not capture.pass_through()
    assert capfdbinary.readouterr().out == b"[rank 0] " + b"x" * 60_000 + b"\n[rank 0] yz\n"
    assert capture._file.tell() < 20_000
    assert capture.tail().endswith("xyz\n")
    assert len(capture.tail()) == 16 << 10
    capture.close()


def test_rank_that_never_stops_printing_does_not_starve_others(monkeypatch):
    monkeypatch.setattr(files, "_TURN_BYTES", 2 * files._PART_BYTES)
    capture, writer = open_capture(0, Live(verbatim=True))
    reads = []

    def read(descriptor, size):
        reads.append(size)
        assert len(reads) < 9
        return b"more\n"

    monkeypatch.setattr(os, "read", read)
    assert capture.pass_through()
    assert len(reads) == 2
    monkeypatch.undo()
    os.close(writer)
    capture.close()
