"""Streams become current everywhere at once, and events order and time what they do."""

import pytest
import torch

SIM = torch.get_device_module("sim")


def test_streams_become_current_everywhere_at_once():
    before = torch.accelerator.current_stream()
    mine = SIM.Stream(priority=-1)
    with SIM.stream(mine):
        assert torch.accelerator.current_stream() == mine == SIM.current_stream()
        with torch.Stream("sim") as inner:
            assert SIM.current_stream() == inner
        assert SIM.current_stream() == mine
    assert torch.accelerator.current_stream() == before == SIM.default_stream()
    there = SIM.Stream("sim:1")
    context = SIM.StreamContext(there)
    with context, context:  # may be entered again
        assert SIM.current_stream() == there and SIM.current_device() == 1
    assert SIM.current_device() == 0 and SIM.current_stream("sim:1") == SIM.default_stream("sim:1")
    with SIM.StreamContext(None):
        assert SIM.current_device() == 0


def test_priorities_are_those_of_torch_on_gpus():
    assert SIM.Stream.priority_range() == (0, -3)
    assert [SIM.Stream(priority=wish).priority for wish in (2, 0, -1, -3, -9)] == [0, 0, -1, -3, -3]
    assert SIM.default_stream().priority == 0


def test_a_handle_leads_back_to_its_stream():
    for stream in (SIM.Stream("sim:1"), SIM.default_stream("sim:1")):
        assert SIM.ExternalStream(stream.native_handle, device="sim:1") == stream
    assert SIM.get_stream_from_external(0, "sim:1") == SIM.default_stream("sim:1")
    with pytest.raises(ValueError, match="0x7 is the handle of no stream of sim:0"):
        SIM.ExternalStream(7)
    with pytest.raises(NotImplementedError, match="cannot be shared between processes"):
        SIM.Event.from_ipc_handle(0, bytes(64))


def test_sleep_delays_the_stream_and_events_carry_the_delay_across():
    one, two = SIM.Stream(), SIM.Stream()
    event = SIM.Event()
    with SIM.stream(one):
        SIM._sleep(50_000_000)
        event.record()
    assert not one.query() and not event.query() and two.query()
    two.wait_event(event)
    assert not two.query()
    two.synchronize()
    assert event.query() and one.query()


def test_host_reads_wait_for_the_current_stream():
    x = torch.ones(1, device="sim")
    with SIM.stream(SIM.Stream()) as _:
        for read in (x.item, x.cpu, SIM.synchronize):
            SIM._sleep(20_000_000)
            read()
            assert SIM.current_stream().query()


def test_elapsed_time_is_the_busy_time_of_the_stream():
    start, end = SIM.Event(enable_timing=True), torch.Event("sim", enable_timing=True)
    start.record()
    SIM._sleep(10_000_000)
    end.record()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 10.0 and isinstance(start, SIM.Event)
    plain = SIM.Event()
    plain.record()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        plain.elapsed_time(end)


def test_an_event_belongs_to_the_device_it_was_first_recorded_on():
    here, there = SIM.Stream("sim:0"), SIM.Stream("sim:1")
    event = SIM.Event(enable_timing=True)
    event.record(there)  # an event that was never recorded has no device yet
    for record in (lambda: event.record(here), lambda: here.record_event(event)):
        with pytest.raises(RuntimeError, match="Event device 1 does not match recording stream's device 0"):
            record()
    here.wait_event(event)  # streams may wait across devices
    event.record(there)
    x = torch.ones(4, device="sim:0")
    x.record_stream(there)
    del x
    assert torch.ones(4, device="sim:0").sum().item() == 4


def test_elapsed_time_needs_two_recorded_events_of_one_device_and_others_block_nothing():
    one, other, never = (SIM.Event(enable_timing=True) for _ in range(3))
    one.record(SIM.Stream("sim:0"))
    other.record(SIM.Stream("sim:1"))
    for pair in ((one, never), (never, one), (never, never)):
        with pytest.raises(ValueError, match="Both events must be recorded before calculating elapsed time"):
            pair[0].elapsed_time(pair[1])
    with pytest.raises(RuntimeError, match=r"one device.*one was recorded on sim:0 and the other on sim:1"):
        one.elapsed_time(other)
    assert never.query()
    never.synchronize()
    SIM.Stream().wait_event(never)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'wait'"):
        SIM.current_stream().wait_event(None)
