"""The peak memory of operators is that of a GPU's fused kernels: see Note [Scratch memory] in csrc/allocator.h.

Each row has the bytes above the inputs, by hand. Rows with "GPU" were measured on an H200, at another size: what they
hold per element is the same.
"""

import gc

import pytest
import torch
from torch.nn import functional as F

SIM = torch.get_device_module("sim")
DEVICE = "sim:3"
N = 4096  # elements of most inputs
BLOCK = 512  # bytes of a small result, rounded up
F32, BF16 = 4 * N, 2 * N


def f32(*shape, requires_grad=False):
    return torch.randn(*(shape or (N,)), device=DEVICE, requires_grad=requires_grad)


def mixed(call):
    x, y = f32(), f32().bfloat16()
    return lambda: call(x, y)


def reduced(x, dtype=None):
    return lambda: x.sum(dtype=dtype)


def gathered():
    x, index = f32(64, 64).bfloat16(), torch.zeros(64, 64, dtype=torch.int64, device=DEVICE)
    return lambda: x.gather(1, index)


def prepared(call, inputs, backward):
    if not backward:
        return lambda: call(*inputs)
    out = call(*inputs)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad)


def attention(backward=False, heads=4, **options):
    inputs = [f32(1, h, 256, 8, requires_grad=backward) for h in (4, heads, heads)]
    return prepared(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), inputs, backward)


def rms_norm(backward=False):
    inputs = [f32(*shape, requires_grad=True) for shape in ((64, 64), (64,))]
    return prepared(lambda x, weight: F.rms_norm(x, (64,), weight), inputs, backward)


def batch_norm_backward():
    x, layer = f32(4, 4, 16, 16, requires_grad=True), torch.nn.BatchNorm2d(4, device=DEVICE)
    return prepared(lambda x, *_: layer(x), [x, layer.weight, layer.bias], backward=True)


def step(optimizer, **options):
    parameter = f32(requires_grad=True)
    parameter.grad = f32()
    made = optimizer([parameter], **options)
    made.step()  # makes the states
    return made.step


Q = 4 * 4 * 256 * 8  # bytes of queries; a matrix of scores has 32 times as many
LSE, SEEDS = 4 * 4 * 256, 2 * BLOCK
ROWS = {
    "f32 + bf16 (GPU)": (lambda: mixed(lambda x, y: x + y), F32),
    "f32.add_(bf16) (GPU)": (lambda: mixed(lambda x, y: x.add_(y)), 0),
    "f32.mul_(bf16) (GPU)": (lambda: mixed(lambda x, y: x.mul_(y)), 0),
    "bf16.sum(f32) (GPU)": (lambda: reduced(f32().bfloat16(), torch.float32), BLOCK),
    "bool.sum() copies to int64 (GPU)": (lambda: reduced(f32() > 0), 8 * N + BLOCK),
    "f32.sum(f64) copies": (lambda: reduced(f32(), torch.float64), 8 * N + BLOCK),
    "bf16.gather (GPU)": (gathered, BF16),
    "dropout keeps a byte mask (GPU)": (lambda: (lambda x: lambda: F.dropout(x))(f32(requires_grad=True)), F32 + N),
    "attention": (attention, Q + LSE + SEEDS),
    "attention, dropout": (lambda: attention(dropout_p=0.1), Q + LSE + SEEDS),
    "attention, grouped queries": (lambda: attention(heads=2, enable_gqa=True), Q + LSE + SEEDS),
    "attention's gradients": (lambda: attention(backward=True, is_causal=True), 3 * Q),
    "attention's gradients, dropout": (lambda: attention(backward=True, dropout_p=0.1), 3 * Q),
    "attention's gradients, grouped": (lambda: attention(backward=True, heads=2, enable_gqa=True), 2 * Q),
    "batch norm's gradients": (batch_norm_backward, F32 + 2 * BLOCK),
    "RMS norm": (rms_norm, F32 + BLOCK),
    "RMS norm's gradients": (lambda: rms_norm(backward=True), F32 + BLOCK),
    "SGD's step": (lambda: step(torch.optim.SGD, momentum=0.9), 0),
    "AdamW's step, fused": (lambda: step(torch.optim.AdamW, fused=True), 0),
}


@pytest.mark.parametrize("row", ROWS)
def test_an_operator_holds_what_a_fused_kernel_holds(row):
    prepare, expected = ROWS[row]
    gc.collect()  # tensors of a failed test
    with torch.autograd.set_multithreading_enabled(False):  # else a thread frees gradients later
        call = prepare()
        before = SIM.memory_allocated(DEVICE)
        SIM.reset_peak_memory_stats(DEVICE)
        kept = call()
        assert SIM.max_memory_allocated(DEVICE) - before == expected
        del kept


def test_attention_keeps_the_strides_of_its_inputs():
    # Compiled code relies on them, and a model may view the gradient of (2, 16, 4 * 8).
    q, k, v = (f32(2, 16, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v)
    grads = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    assert {x.stride() for x in (out, *grads)} == {q.stride()}


@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_attention_with_dropout_goes_by_its_formula(kind):
    inputs = [f32(*shape).double().requires_grad_() for shape in [(1, 2, 6, 4)] * 3 + [(6, 6)] * (kind == "mask")]

    def attend(*tensors, dropout=0.4):
        torch.manual_seed(3)
        q, k, v, *mask = tensors
        return F.scaled_dot_product_attention(q, k, v, mask[0] if mask else None, dropout, kind == "causal")

    assert torch.autograd.gradcheck(attend, inputs)
    torch.testing.assert_close(attend(*inputs, dropout=1e-12), attend(*inputs, dropout=0))
