"""Programs that copy between host and device, where a copy that blocks is a wait of the host, and one that does not is
none; and what the host reads of pinned memory without an operator.
"""

from __future__ import annotations

import copy

import numpy as np
import torch

from test.torch_ext.sim.races.stage import SIM, Stage, pair


@pair
def sent_from_pageable_memory(on: Stage, fixed: bool) -> None:
    x, y, host = on.tensor(), on.tensor(), torch.ones(256)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        y.copy_(host, non_blocking=not fixed)
    x.mul(3)  # later: mul


@pair
def sent_from_pinned_memory(on: Stage, fixed: bool) -> None:
    x, host = on.tensor(), on.pinned()
    with on.on(on.side):
        x.copy_(host, non_blocking=not fixed)  # earlier: copy_
    x.mul(3)  # later: mul


@pair
def pinned_memory_sent_and_written(on: Stage, fixed: bool) -> None:
    host = on.pinned()
    x = host.to(on.device, non_blocking=not fixed)  # earlier: copy_
    host.fill_(7)  # later: fill_
    on.main.synchronize()
    del x


@pair
def sent_on_another_stream_than_the_work(on: Stage, fixed: bool) -> None:
    x, host = on.tensor(), torch.ones(256)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    with on.on(on.side if fixed else on.other):
        host.to(on.device)
    x.mul(3)  # later: mul


@pair
def sent_and_converted(on: Stage, fixed: bool) -> None:
    x, host = on.tensor(), torch.ones(256, dtype=torch.float64)
    with on.on(on.side):
        x.copy_(host, non_blocking=not fixed)  # earlier: copy_
    x.mul(3)  # later: mul


@pair
def sent_into_a_column(on: Stage, fixed: bool) -> None:
    # The host waits for the transfer, and a kernel that nothing waits for puts it where it belongs.
    x, host = on.tensor(8, 4), torch.ones(8)
    with on.on(on.side):
        x[:, 1].copy_(host)  # earlier: copy_
    x[:, 2 if fixed else 1].mul(3)  # later: mul


@pair
def column_of_pinned_memory_sent(on: Stage, fixed: bool) -> None:
    # The host gathers the column at the call; a run of bytes is read when the stream comes to it.
    x, host = on.tensor(8), on.pinned(8, 8)
    x.copy_(host[:, 1] if fixed else host[1], non_blocking=True)  # earlier: copy_
    host.fill_(7)  # later: fill_
    on.main.synchronize()


@pair
def nothing_sent(on: Stage, fixed: bool) -> None:
    # A copy without elements does not even wait.
    x, y, host = on.tensor(), on.tensor(), torch.ones(256)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        y[: 256 if fixed else 0].copy_(host[: 256 if fixed else 0])
    x.mul(3)  # later: mul


@pair
def number_made_on_the_device(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        torch.tensor([1.0], device=on.device if fixed else "cpu")
    x.mul(3)  # later: mul


@pair
def fetched_to_pageable_memory(on: Stage, fixed: bool) -> None:
    # CUDA may wait here, and says that nobody should count on it.
    x, host = on.tensor(), torch.empty(256)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        host.copy_(x, non_blocking=not fixed)
    x.mul(3)  # later: mul


@pair
def fetched_to_pinned_memory(on: Stage, fixed: bool) -> None:
    x, host = on.tensor(), on.pinned()
    with on.on(on.side):
        host.copy_(x, non_blocking=not fixed)  # earlier: copy_
    host.mul(2)  # later: mul
    SIM.synchronize()


@pair
def listed_before_the_copy_is_over(on: Stage, fixed: bool) -> None:
    host = on.tensor().to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    host.tolist()  # later: tolist


@pair
def handed_to_numpy_before_the_copy_is_over(on: Stage, fixed: bool) -> None:
    host = on.tensor().to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    host.numpy()  # later: numpy


@pair
def array_made_before_the_copy_is_over(on: Stage, fixed: bool) -> None:
    host = on.tensor().to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    np.asarray(host)  # later: numpy


@pair
def exported_before_the_copy_is_over(on: Stage, fixed: bool) -> None:
    host = on.tensor().to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    np.from_dlpack(host)  # later: _to_dlpack_versioned


@pair
def deeply_copied_before_the_copy_is_over(on: Stage, fixed: bool) -> None:
    host = on.tensor().to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    copy.deepcopy(host)  # later: copy_


@pair
def bytes_read_before_the_copy_is_over(on: Stage, fixed: bool) -> None:
    host = on.tensor().to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    host.untyped_storage()[3]  # later: _local_scalar_dense


@pair
def indexed_by_integers_and_by_a_mask(on: Stage, fixed: bool) -> None:
    # The host must count what a mask selects, and waits for that. It knows how many integers there are.
    x, y = on.tensor(), on.tensor()
    index = torch.zeros(256, dtype=torch.bool if fixed else torch.int64, device=on.device)
    SIM.synchronize()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        y[index]
    x.mul(3)  # later: mul


@pair
def filled_by_indices_of_the_host(on: Stage, fixed: bool) -> None:
    # The host must move them, and waits for that.
    x, y, index = on.tensor(), on.tensor(), torch.zeros(8, dtype=torch.int64)
    on_device = index.to(on.device)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        y.index_fill_(0, on_device, 3.0)
        if fixed:
            y[index] = y[:8].clone()
    x.mul(3)  # later: mul


@pair
def pinned_number_used_before_it_is_there(on: Stage, fixed: bool) -> None:
    # The host reads a number for the kernel at the call, so that even the kernel's own stream must be waited for.
    x, number = on.tensor(), torch.ones(()).pin_memory()
    number.copy_(x[0], non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    x * number  # later: mul


@pair
def pinned_number_written_after_its_use(on: Stage, fixed: bool) -> None:
    x, number = on.tensor(), torch.ones(()).pin_memory()
    if fixed:
        x * number
    else:
        x[0].copy_(number, non_blocking=True)  # earlier: copy_
    number.fill_(7)  # later: fill_
    on.main.synchronize()


@pair
def pinned_indices_used_before_they_are_there(on: Stage, fixed: bool) -> None:
    x, found = on.tensor(), torch.zeros(8, dtype=torch.int64, device=on.device)
    SIM.synchronize()
    index = found.to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    x[index]  # later: index
