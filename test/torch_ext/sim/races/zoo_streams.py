"""Programs on the streams of one process: operations that order accesses, and some that only seem to."""

import torch

from test.torch_ext.sim.races.stage import SIM, pair


@pair
def one_column_and_not_its_neighbour(on, fixed):
    x = on.tensor(100, 4)
    with on.on(on.side):
        x[:, 1].fill_(2)  # earlier: fill_
    x[:, 2 if fixed else 1].mul(3)  # later: mul


@pair
def gradient_read_on_the_side(on, fixed):
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
def optimizer_on_the_side(on, fixed):
    x = on.tensor().requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.1, foreach=False)
    x.grad = on.tensor()
    with on.on(on.side):
        optimizer.step()  # earlier: add
    on.join(fixed)
    x.detach().mul(3)  # later: mul


@pair
def copy_between_devices(on, fixed):
    # A copy is in order with the current streams of both devices, and with no other.
    x, y = on.tensor(), on.tensor(device=f"{on.device.type}:1")
    side = SIM.Stream(1)
    x.fill_(2)
    y.copy_(x)  # earlier: copy_
    x.zero_()
    if fixed:
        side.wait_stream(SIM.current_stream(1))
    with on.on(side):
        y.mul(3)  # later: mul
