"""Programs on the streams of one process: what orders accesses, and what only looks as if it did."""

from __future__ import annotations

import threading

import torch

from test.torch_ext.sim.races.stage import SIM, Stage, pair


@pair
def read_after_write(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    if fixed:
        on.main.wait_stream(on.side)
    x.mul(3)  # later: mul


@pair
def write_after_read(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.mul(3)  # earlier: mul
    if fixed:
        on.main.wait_stream(on.side)
    x.fill_(2)  # later: fill_


@pair
def write_after_write(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    if fixed:
        on.main.wait_stream(on.side)
    x.zero_()  # later: zero_


@pair
def slices_that_overlap_by_a_row(on: Stage, fixed: bool) -> None:
    x = on.tensor(8, 4)
    with on.on(on.side):
        x[:4].fill_(2)  # earlier: fill_
    x[4 if fixed else 3 :].mul(3)  # later: mul


@pair
def one_column_and_not_its_neighbour(on: Stage, fixed: bool) -> None:
    x = on.tensor(100, 4)
    with on.on(on.side):
        x[:, 1].fill_(2)  # earlier: fill_
    x[:, 2 if fixed else 1].mul(3)  # later: mul


@pair
def transposed(on: Stage, fixed: bool) -> None:
    x = on.tensor(4, 8)
    with on.on(on.side):
        x.t()[:3].fill_(2)  # earlier: fill_
    x[:, 3 if fixed else 2 :].mul(3)  # later: mul


@pair
def expanded(on: Stage, fixed: bool) -> None:
    x = on.tensor(4, 1)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    if fixed:
        on.main.wait_stream(on.side)
    x.expand(4, 100).sum()  # later: sum


@pair
def every_second_element(on: Stage, fixed: bool) -> None:
    x = on.tensor(100)
    with on.on(on.side):
        x[::2].fill_(2)  # earlier: fill_
    x[1 if fixed else 0 :: 2].mul(3)  # later: mul


@pair
def event_recorded_too_early(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    event = SIM.Event()
    with on.on(on.side):
        event.record()
        x.fill_(2)  # earlier: fill_
        if fixed:
            event.record()
    on.main.wait_event(event)
    x.mul(3)  # later: mul


@pair
def event_never_recorded(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    event = SIM.Event()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        if fixed:
            event.record()
    on.main.wait_event(event)
    x.mul(3)  # later: mul


@pair
def event_recorded_again_after_the_wait(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    event = SIM.Event()
    event.record(on.side)
    if not fixed:
        on.main.wait_event(event)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        event.record()
    if fixed:
        on.main.wait_event(event)
    x.mul(3)  # later: mul


@pair
def event_of_another_stream(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    event = SIM.Event()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    event.record(on.side if fixed else on.other)
    on.main.wait_event(event)
    x.mul(3)  # later: mul


@pair
def wait_of_another_stream(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    (on.main if fixed else on.other).wait_stream(on.side)
    x.mul(3)  # later: mul


@pair
def wait_the_wrong_way_round(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    if fixed:
        on.main.wait_stream(on.side)
    else:
        on.side.wait_stream(on.main)
    x.mul(3)  # later: mul


@pair
def chain_with_a_link_missing(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    if fixed:
        on.other.wait_stream(on.side)
    on.main.wait_stream(on.other)
    x.mul(3)  # later: mul


@pair
def one_of_two_producers_waited_for(on: Stage, fixed: bool) -> None:
    # As in DeepSpeed#8061.
    x, y = on.tensor(), on.tensor()
    with on.on(on.side):
        x.fill_(2)
    with on.on(on.other):
        y.fill_(2)  # earlier: fill_
    on.main.wait_stream(on.side)
    if fixed:
        on.main.wait_stream(on.other)
    torch.cat([x, y])  # later: cat


@pair
def fresh_tensor_used_elsewhere(on: Stage, fixed: bool) -> None:
    x = torch.zeros(256, device="sim:0")  # earlier: zero_
    if fixed:
        on.side.wait_stream(on.main)
    with on.on(on.side):
        x.mul(3)  # later: mul
    on.main.wait_stream(on.side)


@pair
def high_priority_is_no_order(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    urgent = SIM.Stream(priority=-1)
    with on.on(urgent):
        x.fill_(2)  # earlier: fill_
    if fixed:
        on.main.wait_stream(urgent)
    x.mul(3)  # later: mul


@pair
def synchronize_of_another_stream(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    (on.side if fixed else on.other).synchronize()
    x.mul(3)  # later: mul


@pair
def synchronize_of_another_device(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    SIM.synchronize(0 if fixed else 1)
    x.mul(3)  # later: mul


@pair
def query_that_nobody_made(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        event = SIM.Event()
        event.record()
    while fixed and not event.query():
        pass
    x.mul(3)  # later: mul


@pair
def number_read_by_the_host(on: Stage, fixed: bool) -> None:
    x, y = on.tensor(), on.tensor(1)
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        if fixed:
            y.item()
    x.zero_()  # later: zero_


@pair
def copy_to_the_host_on_the_side(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        if fixed:
            x.cpu()
    x.mul(3)  # later: mul


@pair
def stream_handed_to_a_thread(on: Stage, fixed: bool) -> None:
    x = on.tensor()

    def work() -> None:
        with on.on(on.side):
            x.fill_(2)  # earlier: fill_

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if fixed:
        on.main.wait_stream(on.side)
    x.mul(3)  # later: mul


@pair
def out_argument(on: Stage, fixed: bool) -> None:
    x, y = on.tensor(), on.tensor()
    with on.on(on.side):
        torch.mul(x, 2, out=y)  # earlier: mul
    if fixed:
        on.main.wait_stream(on.side)
    y.sum()  # later: sum


@pair
def one_tensor_of_a_list(on: Stage, fixed: bool) -> None:
    xs = [on.tensor() for _ in range(4)]
    with on.on(on.side):
        xs[2].mul(3)  # earlier: mul
    if fixed:
        on.main.wait_stream(on.side)
    torch._foreach_add_(xs, 1)  # later: add


@pair
def index_that_is_still_being_made(on: Stage, fixed: bool) -> None:
    x, index = on.tensor(), torch.zeros(8, dtype=torch.int64, device="sim:0")
    SIM.synchronize()
    with on.on(on.side):
        index.fill_(1)  # earlier: fill_
    if fixed:
        on.main.wait_stream(on.side)
    x.index_select(0, index)  # later: index_select


@pair
def statistics_of_batch_norm(on: Stage, fixed: bool) -> None:
    x, mean, var = on.tensor(16, 4), on.tensor(4), on.tensor(4)
    with on.on(on.side):
        mean.zero_()  # earlier: zero_
    if fixed:
        on.main.wait_stream(on.side)
    torch.nn.functional.batch_norm(x, mean, var, training=True)  # later: native_batch_norm


@pair
def gradient_read_on_the_side(on: Stage, fixed: bool) -> None:
    x = on.tensor().requires_grad_()
    x.grad = torch.zeros_like(x)
    SIM.synchronize()
    (x * 2).sum().backward()  # earlier: add nowhere
    if fixed:
        on.side.wait_stream(on.main)
    with on.on(on.side):
        x.grad.mul(3)  # later: mul
    on.main.wait_stream(on.side)


@pair
def optimizer_on_the_side(on: Stage, fixed: bool) -> None:
    x = on.tensor().requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.1, foreach=False)
    x.grad = on.tensor()
    with on.on(on.side):
        optimizer.step()  # earlier: add
    if fixed:
        on.main.wait_stream(on.side)
    x.detach().mul(3)  # later: mul


@pair
def batch_prefetched_into_a_buffer_in_use(on: Stage, fixed: bool) -> None:
    buffer, batch = on.tensor(), on.tensor()
    buffer.mul(3)  # earlier: mul
    if fixed:
        on.side.wait_stream(on.main)
    with on.on(on.side):
        buffer.copy_(batch)  # later: copy_
    on.main.wait_stream(on.side)


@pair
def conversion_on_the_side(on: Stage, fixed: bool) -> None:
    x, half = on.tensor(), on.tensor().half()
    SIM.synchronize()
    with on.on(on.side):
        half.copy_(x)  # earlier: copy_
    if fixed:
        on.main.wait_stream(on.side)
    half.mul(3)  # later: mul


@pair
def copy_between_devices(on: Stage, fixed: bool) -> None:
    # A copy is in order with the current streams of both devices, and with no other.
    x, y = on.tensor(), on.tensor(device="sim:1")
    side = SIM.Stream(1)
    x.fill_(2)
    y.copy_(x)  # earlier: copy_
    x.zero_()
    if fixed:
        side.wait_stream(SIM.current_stream(1))
    with on.on(side):
        y.mul(3)  # later: mul
