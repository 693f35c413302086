"""Every operator of torch's OpInfo database gives on ``sim`` what it gives on ``cpu``, bit for bit.

By default one sample per operator and type runs; ``TORCH_EXT_SIM_ALL_SAMPLES=1`` runs all of them (CONTRIBUTING.md has
the command). Equality is exact, since the kernels are the same. Gradients are compared for float32. No operator may
draw from the host's generator. op_differences.py lists by name the differences, and the errors of the host.
"""

import contextlib
import itertools
import os
import re
import warnings
from typing import NamedTuple

import pytest
import torch
from torch.testing import _utils
from torch.testing._internal.common_dtype import all_types_and_complex_and
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

from test.torch_ext.sim.one_process.op_differences import (
    GPU_ONLY,
    HOST_ARGUMENTS,
    IN_FLOAT,
    RANDOM_BY_VALUE,
    REFUSED_BY_HOST,
    ROUNDED,
    UNINITIALISED,
    Rounded,
)
from torch_ext.compat.testing import samples_without_sources, seed_without_stacks

samples_without_sources()
seed_without_stacks()

SIM = torch.get_device_module("sim")
ALL_SAMPLES = os.environ.get("TORCH_EXT_SIM_ALL_SAMPLES") == "1"
EXACT = Rounded("")
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class Result(NamedTuple):
    """The result of a call: its tensors, the gradients of its inputs, and which generators it drew from."""

    tensors: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    drew_on_host: bool
    drew_on_device: bool


@pytest.fixture(autouse=True)
def _leave_generators_as_operators_left_them(monkeypatch):
    """The wrappers of samples restore the generators, which would hide an operator's draws."""
    monkeypatch.setattr(_utils, "freeze_rng_state", contextlib.nullcontext)


def _key(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def _types(op):
    supported = op.supported_dtypes("cpu")
    return [dtype for dtype in TYPES if dtype in supported] or sorted(supported, key=str)


def _samples(op, dtype):
    """Host samples: the first one, or all."""
    found = op.sample_inputs("cpu", dtype, requires_grad=False)
    return iter(found) if ALL_SAMPLES else itertools.islice(found, 1)


def _to(value, device):
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, torch.device):
        return torch.device(device)
    return value


def _call(op, sample, device, *, grad, of_input_alone=False):
    """Run the operator on copies of the sample on ``device``; with ``grad``, differentiate it by its floating-point
    arguments, or by its input alone.
    """
    leaves = []

    def place(value, where, differentiable):
        moved = _to(value, where)
        if isinstance(moved, torch.Tensor):
            moved = moved.clone()
            if differentiable and moved.is_floating_point():
                moved.requires_grad_(True)
                leaves.append(moved)
        return moved

    first = tree_map(lambda value: place(value, device, grad), sample.input)
    rest = "cpu" if _key(op) in HOST_ARGUMENTS else device
    of_rest = grad and not of_input_alone
    arguments, keywords = tree_map(lambda value: place(value, rest, of_rest), (sample.args, sample.kwargs))
    if keywords.get("device") == "cpu":
        keywords["device"] = device
    torch.manual_seed(0)
    made = op(first, *arguments, **keywords)
    drew = _who_drew()
    tensors = [value for value in tree_flatten(made)[0] if isinstance(value, torch.Tensor)]
    dense = [value for value in tensors if value.layout == torch.strided]  # the host has no sum of some others
    differentiable = [value for value in dense if value.requires_grad and value.is_floating_point()]
    if not grad or not differentiable:
        return Result(tensors, [], *drew)
    total = sum((value.sum() for value in differentiable), start=torch.zeros((), device=device))
    return Result(tensors, list(torch.autograd.grad(total, leaves, allow_unused=True)), *drew)


def _who_drew():
    """Whether the host's and the device's generator have moved since they were seeded last."""
    untouched = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    _, offset = SIM.get_rng_state().view(torch.int64).tolist()
    return not torch.equal(torch.get_rng_state(), untouched), offset != 0


def _assert_same(op, host, device, *, values):
    if host is None or device is None:
        assert host is device
        return
    if _key(op) in IN_FLOAT and device.dtype == torch.float32:
        device = device.to(host.dtype)
    assert host.shape == device.shape and host.dtype == device.dtype and host.layout == device.layout
    if values:
        rounded = ROUNDED.get(_key(op), EXACT)
        bound = rounded.half if host.dtype == torch.bfloat16 else rounded.full
        torch.testing.assert_close(device.cpu(), host, equal_nan=True, rtol=bound, atol=bound)


def _assert_same_result(op, host, device):
    assert not device.drew_on_host, "drew from the host's generator"
    # A generator of the host does not advance for a result without elements.
    draws = host.drew_on_host or not any(tensor.numel() for tensor in host.tensors) or _key(op) in RANDOM_BY_VALUE
    assert draws >= device.drew_on_device >= host.drew_on_host, "draws random numbers on one of them alone"
    assert len(host.tensors) == len(device.tensors) and len(host.grads) == len(device.grads)
    values = not device.drew_on_device and _key(op) not in UNINITIALISED
    for one, other in zip([*host.tensors, *host.grads], [*device.tensors, *device.grads], strict=True):
        _assert_same(op, one, other, values=values)


def _compare(op, dtype):
    """Compare all samples of one type and return how many there were."""
    compared = 0
    grad = dtype == torch.float32 and op.supports_autograd and _key(op) not in UNINITIALISED
    for sample in _samples(op, dtype):
        how = {"grad": grad, "of_input_alone": False}
        try:
            host = _call(op, sample, "cpu", **how)
        except RuntimeError as error:
            if _key(op) in REFUSED_BY_HOST and REFUSED_BY_HOST[_key(op)] in str(error):
                continue
            if _NOT_DIFFERENTIABLE not in str(error):
                raise
            # The host does not differentiate by some arguments, such as running statistics.
            how["of_input_alone"] = True
            host = _call(op, sample, "cpu", **how)
        compared += 1
        try:
            device = _call(op, sample, "sim", **how)
        except NotImplementedError as error:
            if dtype not in op.supported_dtypes("cuda") and _REFUSED.match(str(error)):
                continue
            raise
        _assert_same_result(op, host, device)
    return compared


# What CUDA lacks: see csrc/refusals.h.
_REFUSED = re.compile(r""""[\w<>]+" not implemented for '|Could not run 'aten::\w+' with arguments from the 'CUDA'""")
_NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"


@pytest.mark.parametrize("op", [op for op in op_db if _key(op) not in GPU_ONLY], ids=_key)
def test_operator_equals_the_host(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sum(_compare(op, dtype) for dtype in _types(op)) > 0


def _types_of_the_host_alone(op):
    """Without bfloat16, which the database lists for the GPU of this machine, and types without other operators."""
    types = all_types_and_complex_and(torch.bool, torch.half)
    found = {dtype for dtype in types if dtype in op.supported_dtypes("cpu") - op.supported_dtypes("cuda")}
    return [] if _key(op) in GPU_ONLY or _key(op).startswith("torch._scaled_mm") else sorted(found, key=str)


@pytest.mark.parametrize("op", [op for op in op_db if _types_of_the_host_alone(op)], ids=_key)
def test_types_that_cuda_lacks_are_refused(op):
    for dtype in _types_of_the_host_alone(op):
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 40))
        assert samples
        with pytest.raises(NotImplementedError, match=_REFUSED), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in samples:  # one is refused; others may have no elements
                _call(op, sample, "sim", grad=False)


def test_operators_for_gpus_alone_have_no_samples_for_the_host_or_are_refused_there():
    for op in op_db:
        if _key(op) in GPU_ONLY:
            for sample in itertools.chain(*(_samples(op, dtype) for dtype in _types(op))):
                refused = "only supported on CUDA and ROCm GPUs"
                with pytest.raises((AssertionError, NotImplementedError), match=refused):
                    _call(op, sample, "cpu", grad=False)


def test_the_lists_of_differences_are_short_and_name_operators():
    keys = {_key(op) for op in op_db}
    named = (
        IN_FLOAT | UNINITIALISED | RANDOM_BY_VALUE | ROUNDED.keys() | HOST_ARGUMENTS | GPU_ONLY | REFUSED_BY_HOST.keys()
    )
    assert keys >= named
