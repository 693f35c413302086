"""Channels carry frames of any size and any number of descriptors, survive lost peers, and leak no descriptor."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair, close_all


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@settings(deadline=None)
@given(messages=st.lists(st.one_of(st.none(), st.text(), st.binary(), st.tuples(st.integers(), st.text())), max_size=8))
def test_messages_arrive_whole_and_in_order(messages: list[object]) -> None:
    one, other = channel_pair()
    for message in messages:
        one.send(message)
    assert [other.receive() for _ in messages] == [(message, []) for message in messages]
    assert not other.poll()
    one.close()
    other.close()


def test_frame_far_above_the_sockets_buffer_arrives() -> None:
    one, other = channel_pair()
    payload = os.urandom(1 << 20) * 20
    sender = threading.Thread(target=one.send, args=(payload,))
    sender.start()
    assert other.receive()[0] == payload
    sender.join()
    one.close()
    other.close()


@pytest.mark.parametrize("count", [1, 199, 200, 201, 253, 254, 450])
def test_any_number_of_descriptors_arrives_and_means_the_same_files(count: int) -> None:
    before = open_descriptors()
    one, other = channel_pair()
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
    one.close()
    other.close()
    assert open_descriptors() == before


def test_closed_peer_is_told_on_both_ways() -> None:
    one, other = channel_pair()
    one.close()
    assert one.closed
    assert other.poll()
    with pytest.raises(ChannelClosedError, match="gone"):
        other.receive()
    with pytest.raises(ChannelClosedError, match="gone"):
        other.send("x" * (1 << 22))
    other.close()


def test_what_was_sent_before_the_end_is_still_received() -> None:
    one, other = channel_pair()
    one.send("last words")
    one.close()
    assert other.receive() == ("last words", [])
    with pytest.raises(ChannelClosedError):
        other.receive()
    other.close()


@pytest.mark.parametrize("cut", [1, 7, 8, 20])
def test_peer_that_dies_within_a_frame_costs_no_descriptor(cut: int) -> None:
    before = open_descriptors()
    one, other = channel_pair()
    frame = struct.pack("!II", 1000, 1) + b"half a payload"
    socket.send_fds(one._socket, [frame[:cut]], [1])
    one.close()
    with pytest.raises(ChannelClosedError):
        other.receive()
    other.close()
    assert open_descriptors() == before


def test_payload_that_cannot_be_read_costs_no_descriptor() -> None:
    before = open_descriptors()
    one, other = channel_pair()
    socket.send_fds(one._socket, [struct.pack("!II", 3, 1)], [1])
    one._socket.sendall(b"bad")
    with pytest.raises(pickle.UnpicklingError):
        other.receive()
    one.close()
    other.close()
    assert open_descriptors() == before


def test_adopted_descriptor_belongs_to_the_channel() -> None:
    one, other = channel_pair()
    copy = Channel.from_descriptor(os.dup(one.fileno()))
    copy.send(1)
    assert other.receive() == (1, [])
    number = copy.fileno()
    copy.close()
    with pytest.raises(OSError):
        os.fstat(number)
    one.close()
    other.close()
