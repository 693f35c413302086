"""Programs of the checker's generators, run on streams of the device: races are found in exactly those with one.

test_checker.py checks the checker alone against every interleaving of such programs; here kernels, copies, events and
the allocator feed it. The zoo adds other operators, other ways to wait, and source locations.
"""

import contextlib
from dataclasses import replace
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from test.torch_ext.sim.races import interleavings as il
from test.torch_ext.sim.races.stage import SIM
from test.torch_ext.sim.races.test_checker import BYTES, LANES, PINNED, events, lifetimes, programs
from torch_ext.sim import races

ROOM = 64 * BYTES  # more than any view has elements


def _possible(step):
    """Return ``step`` with views that kernels and transfers accept unchanged.

    A kernel writes no element twice, and the host gathers columns of pinned memory before a transfer.
    """

    def view_of(tensor, view, is_write):
        overlaps = len(view.bytes) < view.itemsize * prod(view.sizes)
        return tensor, il.whole(view) if tensor == PINNED or (is_write and overlaps) else view

    if not isinstance(step, il.Use):
        return step
    reads = tuple(view_of(tensor, view, False) for tensor, view in step.reads)
    return replace(step, reads=reads, writes=tuple(view_of(tensor, view, True) for tensor, view in step.writes))


class _Device:
    """Runs the steps of a program on streams of the device."""

    def __init__(self):
        SIM.synchronize()
        SIM.empty_cache()  # else a block that an earlier program left is handed out first
        self.streams = {lane: SIM.Stream() for lane in range(LANES)}
        # Each lane copies to and from memory that no other lane uses.
        self.aside = {il.HOST: torch.zeros(ROOM, dtype=torch.uint8)}
        for lane, stream in self.streams.items():
            with SIM.stream(stream):
                self.aside[lane] = torch.zeros(ROOM, dtype=torch.uint8, device="sim")
        self.tensors: dict[int, torch.Tensor] = {}
        self.pinned = torch.zeros(BYTES, dtype=torch.uint8).pin_memory()
        self.events = {event: SIM.Event() for event in range(100)}
        SIM.synchronize()

    def take(self, step):  # noqa: C901 - one case for each step
        match step:
            case il.Use(lane, reads, writes):
                with SIM.stream(self.streams[lane]) if lane != il.HOST else contextlib.nullcontext():
                    for tensor, view in reads:
                        self._copy(lane, tensor, view, is_write=False)
                    for tensor, view in writes:
                        self._copy(lane, tensor, view, is_write=True)
            case il.Record(stream, event):
                self.events[event].record(self.streams[stream])
            case il.Wait(il.HOST, event):
                self.events[event].synchronize()
            case il.Wait(lane, event):
                self.streams[lane].wait_event(self.events[event])
            case il.Allocate(tensor, stream) if tensor != PINNED:
                with SIM.stream(self.streams[stream]):
                    self.tensors[tensor] = torch.empty(BYTES, dtype=torch.uint8, device="sim")
            case il.Allocate(tensor):
                self.tensors[tensor] = self.pinned
            case il.Free(tensor):
                del self.tensors[tensor]
            case il.RecordStream(tensor, stream):
                self.tensors[tensor].record_stream(self.streams[stream])

    def _copy(self, lane, tensor, view, *, is_write):
        dtype = torch.uint8 if view.itemsize == 1 else torch.int16
        part = self.tensors[tensor].view(dtype).as_strided(view.sizes, view.strides, view.begin // view.itemsize)
        aside = self.aside[lane].view(dtype)[: prod(view.sizes)].view(view.sizes)
        target, source = (part, aside) if is_write else (aside, part)
        target.copy_(source, non_blocking=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(programs(), lifetimes(), events()))
def test_races_are_found_in_exactly_the_programs_that_have_one(steps):
    steps = [_possible(step) for step in steps]
    racing = il.Machine(steps, LANES).explore()
    device = _Device()
    races.start()
    try:
        for step in steps:
            device.take(step)
    finally:
        found = races.stop()
    assert bool(found) == bool(racing), f"{sorted(racing)}\n{races.render(found) if found else 'no race was found'}"
