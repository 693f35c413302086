"""Programs that copy between host and device, where a blocking copy is a wait of the host, and a non-blocking one is
none; and reads of pinned memory by the host without an operator.
"""

import torch

from test.torch_ext.sim.races.stage import SIM, pair


@pair
def sent_from_pinned_memory(on, fixed):
    x, host = on.tensor(), on.pinned()
    with on.on(on.side):
        x.copy_(host, non_blocking=not fixed)  # earlier: copy_
    x.mul(3)  # later: mul


@pair
def sent_into_a_column(on, fixed):
    # The host waits for the transfer to a temporary; nothing waits for the kernel that copies it to its place.
    x, host = on.tensor(8, 4), torch.ones(8)
    with on.on(on.side):
        x[:, 1].copy_(host)  # earlier: copy_
    x[:, 2 if fixed else 1].mul(3)  # later: mul


@pair
def column_of_pinned_memory_sent(on, fixed):
    # The host gathers the column at the call; the stream reads contiguous bytes when it reaches the copy.
    x, host = on.tensor(8), on.pinned(8, 8)
    x.copy_(host[:, 1] if fixed else host[1], non_blocking=True)  # earlier: copy_
    host.fill_(7)  # later: fill_
    on.main.synchronize()


@pair
def pinned_number_written_after_its_use(on, fixed):
    x, number = on.tensor(), torch.ones(()).pin_memory()
    if fixed:
        x * number
    else:
        x[0].copy_(number, non_blocking=True)  # earlier: copy_
    number.fill_(7)  # later: fill_
    on.main.synchronize()


@pair
def pinned_indices_used_before_they_are_there(on, fixed):
    x, found = on.tensor(), torch.zeros(8, dtype=torch.int64, device=on.device)
    SIM.synchronize()
    index = found.to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    x[index]  # later: index
