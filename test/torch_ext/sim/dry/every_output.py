"""The results of every kernel that samples of torch's operators run: ``python every_output.py dry|wet FILE``.

Writes JSON: for each sample the kernels in order, each with the types, sizes and strides of its results, and the error.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torch_ext.compat.testing import samples_without_sources
from torch_ext.sim import dry

samples_without_sources()

TYPES = (torch.bfloat16, torch.float16)


class Record(TorchDispatchMode):
    """Records the results of kernels; ``rows`` has them."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        results = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.rows.append((str(func), [_form(each) for each in results if each.layout == torch.strided]))
        return made


def _form(tensor):
    strides = list(tensor.stride()) if tensor.numel() else []
    return str(tensor.dtype), list(tensor.shape), strides, str(tensor.device)


def on_device(value, leaves):
    """Move host tensors of a value; ``leaves`` collects those of floating point, which require gradients."""

    def move(each):
        if not isinstance(each, torch.Tensor):
            return "sim" if each == "cpu" else each
        moved = each.detach().to("sim", copy=True)
        if moved.is_floating_point():
            leaves.append(moved.requires_grad_())
        return moved

    return tree_map(move, value)


def run(call, arguments, keywords, leaves):
    """Return the rows of ``call``, forward and backward, and its error."""
    torch.manual_seed(0)
    with Record() as record:
        try:
            made = [each for each in tree_leaves(call(*arguments, **keywords)) if isinstance(each, torch.Tensor)]
            found = [each for each in made if each.requires_grad]
            if found:
                torch.autograd.grad([each.sum() for each in found], leaves, allow_unused=True)
        except Exception as error:
            return record.rows, f"{type(error).__name__}: {error}"
    return record.rows, ""


def of_database():
    """Yield a name, a call, its arguments and leaves for one sample of each operator and type."""
    for op in op_db:
        for dtype in TYPES:
            if dtype in op.supported_dtypes("cpu") and not op.name.startswith("sparse."):
                sample = next(iter(op.sample_inputs("cpu", dtype, requires_grad=False)))
                leaves = []
                first, arguments, keywords = on_device((sample.input, sample.args, sample.kwargs), leaves)
                yield f"{op.name} {op.variant_test_name} {dtype}", op, (first, *arguments), keywords, leaves


def of_modules():
    """Likewise for modules that keep statistics, or have kernels of their own."""
    made = {
        "batch norm": lambda: (nn.BatchNorm2d(8), torch.ones(2, 8, 3, 3)),
        "batch norm without weight": lambda: (nn.BatchNorm2d(8, affine=False), torch.ones(2, 8, 3, 3)),
        "instance norm": lambda: (nn.InstanceNorm2d(8), torch.ones(2, 8, 3, 3)),
        "layer norm without weight": lambda: (nn.LayerNorm(8, elementwise_affine=False), torch.ones(2, 8)),
        "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), torch.ones(2, 8)),
        "LSTM": lambda: (nn.LSTM(8, 8), torch.ones(3, 2, 8)),
        "GRU": lambda: (nn.GRU(8, 8), torch.ones(3, 2, 8)),
        "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.ones(2, 3, 8)),
        "bag": lambda: (nn.EmbeddingBag(8, 8, mode="mean"), torch.zeros(2, 3, dtype=torch.int64)),
        "attention": lambda: (lambda q: F.scaled_dot_product_attention(q, q, q), torch.ones(1, 2, 8, 8)),
    }
    for name, make in made.items():
        for dtype in TYPES:
            module, x = make()
            module = module.to("sim", dtype) if isinstance(module, nn.Module) else module
            (moved,) = on_device((x.to(dtype) if x.is_floating_point() else x,), leaves := [])
            yield f"{name} {dtype}", module, (moved,), {}, leaves


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "dry":
        dry.Program(())
    found = {name: run(*call) for samples in (of_modules(), of_database()) for name, *call in samples}
    Path(sys.argv[2]).write_text(json.dumps(found))
