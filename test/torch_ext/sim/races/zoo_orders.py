"""Programs of one form each, as rows of tables: the accesses, and the operation that orders them or does not."""

import copy
import io
import os
import pickle

import numpy as np
import torch

from test.torch_ext.sim.races.stage import NAME, SIM, in_a_thread, rows


def _polled(event):
    while not event.query():
        pass


# --- two accesses, of which the first is on another stream ---


# The operators, and their calls on a tensor of 16 rows; the twin waits for the stream.
ACCESSES = {
    "expanded": (("fill_", lambda x, y: x[:, :1].fill_(2)), ("sum", lambda x, y: x[:, :1].expand(16, 100).sum())),
    "out_argument": (("mul", lambda x, y: torch.mul(x, 2, out=y)), ("sum", lambda x, y: y.sum())),
    "one_tensor_of_a_list": (("mul", lambda x, y: x.mul(3)), ("add", lambda x, y: torch._foreach_add_([y, x], 1))),
    "conversion": (("copy_", lambda x, y: y.copy_(x.int())), ("mul", lambda x, y: y.mul(3))),
    "index_that_is_still_being_made": (
        ("zero_", lambda x, y: y.zero_()),
        # A late zero leaves the bytes of 1.0, which must be an index too.
        ("index_select", lambda x, y: x[:1].expand(1 << 30, 16).index_select(0, y.view(torch.int32)[0])),
    ),
    "statistics_of_batch_norm": (
        ("zero_", lambda x, y: y[0].zero_()),
        ("native_batch_norm", lambda x, y: torch.nn.functional.batch_norm(x, y[0], y[1], training=True)),
    ),
}


@rows(ACCESSES, "earlier", "later")
def accessed(on, fixed, first, second):
    x, y = on.tensor(16, 16), on.tensor(16, 16)
    with on.on(on.side):
        first(x, y)
    on.join(fixed)
    second(x, y)


# The views that two streams use, of a tensor of 16 rows; those of the twin have nothing in common.
VIEWS = {
    "transposed": (lambda x: x.t()[:3], lambda x, fixed: x[:, 3 if fixed else 2 :]),
    "every_second_element": (lambda x: x.view(-1)[::2], lambda x, fixed: x.view(-1)[1 if fixed else 0 :: 2]),
    "real_and_imaginary_parts": (
        lambda x: torch.view_as_complex(x.view(-1, 2)).real,
        lambda x, fixed: torch.view_as_complex(x.view(-1, 2)).imag if fixed else x,
    ),
}


@rows(VIEWS)
def viewed(on, fixed, one, other):
    x = on.tensor(16, 16)
    with on.on(on.side):
        one(x).fill_(2)  # earlier: fill_
    other(x, fixed).mul(3)  # later: mul


# --- what orders the two, where it is right ---

# Between a write on the side stream and a read on the main one.
WAITS = {
    "read_after_write": lambda on, fixed: fixed and on.main.wait_stream(on.side),
    "wait_of_another_stream": lambda on, fixed: (on.main if fixed else on.other).wait_stream(on.side),
    "wait_the_wrong_way_round": lambda on, fixed: (
        on.main.wait_stream(on.side) if fixed else on.side.wait_stream(on.main)
    ),
    "thread_that_waits": lambda on, fixed: in_a_thread(lambda: (on.main if fixed else on.other).wait_stream(on.side)),
    "synchronize_of_another_stream": lambda on, fixed: (on.side if fixed else on.other).synchronize(),
    "synchronize_of_another_device": lambda on, fixed: SIM.synchronize(0 if fixed else 1),
    "query_that_nobody_made": lambda on, fixed: fixed and _polled(on.side.record_event()),
    "sent_on_another_stream_than_the_work": lambda on, fixed: on.within(
        on.side if fixed else on.other, lambda: torch.ones(256).to(on.device)
    ),
}

# The same, called on the side stream with another tensor and one of the host: the host waits for blocking copies.
BLOCKS = {
    "number_read_by_the_host": lambda y, host, fixed: fixed and y[0].item(),
    "copy_to_the_host": lambda y, host, fixed: fixed and y.cpu(),
    "sent_from_pageable_memory": lambda y, host, fixed: y.copy_(host, non_blocking=not fixed),
    # CUDA may wait here; its documentation says not to rely on that.
    "fetched_to_pageable_memory": lambda y, host, fixed: host.copy_(y, non_blocking=not fixed),
    # A copy without elements does not even wait.
    "nothing_sent": lambda y, host, fixed: y[: 256 if fixed else 0].copy_(host[: 256 if fixed else 0]),
    "number_made_on_the_device": lambda y, host, fixed: torch.tensor([1.0], device=y.device if fixed else "cpu"),
    # The host must count the selected elements of a mask, and waits for that. It knows how many integers there are.
    "indexed_by_integers_and_by_a_mask": lambda y, host, fixed: y[y > 0] if fixed else y[y.long()],
    # The host must move its indices, and waits for that.
    "filled_by_indices_of_the_host": lambda y, host, fixed: y.index_fill_(0, y.long(), 3.0) if not fixed else y[[0, 1]],
    # These raise errors of the device's library, which the host must read first.
    "eigenvalues_and_no_factors": lambda y, host, fixed: (torch.linalg.eig if fixed else torch.linalg.qr)(
        torch.diag(y)
    ),
    "inverse_with_a_check": lambda y, host, fixed: torch.linalg.inv_ex(torch.diag(y), check_errors=fixed),
}


@rows(WAITS)
def ordered(on, fixed, wait):
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    wait(on, fixed)
    x.mul(3)  # later: mul


@rows(BLOCKS)
def blocked(on, fixed, block):
    x, y, host = on.tensor(), on.tensor(), torch.ones(256)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        block(y, host, fixed)
    x.mul(3)  # later: mul


# --- what the host reads of a copy that is not over ---

NOWHERE = open(os.devnull, "wb")  # noqa: SIM115 - open for as long as the rows below
READS = {
    "sum": lambda host: host.sum(),
    "tolist": lambda host: host.tolist(),
    "numpy": lambda host: host.numpy(),
    "numpy of an array": lambda host: np.asarray(host),
    "_to_dlpack_versioned": lambda host: np.from_dlpack(host),
    "copy_": lambda host: copy.deepcopy(host),
    "copy_ to pageable memory": lambda host: torch.empty(256).copy_(host),
    "_local_scalar_dense": lambda host: host.untyped_storage()[3],
    "save": lambda host: torch.save({"weight": host}, io.BytesIO()),
    "save of bytes": lambda host: torch.save(host.untyped_storage(), io.BytesIO()),
    "save of a pickle": lambda host: pickle.dumps([host]),
    "fill_ of its memory": lambda host: torch.full((256,), 7.0, out=host),
    # The host reads a number for the kernel at the call, so the host must wait even for the kernel's own stream.
    "mul by its number": lambda host: torch.ones(2, device=NAME) * host[0],
    "save of a file": lambda host: host.untyped_storage()._write_file(NOWHERE, True, False, 1),
}


@rows({f"read early: {name}": ((name.partition(" ")[0], read),) for name, read in READS.items()}, "later")
def read_before_the_copy_is_over(on, fixed, read):
    host = on.tensor().to("cpu", non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    read(host)


# --- what keeps freed memory from being used again ---

KEEPS = {
    # As FSDP frees parameters.
    "storage_resized_to_nothing": lambda on, x, fixed: (
        fixed and on.main.wait_stream(on.side),
        x.untyped_storage().resize_(0),
    ),
    "view_recorded_for_the_stream": lambda on, x, fixed: fixed and x[100:].record_stream(on.side),
}


@rows(KEEPS)
def freed(on, fixed, keep):
    x = on.tensor()
    with on.on(on.side):
        x[10:20].mul(3)  # earlier: mul
    keep(on, x, fixed)
    del x
    torch.ones(256, device=on.device)  # later: fill_
