"""Programs in which memory is freed too early, or is pinned memory that streams and the host share."""

from __future__ import annotations

import io

import torch

from test.torch_ext.sim.races.stage import Stage, pair


@pair
def freed_while_in_use(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.mul(3)  # earlier: mul
    if fixed:
        x.record_stream(on.side)
    del x
    torch.ones(256, device="sim:0")  # later: fill_


@pair
def other_half_of_a_saved_storage_is_being_written(on: Stage, fixed: bool) -> None:
    # A file holds the whole storage of a view.
    x, host = on.tensor(128), on.pinned()
    host[:128].copy_(x, non_blocking=True)  # earlier: copy_
    half = host[128:].clone() if fixed else host[128:]
    torch.save(half, io.BytesIO())  # later: save
    on.main.synchronize()


@pair
def host_waits_for_another_stream(on: Stage, fixed: bool) -> None:
    x, host = on.tensor(), on.pinned()
    with on.on(on.side):
        host.copy_(x, non_blocking=True)  # earlier: copy_
    (on.side if fixed else on.main).synchronize()
    host.mul(2)  # later: mul


@pair
def host_overwrites_what_is_being_sent(on: Stage, fixed: bool) -> None:
    x, host = on.tensor(), on.pinned()
    x.copy_(host, non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    host.fill_(7)  # later: fill_
