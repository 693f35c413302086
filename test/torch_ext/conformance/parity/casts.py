"""Autocast: the type that each operator computes in."""

import torch
from torch.nn import functional

from torch_ext.conformance.parity import program, raised

SOURCE = "aten/src/ATen/autocast_mode.h"

def half(gpu, *shape):
    return torch.ones(*shape, device=gpu.type, dtype=torch.float16)

LOWER = ("matmul", "mm", "linear", "conv1d", "bmm", "addmm", "mv", "einsum", "prelu", "baddbmm")
FLOAT = ("exp", "log", "softmax", "sum", "pow", "mse_loss", "layer_norm", "cumsum", "prod", "log_softmax", "rsqrt",
         "softplus", "cosine_similarity", "nll_loss", "logsumexp", "cdist", "norm", "smooth_l1_loss")

@program(f"{SOURCE}: AT_FORALL_LOWER_PRECISION_FP", dict.fromkeys(LOWER, "torch.float16"))
def lower_precision(gpu, name):
    two, three = torch.ones(2, 2, device=gpu.type), torch.ones(1, 2, 2, device=gpu.type)
    calls = {
        "matmul": lambda: two @ two, "mm": lambda: torch.mm(two, two), "linear": lambda: functional.linear(two, two),
        "conv1d": lambda: functional.conv1d(three, torch.ones(1, 2, 1, device=gpu.type)),
        "bmm": lambda: torch.bmm(three, three), "addmm": lambda: torch.addmm(two, two, two),
        "mv": lambda: torch.mv(two, two[0]), "einsum": lambda: torch.einsum("ij,jk->ik", two, two),
        "prelu": lambda: torch.prelu(two, two[0]), "baddbmm": lambda: torch.baddbmm(three, three, three),
    }
    with torch.autocast(gpu.type, torch.float16):
        return str(calls[name]().dtype)

@program(f"{SOURCE}: AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE",
         dict.fromkeys(FLOAT, "torch.float32"))
def full_precision(gpu, name):
    x = half(gpu, 2, 2)
    calls = {
        "softmax": lambda: x.softmax(0), "pow": lambda: x.pow(2), "mse_loss": lambda: functional.mse_loss(x, x),
        "layer_norm": lambda: functional.layer_norm(x, (2,)), "cumsum": lambda: x.cumsum(0), "prod": x.prod,
        "log_softmax": lambda: x.log_softmax(0), "softplus": lambda: functional.softplus(x),
        "cosine_similarity": lambda: functional.cosine_similarity(x, x), "cdist": lambda: torch.cdist(x, x),
        "nll_loss": lambda: functional.nll_loss(x, torch.tensor([0, 1], device=gpu.type)),
        "logsumexp": lambda: x.logsumexp(0), "norm": x.norm, "smooth_l1_loss": lambda: functional.smooth_l1_loss(x, x),
    }
    with torch.autocast(gpu.type, torch.float16):
        return str(calls.get(name, getattr(x, name, None))().dtype)

@program(f"{SOURCE}: AT_FORALL_PROMOTE; aten/src/ATen/autocast_mode.cpp: cat", dict.fromkeys(
    ("addcmul", "atan2", "cat", "stack", "dot", "cross"), "torch.float32"))
def widest_type(gpu, name):
    a, b = half(gpu, 3), torch.ones(3, device=gpu.type)
    calls = {"addcmul": lambda: torch.addcmul(a, a, b), "cat": lambda: torch.cat([a, b]),
             "stack": lambda: torch.stack([a, b])}
    with torch.autocast(gpu.type, torch.float16):
        return str(calls.get(name, lambda: getattr(torch, name)(a, b))().dtype)

@program("aten/src/ATen/autocast_mode.cpp: binary_cross_entropy_banned",
         "RuntimeError: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.")
def banned(gpu):
    x = torch.full((2,), 0.5, device=gpu.type)
    with torch.autocast(gpu.type, torch.float16):
        return raised(lambda: functional.binary_cross_entropy(x, x))

@program("torch/amp/autocast_mode.py: autocast.__enter__, __exit__", ["torch.float32", True, False])
def nested_and_off(gpu):
    two = torch.ones(2, 2, device=gpu.type)
    with torch.autocast(gpu.type, torch.float16):
        with torch.autocast(gpu.type, enabled=False):
            inner = str((two @ two).dtype)
        return [inner, torch.is_autocast_enabled(gpu.type), torch.is_autocast_enabled("cpu")]

@program(
    "aten/src/ATen/autocast_mode.cpp: cached_cast (only 32 bits and devices of the mode)",
    ["torch.float64", "torch.int64"],
)
def types_that_are_not_cast(gpu):
    double, whole = (
        torch.ones(2, 2, device=gpu.type, dtype=torch.float64),
        torch.ones(2, device=gpu.type, dtype=torch.int64),
    )
    with torch.autocast(gpu.type, torch.float16):
        return [str((double @ double).dtype), str((whole + whole).dtype)]

