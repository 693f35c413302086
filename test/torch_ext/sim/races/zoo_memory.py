"""Programs in which memory is freed too early, or is pinned memory that streams and the host share."""

import io

import torch

from test.torch_ext.sim.races.stage import SIM, pair, rows

MIB = 1 << 18  # in elements


# MiB that become idle before the memory is used again.
@rows({"freed_while_in_use": 0, "freed_before_much_memory_was_idle": 520})
def freed_early(on, fixed, idle):
    x = on.tensor()
    with on.on(on.side):
        x.mul(3)  # earlier: mul
    if fixed:
        x.record_stream(on.side)
    del x
    torch.empty(idle * MIB, device=on.device)
    torch.ones(256, device=on.device)  # later: fill_


# The blocks of the next programs lie in one segment, because nothing else allocates on these streams.
def _neighbours(on, *mibs):
    with on.on(on.other):
        made = [torch.ones(mib * MIB, device=on.device) for mib in mibs]
    SIM.synchronize()
    return made


# Neighbours in MiB, the part that is used of the middle one, what keeps that from being used again, and a request.
FREED = {
    "freed_and_reused_by_a_larger_request": ((4, 4), lambda x: x, lambda on, x: x.record_stream(on.side), 6),
    "freed_and_merged_with_the_block_before_it": ((4, 4, 4), lambda x: x, lambda on, x: x.record_stream(on.side), 19),
    "column_of_a_freed_block_that_two_requests_share": (
        (8,),
        lambda x: x.view(-1, 64)[:, 3],
        lambda on, x: on.other.wait_stream(on.side),
        2,
    ),
    "part_of_a_freed_block_in_a_smaller_request": ((8,), lambda x: x, lambda on, x: SIM.synchronize(), 2),
}


@rows(FREED)
def freed(on, fixed, mibs, part, keep, request):
    blocks = _neighbours(on, *mibs)
    with on.on(on.side):
        part(blocks[len(mibs) // 2]).mul(3)  # earlier: mul
    if fixed:
        keep(on, blocks[len(mibs) // 2])
    del blocks[len(mibs) // 2]
    blocks.clear()
    with on.on(on.other):
        torch.ones(request * MIB, device=on.device)  # later: fill_


@pair
def far_part_of_a_freed_block(on, fixed):
    (x,) = _neighbours(on, 8)
    with on.on(on.side):
        x[7 * MIB :].mul(3)  # earlier: mul
    if fixed:
        x.record_stream(on.side)
    del x
    with on.on(on.other):
        first = torch.ones(4 * MIB, device=on.device)  # later: fill_
        torch.ones(4 * MIB, device=on.device)
    del first


@pair
def freed_and_not_returned_to_the_host(on, fixed):
    (x,) = _neighbours(on, 4)
    with on.on(on.side):
        x.mul(3)  # earlier: mul
    del x
    if fixed:
        SIM.empty_cache()
    with on.on(on.other):
        torch.ones(4 * MIB, device=on.device)  # later: fill_


@pair
def other_half_of_a_saved_storage_is_being_written(on, fixed):
    # A file holds the whole storage of a view.
    x, host = on.tensor(128), on.pinned()
    host[:128].copy_(x, non_blocking=True)  # earlier: copy_
    half = host[128:].clone() if fixed else host[128:]
    torch.save(half, io.BytesIO())  # later: save
    on.main.synchronize()


@pair
def pinned_memory_resized_while_it_is_written(on, fixed):
    # A larger size copies the bytes to new memory; an equal one, and a transposition, touch none.
    x, host = on.tensor(16, 16), torch.ones(16, 16, pin_memory=True)
    host.copy_(x, non_blocking=True)  # earlier: copy_
    host.t_().resize_(256 if fixed else 512)  # later: resize_
    on.main.synchronize()


@pair
def host_waits_for_another_stream(on, fixed):
    x, host = on.tensor(), on.pinned()
    with on.on(on.side):
        host.copy_(x, non_blocking=True)  # earlier: copy_
    (on.side if fixed else on.main).synchronize()
    host.mul(2)  # later: mul


@pair
def host_overwrites_what_is_being_sent(on, fixed):
    x, host = on.tensor(), on.pinned()
    x.copy_(host, non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    host.fill_(7)  # later: fill_
