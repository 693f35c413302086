"""What a program did: facts about each tensor that it made or changed, or its error. Compares two such observations.

Tensors are compared by shape, type, layout, stride of each dimension that has several elements, conjugate and negative
bits, ``requires_grad``, whether the device is the argument's, which argument or earlier result shares the memory, and
their elements.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ext.accelerator import HOST
from torch_ext.compat.testing import neg_view, tree_leaves, tree_map
from torch_ext.conformance.forks import Status, first_line

# A message names devices in some of these ways; the rest of it should not depend on the device.
_DEVICES = r"(?i)\b(?:{}|cpu|privateuse1|sparse(?:csr)?(?:cpu|privateuse1)|cuda)(?::\d+)?\b"

# Facts that torch's meta kernels have of a device's results.
_OF_META = {"shape", "dtype", "strides"}


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are at strides in one memory."""
    return tensor.layout == torch.strided and not tensor.is_nested


def copy_to(device: str, value: Any, leaves: list[torch.Tensor] | None = None) -> Any:
    """Return ``value`` with each tensor copied to ``device``, strides included, and the host's name replaced. With
    ``leaves``, floating-point and complex tensors require gradients and are appended to it.
    """

    def place(each: Any) -> Any:
        if isinstance(each, torch.device) or (isinstance(each, str) and each == HOST):
            return type(each)(device)
        if not isinstance(each, torch.Tensor) or each.device.type != HOST:
            return each
        copied = _copy(each.detach(), device)
        if leaves is not None and (copied.is_floating_point() or copied.is_complex()):
            leaves.append(copied.requires_grad_())
        return copied

    return tree_map(place, value)


def _copy(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if not is_strided(tensor) or type(tensor) is not torch.Tensor:
        return tensor.clone().to(device)
    if tensor.is_conj():
        return _copy(tensor.conj(), device).conj()
    if tensor.is_neg():
        return neg_view(_copy(neg_view(tensor), device))
    size, stride = tensor.size(), tensor.stride()
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if tensor.numel() else 0
    memory = torch.as_strided(tensor, (span,), (1,)).clone().to(device)
    return torch.as_strided(memory, size, stride)


@dataclass
class Observed:
    """What a program did on one device: its results, then its arguments as they are afterwards, with facts of each."""

    results: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    facts: list[Mapping[str, Any]] = field(default_factory=list)
    error: Exception | None = None
    drew: bool = False  # drew random numbers, so elements are not compared


def observe(program: Callable[[], Any], arguments: Any, device: str, *, is_backward: bool = False) -> Observed:
    """Run ``program``, which calls something with ``arguments``, and observe it. Which gradients share memory is up to
    each kernel, so with ``is_backward`` that is no fact.
    """
    inputs = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
    devices = [each.device.type for each in inputs]
    torch.manual_seed(0)
    found = Observed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.results = tree_leaves(program())
    except Exception as error:
        found.error = error
        return found
    # Wrappers of the database seed again, which is no draw.
    seeded = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    found.drew = not torch.equal(seeded, torch.get_rng_state())
    seen = None if is_backward else [*inputs]
    for each in found.results:
        if isinstance(each, torch.Tensor):
            found.facts.append(_facts(each, seen, device))
            if seen is not None:
                seen.append(each)
        else:
            found.facts.append({"value": None if found.drew else _plain(repr(each), device)})
    found.facts += [_facts(each, None, was) for each, was in zip(inputs, devices, strict=True)]
    found.values = [*found.results, *inputs]
    return found


def _plain(text: str, device: str) -> str:
    """Return a text without the names of devices and of tensor types, which contain them."""
    text = re.sub(rf"\b(?:torch\.|CPU|{device})(\w+?)(?:Type|Tensor)\b", r"\1", text, flags=re.IGNORECASE)
    return re.sub(_DEVICES.format(device), "DEVICE", text)


def _facts(tensor: torch.Tensor, seen: Iterable[torch.Tensor] | None, device: str) -> dict[str, Any]:
    facts = {
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "device": "the argument's" if tensor.device.type == device else tensor.device.type,
        "requires_grad": tensor.requires_grad,
    }
    if is_strided(tensor):
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        facts["bits"] = tensor.is_conj(), tensor.is_neg()
        facts["strides"] = [step for n, step in pairs if n > 1 and tensor.numel()]
        if seen is not None:
            facts["shares memory with"] = next((i for i, each in enumerate(seen) if _share(tensor, each)), None)
    return facts


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not is_strided(other) or not (one.numel() and other.numel()) or one.device != other.device:
        return one is other
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except RuntimeError:  # a gradient of zeros has no memory
        return False


def compare(
    host: Observed,
    device: Observed,
    name: str,
    *,
    elements: bool = True,
    meta: Observed | None = None,
    exact: Observed | None = None,
) -> tuple[Status, str]:
    """Return whether ``device``'s observation, of a device of type ``name``, agrees with the host's, and if not, the
    first difference.

    Where the host's kernels are not the rule for devices, other observations of the host judge. ``meta`` is of meta
    tensors, whose kernels say which shape, type, strides and error torch expects of a device; ``exact`` is of inputs
    in a wider type, and an element as near to its results as the host's is a rounding.
    """
    if host.error or device.error:
        found = _compare_errors(host.error, device.error, name)
        if meta and meta.error and device.error and not isinstance(meta.error, NotImplementedError):
            expected = _compare_errors(meta.error, device.error, name)
            return expected if expected[0] is Status.AGREES else found
        return found
    if len(host.values) != len(device.values):
        return Status.DIFFERS, f"{len(device.results)} results, the host has {len(host.results)}"
    if device.drew and name != HOST:
        return Status.DIFFERS, "draws from the host's random numbers"
    count = len(host.values)
    of_meta = meta.facts if meta and len(meta.facts) == count else [{}] * count
    wider = exact.values if exact and len(exact.values) == count else [None] * count
    worst = Status.AGREES, ""
    for number, (one, other) in enumerate(zip(host.values, device.values, strict=True)):
        results = len(host.results)
        what = f"result {number}" if number < results else f"argument {number - results} after the call"
        status, text = _compare_facts(host.facts[number], device.facts[number], of_meta[number])
        if status is Status.AGREES and isinstance(one, torch.Tensor) and elements and not host.drew:
            status, text = _compare_values(one, other, wider[number])
        if status is Status.DIFFERS:
            return status, f"{what}: {text}"
        worst = (status, f"{what}: {text}") if status is Status.ROUNDS else worst
    return worst


def _compare_facts(host: Mapping[str, Any], device: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[Status, str]:
    for key, expected in host.items():
        got = device.get(key)
        if got != expected and not (key in _OF_META and key in meta and got == meta[key]):
            return Status.DIFFERS, f"{key} {got}, the host has {expected}"
    return Status.AGREES, ""


def _compare_values(host: torch.Tensor, device: torch.Tensor, exact: Any) -> tuple[Status, str]:
    host, device = host.detach(), device.detach().to(HOST, host.dtype)
    if host.shape != device.shape and not device.numel():  # as meta tensors have it
        device = device.reshape(host.shape)
    status, text = _compare_elements(host, device)
    if status is Status.DIFFERS and _is_wider(exact, host) and device.shape == host.shape:
        error, allowed = ((each.double() - exact.detach().double()).abs().max() for each in (device, host))
        status = Status.ROUNDS if error <= allowed else status
    return status, text


def _is_wider(exact: Any, host: torch.Tensor) -> bool:
    """Whether ``exact`` has the elements of ``host``, of real numbers, in a wider type."""
    is_like = isinstance(exact, torch.Tensor) and exact.shape == host.shape and is_strided(host)
    return is_like and host.is_floating_point() and exact.dtype.itemsize > host.dtype.itemsize


def _compare_elements(host: torch.Tensor, device: torch.Tensor) -> tuple[Status, str]:
    if host.dtype == torch.complex32:  # the host cannot compare it
        host, device = host.to(torch.complex64), device.to(torch.complex64)
    if is_strided(host) and torch.equal(host, device):
        return Status.AGREES, ""
    if host.layout == torch.sparse_coo and (host.is_coalesced(), host._nnz()) != (device.is_coalesced(), device._nnz()):
        return Status.DIFFERS, f"{device._nnz()} sparse entries, the host has {host._nnz()}"
    text = ""
    for status, bound in ((Status.AGREES, 0.0), (Status.ROUNDS, None)):
        try:
            torch.testing.assert_close(device, host, rtol=bound, atol=bound, equal_nan=True)
        except AssertionError as error:
            text = " ".join(str(error).split())
        else:
            return status, text
    return Status.DIFFERS, text


def _compare_errors(host: BaseException | None, device: BaseException | None, name: str) -> tuple[Status, str]:
    if host is None or device is None:
        (who, error) = ("the host", host) if device is None else ("the device", device)
        return Status.DIFFERS, f"only {who} raises {type(error).__name__}: {first_line(str(error))}"
    got, expected = (_plain(first_line(str(each)), name) for each in (device, host))
    if type(host) is not type(device):
        if isinstance(device, type(host)):  # what catches the host's error catches the device's
            return Status.AGREES, ""
        got, expected = f"{type(device).__name__}: {got}", f"{type(host).__name__}: {expected}"
    if got == expected:
        return Status.AGREES, ""
    return Status.DIFFERS, f"raises {got}; the host {expected}"
