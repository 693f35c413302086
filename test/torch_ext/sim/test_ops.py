"""Every operator of torch's OpInfo database gives on ``sim`` what it gives on ``cpu``, bit for bit.

By default one sample per operator and type runs; ``TORCH_EXT_SIM_ALL_SAMPLES=1`` runs all of them. Equality is exact,
since the kernels are the same. Gradients are compared for float32.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import torch_ext.sim  # noqa: F401 - registers the device
from test.torch_ext.sim.op_differences import FAILING, RANDOM, UNINITIALISED

ALL_SAMPLES = os.environ.get("TORCH_EXT_SIM_ALL_SAMPLES") == "1"
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def _key(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Host samples; an operator whose generator of samples fails on the host itself has none."""
    try:
        found = op.sample_inputs("cpu", dtype, requires_grad=False)
        yield from found if ALL_SAMPLES else itertools.islice(found, 1)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return


def _to(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, torch.device):
        return torch.device(device)
    return value


def _call(op: Any, sample: Any, device: str, *, grad: bool) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Run the operator on copies of the sample on ``device``; return its tensors and the inputs' gradients."""
    leaves: list[torch.Tensor] = []

    def place(value: Any) -> Any:
        moved = _to(value, device)
        if isinstance(moved, torch.Tensor):
            moved = moved.clone()
            if grad and moved.is_floating_point():
                moved.requires_grad_(True)
                leaves.append(moved)
        return moved

    arguments, keywords = tree_map(place, ((sample.input, *sample.args), sample.kwargs))
    if keywords.get("device") == "cpu":
        keywords["device"] = device
    torch.manual_seed(0)
    made = op(*arguments, **keywords)
    tensors = [value for value in tree_flatten(made)[0] if isinstance(value, torch.Tensor)]
    differentiable = [value for value in tensors if value.requires_grad and value.is_floating_point()]
    if not grad or not differentiable:
        return tensors, []
    total = sum((value.sum() for value in differentiable), start=torch.zeros((), device=device))
    return tensors, list(torch.autograd.grad(total, leaves, allow_unused=True))


def _assert_same(op: Any, host: torch.Tensor | None, device: torch.Tensor | None) -> None:
    if host is None or device is None:
        assert host is device
        return
    assert host.shape == device.shape and host.dtype == device.dtype and host.layout == device.layout
    if _key(op) not in RANDOM and _key(op) not in UNINITIALISED:
        torch.testing.assert_close(device.cpu(), host, rtol=0, atol=0, equal_nan=True)


def _compare(op: Any, dtype: torch.dtype) -> int:
    """Compare all samples of one type and return how many there were."""
    compared = 0
    grad = dtype == torch.float32 and op.supports_autograd and _key(op) not in RANDOM | UNINITIALISED
    for sample in _samples(op, dtype):
        try:
            host, host_grads = _call(op, sample, "cpu", grad=grad)
        except Exception:
            continue  # what the host refuses is not the device's business
        device, device_grads = _call(op, sample, "sim", grad=grad)
        assert len(host) == len(device) and len(host_grads) == len(device_grads)
        for one, other in zip([*host, *host_grads], [*device, *device_grads], strict=True):
            _assert_same(op, one, other)
        compared += 1
    return compared


@pytest.mark.parametrize("op", op_db, ids=_key)
def test_operator_equals_the_host(op: Any) -> None:
    supported = [dtype for dtype in TYPES if dtype in op.supported_dtypes("cpu")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if _key(op) in FAILING:
            with pytest.raises(Exception):  # noqa: B017 - whatever the failure is, it must still be one
                sum(_compare(op, dtype) for dtype in supported)
            pytest.skip(FAILING[_key(op)])
        compared = sum(_compare(op, dtype) for dtype in supported)
    if not compared:
        pytest.skip("the host gives no result to compare with")


def test_the_list_of_differences_is_short() -> None:
    keys = {_key(op) for op in op_db}
    assert set(FAILING) <= keys and keys >= RANDOM
    assert len(FAILING) <= len(keys) // 100  # 99 % of what runs on the host runs on the device
