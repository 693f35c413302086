"""Patterns that programs share: prefetchers, static buffers as CUDA graphs have them, custom backwards, threads,
activation checkpoints, the fused optimizers on a side stream.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from test.torch_ext.sim.races.stage import SIM, in_a_thread, pair


@pair
def batch_sent_ahead_over_the_last_one(on, fixed):
    host = on.pinned()
    with on.on(on.side):
        batch = host.to(on.device, non_blocking=True)
    on.main.wait_stream(on.side)
    if fixed:
        batch.record_stream(on.main)
    batch.mul(3)  # earlier: mul
    del batch
    with on.on(on.side):
        host.to(on.device, non_blocking=True)  # later: copy_


@pair
def custom_backward_leaves_work_on_the_side(on, fixed):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            on.side.wait_stream(SIM.current_stream())
            with on.on(on.side):
                result = gradient * 2  # earlier: mul
            if fixed:
                SIM.current_stream().wait_stream(on.side)
            result.record_stream(SIM.current_stream())
            return result

    x, gradient = on.tensor().requires_grad_(), on.tensor()
    Double.apply(x).backward(gradient)
    x.grad.add_(1)  # later: add


@pair
def hook_copies_a_gradient_on_the_side(on, fixed):
    x, seen = on.tensor().requires_grad_(), on.tensor()

    def copy(gradient):
        if fixed:
            on.side.wait_stream(SIM.current_stream())
        with on.on(on.side):
            seen.copy_(gradient)  # later: copy_
        gradient.record_stream(on.side)

    y = x * 2
    y.register_hook(copy)
    y.backward(on.tensor() + 1)  # earlier: add
    SIM.synchronize()


@pair
def checkpointed_weight_still_being_made(on, fixed):
    x, weight = on.tensor().requires_grad_(), on.tensor()
    with on.on(on.side):
        weight.mul_(2)  # earlier: mul
    on.join(fixed)
    y = checkpoint(lambda x: x * weight, x, use_reentrant=False)  # later: mul
    SIM.synchronize()
    y.sum().backward()


@pair
def event_waited_for_by_another_thread(on, fixed):
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
        filled = on.side.record_event()

    def use():
        with on.on(on.other):
            if fixed:
                filled.wait()
            x.mul(3)  # later: mul

    in_a_thread(use)


@pair
def thread_that_has_the_default_stream_waits(on, fixed):
    # The current stream is a fact of a thread: a new one has the default stream.
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    with on.on(on.other):
        stream = on.other if fixed else None
        in_a_thread(lambda: (stream or SIM.current_stream()).wait_stream(on.side))
        x.mul(3)  # later: mul


@pair
def fused_step_on_the_side(on, fixed):
    weight = nn.Parameter(on.tensor())
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = on.tensor()
    optimizer.step()
    SIM.synchronize()
    weight.grad.mul_(2)  # earlier: mul
    if fixed:
        on.side.wait_stream(on.main)
    with on.on(on.side):
        optimizer.step()  # later: _fused_adamw_
