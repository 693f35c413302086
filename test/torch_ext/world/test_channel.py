"""Channels carry messages of any size and any number of descriptors, survive lost peers, and leak no descriptor."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ext.world import channel
from torch_ext.world.channel import Channel, ChannelBrokenError, ChannelClosedError, channel_pair, close_all
from torch_ext.world.protocol import Phase, Signal


@contextlib.contextmanager
def open_pair():
    """Two ends, which the block closes; no descriptor may be left open then."""
    before = os.listdir("/proc/self/fd")
    one, other = channel_pair()
    yield one, other
    one.close()
    other.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.fixture
def pair():
    with open_pair() as ends:
        yield ends


def test_message_far_above_the_sockets_buffer_arrives(pair):
    one, other = pair
    payload = os.urandom(1 << 20) * 20
    sender = threading.Thread(target=one.send, args=(payload,))
    sender.start()
    assert other.receive()[0] == payload
    sender.join()


@pytest.mark.parametrize("count", [1, 199, 200, 201, 253, 254, 450])
def test_any_number_of_descriptors_arrives_and_means_the_same_files(pair, count):
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


def test_closed_peer_is_reported_after_its_last_message(pair):
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


def test_packet_without_bytes_is_no_end_of_the_channel_even_if_another_follows(pair):
    one, other = pair
    one._socket.send(b"")
    one.send("next")
    with pytest.raises(ChannelBrokenError, match="wrote 0 bytes that are not a message"):
        other.receive()


def test_peer_that_dies_within_a_message_costs_no_descriptor(pair):
    one, other = pair
    socket.send_fds(one._socket, [channel._AHEAD], [1])
    assert not other.poll()
    one.close()
    with pytest.raises(ChannelClosedError):
        other.receive()


@pytest.mark.parametrize("unread", [0, 2])
def test_last_messages_of_a_peer_that_leaves_its_own_unread_arrive(pair, unread):
    one, other = pair
    for number in range(unread):
        other.send(number)
    one.send("last")
    one.close()
    assert other.receive() == ("last", [])
    with pytest.raises(ChannelClosedError, match="gone"):
        other.receive()


STANDARD = [signal.SIGKILL, Path("a/b"), timedelta(seconds=3), frozenset({1}), Signal(0, signal.SIGKILL)]
MESSAGES = st.lists(
    st.one_of(st.none(), st.text(), st.binary(), st.tuples(st.integers(), st.text()), st.sampled_from(STANDARD)),
    max_size=8,
)
JUNK = st.one_of(st.binary(max_size=40), st.integers(1, 5000).map(bytes))


@settings(deadline=None)
@given(MESSAGES, JUNK)
def test_junk_is_refused_after_earlier_messages_without_a_wait(messages, junk):
    with open_pair() as (one, other):
        for message in messages:
            one.send(message)
        socket.send_fds(one._socket, [junk], [1] * (len(junk) % 2))
        assert [other.receive()[0] for _ in messages] == messages
        assert other.poll()
        with pytest.raises(ChannelBrokenError, match=rf"wrote {len(junk)} bytes that are not a message") as refused:
            other.receive()
        with pytest.raises(ChannelBrokenError) as caught:
            one.receive()
        assert caught.value.own and str(caught.value) == str(refused.value)


class Foreign:
    def __reduce__(self):
        return os.mkdir, ("made by a message",)


class _AsGetattr:
    """Pickles as a member of an Enum does on Python 3.11.0 to 3.11.3; there and on 3.10, a signal does by its name."""

    def __init__(self, owner, name):
        self.call = getattr, (owner, name)

    def __reduce_ex__(self, protocol):
        return self.call


def test_a_member_of_an_enum_arrives_from_every_python(pair, monkeypatch):
    one, other = pair
    one.send(_AsGetattr(Phase, "RUNNING"))
    assert other.receive()[0] is Phase.RUNNING
    monkeypatch.setattr(channel, "_dumps", lambda message: b"csignal\nSIGKILL\n.")
    one.send(signal.SIGKILL)
    assert other.receive()[0] is signal.SIGKILL
    monkeypatch.undo()
    one.send(_AsGetattr(Signal, "__init__"))
    with pytest.raises(ChannelBrokenError, match=r"getattr of .*Signal.* is not allowed in a message"):
        other.receive()


@pytest.mark.parametrize("message", [Foreign(), OrderedDict(), socket.AF_UNIX, pytest.raises])
def test_nothing_but_plain_data_and_our_classes_is_unpickled(pair, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other = pair
    one.send(message, [1])
    with pytest.raises(ChannelBrokenError, match=r"a packet of .* that is not a message .*is not allowed in a message"):
        other.receive()
    one.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_message_longer_than_any_of_ours_is_not_sent(pair):
    with pytest.raises(ValueError, match="too long"):
        pair[0].send("many", [1] * (channel._MAX_DESCRIPTORS + 1))


@pytest.mark.processes
def test_refusal_names_the_descriptor_of_the_writer(pair):
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


def test_a_default_timeout_of_sockets_does_not_end_a_wait():
    socket.setdefaulttimeout(0.001)
    try:
        one, other = channel_pair()
    finally:
        socket.setdefaulttimeout(None)
    sender = threading.Thread(target=lambda: (time.sleep(0.1), one.send("late")))
    sender.start()
    assert other.receive() == ("late", [])
    sender.join()
    one.close()
    other.close()


def test_channel_does_not_touch_a_file_that_reuses_its_descriptor(pair):
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
