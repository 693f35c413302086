"""Channels carry frames of any size and any number of descriptors, survive lost peers, and leak no descriptor."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from torch_ext.world import channel
from torch_ext.world.channel import Channel, ChannelBrokenError, ChannelClosedError, channel_pair, close_all
from torch_ext.world.protocol import Signal


@contextlib.contextmanager
def open_pair() -> Iterator[tuple[Channel, Channel]]:
    """Two ends, which the block closes; no descriptor may be left open then."""
    before = os.listdir("/proc/self/fd")
    one, other = channel_pair()
    yield one, other
    one.close()
    other.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair() as ends:
        yield ends


@pytest.mark.parametrize("count", [1, 199, 200, 201, 253, 254, 450])
def test_any_number_of_descriptors_arrives_and_means_the_same_files(pair: Pair, count: int) -> None:
    one, other = pair
    reader, writer = os.pipe()
    given_ends = [os.dup(writer) for _ in range(count)]
    one.send("here", given_ends)
    one.send("after", [])
    message, received = other.receive()
    assert (message, len(received)) == ("here", count)
    assert other.receive() == ("after", [])
    for number in (0, -1):
        os.write(received[number], b"x")
    assert os.read(reader, 9) == b"xx"
    assert not any(os.get_inheritable(descriptor) for descriptor in received)
    close_all([*given_ends, *received, reader, writer])


def test_closed_peer_is_reported_after_its_last_message(pair: Pair) -> None:
    one, other = pair
    copy = Channel.from_descriptor(os.dup(one.fileno()))
    for end in (one, copy):
        end.send("last words")
        end.close()
        assert end.closed
        assert other.poll() and other.receive() == ("last words", [])
    assert other.poll()
    with pytest.raises(ChannelClosedError, match="gone"):
        other.receive()
    with pytest.raises(ChannelClosedError, match="gone"):
        other.send("x" * (1 << 22))


def frame_of(message: object) -> bytes:
    one, other = channel_pair()
    one.send(message)
    found = other._socket.recv(1 << 16)
    one.close()
    other.close()
    return found


@pytest.mark.parametrize("cut", [1, 7, 12, 20])
def test_peer_that_dies_within_a_frame_costs_no_descriptor(pair: Pair, cut: int) -> None:
    one, other = pair
    header = struct.pack("!III", channel._MAGIC, 1000, 1)
    socket.send_fds(one._socket, [(header + b"half a payload")[:cut]], [1])
    one.close()
    with pytest.raises(ChannelClosedError):
        other.receive()


MESSAGES = [
    [None, "text", b"bytes", (1, "two")],
    [signal.SIGKILL, Path("a/b"), timedelta(seconds=3), frozenset({1}), Signal(0, signal.SIGKILL)],
]
HEADER = struct.Struct("!III")
JUNK = [
    b"\0",
    bytes(5000),
    b"hello\n" * 9,
    HEADER.pack(channel._MAGIC, 5, 0) + b"hello",
    HEADER.pack(channel._MAGIC, 1 << 31, 0),
    frame_of("half")[:3] + b"no magic",
    frame_of("a message") + b"junk",
]


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_junk_is_refused_after_earlier_messages_without_a_wait(pair: Pair, junk: bytes, size: int) -> None:
    one, other = pair
    stream = b"".join(frame_of(message) for message in MESSAGES) + junk
    expected = [*MESSAGES, "a message"] if junk is JUNK[-1] else MESSAGES
    found: list[object] = []
    refused = ""
    for start in range(0, len(stream), size):
        one._socket.sendall(stream[start : start + size])
        while not refused and other.poll():
            try:
                found.append(other.receive()[0])
            except ChannelBrokenError as error:
                refused = str(error)
        if refused:
            break
    assert found == expected and re.match(r"wrote [\d,]+ (or more )?bytes that|wrote a frame of", refused)
    with pytest.raises(ChannelBrokenError) as caught:
        one.receive()
    assert caught.value.own and str(caught.value) == refused


def test_descriptors_that_no_frame_announces_are_refused_and_closed(pair: Pair) -> None:
    one, other = pair
    socket.send_fds(one._socket, [frame_of("a message")], [1])
    with pytest.raises(ChannelBrokenError, match="it came with 1 descriptors instead of 0"):
        other.receive()


def test_incomplete_frame_is_refused_at_its_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    now_s = 100.0
    monkeypatch.setattr(channel, "monotonic", lambda: now_s)
    frame = frame_of("a message")
    assert not other.poll() and other.deadline_s == float("inf")  # nothing has begun
    for part in (frame[:5], frame[5:20]):
        one._socket.sendall(part)
        assert not other.poll() and other.deadline_s == now_s + 30
        now_s += 29  # the peer is slow, but bytes arrive
    one._socket.sendall(frame[20:])
    assert other.receive() == ("a message", [])
    one._socket.sendall(frame[:20])
    assert not other.poll()
    now_s += 30
    assert other.poll()
    with pytest.raises(ChannelBrokenError, match=r"wrote 20 bytes of an incomplete message into"):
        other.receive()


class Foreign:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("made by a message",)


@pytest.mark.parametrize("message", [Foreign(), OrderedDict(), socket.AF_UNIX, pytest.raises])
def test_nothing_but_plain_data_and_our_classes_is_unpickled(
    pair: Pair, message: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = pair
    one.send(message, [1])
    with pytest.raises(ChannelBrokenError, match=r"a frame of .* that is not a message .*is not allowed in a message"):
        other.receive()
    one.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_frame_longer_than_any_message_is_refused_at_its_header_and_not_sent(pair: Pair) -> None:
    one, other = pair
    one._socket.sendall(struct.pack("!III", channel._MAGIC, 1 << 31, 0))
    with pytest.raises(ChannelBrokenError, match="2,147,483,648 bytes"):
        other.receive()
    with pytest.raises(ValueError, match="too long"):
        one.send("many", [1] * (channel._MAX_DESCRIPTORS + 1))


@pytest.mark.processes
def test_refusal_names_the_descriptor_of_the_writer(pair: Pair) -> None:
    one, other = pair
    peer = os.fork()
    if peer == 0:
        try:
            os.dup2(one.fileno(), 57)
            one.close()
            os.write(57, b"junk")
            while True:
                time.sleep(1)
        finally:
            os._exit(1)
    one.close()
    with pytest.raises(
        ChannelBrokenError, match=r"wrote 4 bytes .* into its connection with the harness, descriptor 57"
    ):
        other.receive()
    os.kill(peer, signal.SIGKILL)
    os.waitpid(peer, 0)


def test_channel_does_not_touch_a_file_that_reuses_its_descriptor(pair: Pair) -> None:
    one, other = pair
    number = one.fileno()
    reader, writer = os.pipe()
    os.dup2(writer, number)
    for use in (lambda: one.send("message"), one.receive):
        with pytest.raises(ChannelClosedError, match="closed the descriptor"):
            use()
    one.close()
    os.write(number, b"x")
    assert os.read(reader, 9) == b"x"
    other.close()
    close_all([reader, writer, number])
