"""Streams become current everywhere at once, and events order and time what they do."""

from __future__ import annotations

import pytest
import torch

import torch_ext.sim  # noqa: F401 - registers the device

SIM = torch.get_device_module("sim")


def test_streams_become_current_everywhere_at_once() -> None:
    before = torch.accelerator.current_stream()
    mine = SIM.Stream(priority=-1)
    with SIM.stream(mine):
        assert torch.accelerator.current_stream() == mine == SIM.current_stream()
        with torch.Stream("sim") as inner:
            assert SIM.current_stream() == inner
        assert SIM.current_stream() == mine
    assert torch.accelerator.current_stream() == before == SIM.default_stream()
    with SIM.stream(SIM.Stream("sim:1")):
        assert SIM.current_device() == 1
    assert SIM.current_device() == 0


def test_sleep_delays_the_stream_and_events_carry_the_delay_across() -> None:
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


def test_host_reads_wait_for_the_current_stream() -> None:
    x = torch.ones(1, device="sim")
    with SIM.stream(SIM.Stream()) as _:
        for read in (x.item, x.cpu, SIM.synchronize):
            SIM._sleep(20_000_000)
            read()
            assert SIM.current_stream().query()


def test_elapsed_time_is_what_the_stream_was_kept_busy() -> None:
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
