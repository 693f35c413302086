"""The tier ``ops``: torch's operators and modules on the device, against the host's kernels.

The samples are those of torch's own databases, op_db and module_db. A case is one operator or module, one way to call
it and one type. It compares up to ``--samples`` samples and ends at the first difference. The ways: ``forward``;
``strided``, where no tensor is contiguous; ``empty``, where none has a row; ``backward``; ``out``, into tensors of
other strides, of no size and of a wrong type; ``in_place``; ``errors``, the database's wrong calls; for a module
``train``, with its gradients and buffers, and ``eval``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torch_ext.accelerator import HOST
from torch_ext.compat.testing import (
    OpInfo,
    SampleInput,
    module_db,
    noncontiguous_like,
    op_db,
    samples_without_sources,
    seed_without_stacks,
    testing_utils,
    tree_leaves,
    tree_map,
)
from torch_ext.conformance import forks
from torch_ext.conformance.forks import Finding, Status
from torch_ext.conformance.observe import Observed, compare, copy_to, is_strided, observe

TYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64)

# Operators that return memory which nothing has written.
_UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
# Operators whose other arguments are on the host for every device.
_WITH_HOST_ARGUMENTS = {"tensor_split"}
_NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"
# Errors by which a device refuses a type. Database entries say which types CUDA lacks.
_REFUSAL = re.compile(r""""[\w<>]+" not implemented for '|Could not run 'aten::|not supported""")

samples_without_sources()
seed_without_stacks()

_OPS = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}
_MODULES = {module.name: module for module in module_db}


def key(options: argparse.Namespace) -> tuple[object, ...]:
    """Return the options on which findings depend."""
    return (options.samples,)


def findings(groups: Mapping[str, Sequence[str]], options: argparse.Namespace) -> Iterator[Finding]:
    """Run the cases of ``groups``, each in a fork."""
    # The database's wrappers restore the generators, which would hide that an operator has drawn.
    vars(testing_utils)["freeze_rng_state"] = contextlib.nullcontext
    return forks.run(groups, Body(options.device, options.samples), slots=options.slots, limit_s=options.timeout)


def groups(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the cases of each operator and module."""
    found = {name: list(_cases_of(op)) for name, op in _OPS.items()}
    for name, module in _MODULES.items():
        types = [dtype for dtype in TYPES if dtype in module.dtypes]
        found[name] = [f"{way} {_name(dtype)}" for dtype in types for way in ("train", "eval")]
    return found


def _cases_of(op: OpInfo) -> Iterator[str]:
    supported = op.supported_dtypes(HOST)
    types = [dtype for dtype in TYPES if dtype in supported] or sorted(supported, key=str)[:1]
    for dtype in types:
        ways = ["forward", "strided", "empty"]
        if op.supports_autograd and dtype in op.supported_backward_dtypes(HOST):
            ways.append("backward")
        if op.supports_out:
            ways.append("out")
        if op.inplace_variant is not None:
            ways.append("in_place")
        yield from (f"{way} {_name(dtype)}" for way in ways)
    if op.error_inputs_func is not None:
        yield "errors"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_Program = Callable[[SampleInput, str], list[Observed]]


class Body:
    """Runs cases on ``device``, each with up to ``samples`` samples."""

    def __init__(self, device: str, samples: int) -> None:
        self._device = device
        self._samples = samples

    def __call__(self, group: str, case: str) -> tuple[Status, str]:
        way, _, name = case.partition(" ")
        if group in _MODULES:
            return self._worst(self._of_module(group, getattr(torch, name), way == "train"))
        op = _OPS[group]
        if way == "errors":
            return self._worst(self._errors(op))
        dtype = getattr(torch, name)
        with_grad = way == "backward"
        samples = itertools.islice(op.sample_inputs(HOST, dtype, requires_grad=with_grad), self._samples or None)
        program = getattr(self, f"_{way}")
        may_lack = dtype not in op.supported_dtypes("cuda")
        written = group not in _UNWRITTEN
        return self._worst(
            each
            for sample in samples
            for each in self._judged(partial(program, op), sample, may_lack=may_lack, elements=written)
        )

    def _judged(
        self, program: _Program, sample: SampleInput, *, may_lack: bool, elements: bool
    ) -> Iterator[tuple[Status, str]]:
        pairs = zip(*(program(sample, where) for where in (HOST, self._device)), strict=True)
        for number, (host, device) in enumerate(pairs):
            if may_lack and device.error and _REFUSAL.search(str(device.error)):
                yield Status.REFUSED, f"CUDA lacks this type, too: {device.error}"
                continue
            found = compare(host, device, self._device, elements=elements)
            if found[0] is Status.DIFFERS:
                meta = self._again(program, sample, "meta", number)
                exact = self._again(program, _mapped(sample, _widened), HOST, number)
                found = compare(host, device, self._device, elements=elements, meta=meta, exact=exact)
            yield found

    @staticmethod
    def _again(program: _Program, sample: SampleInput, where: str, number: int) -> Observed | None:
        try:
            return program(sample, where)[number]
        except Exception:  # such as a sample that has no meta tensors
            return None

    @staticmethod
    def _worst(found: Iterator[tuple[Status, str]]) -> tuple[Status, str]:
        """Return the first difference, else the first rounding."""
        worst = Status.REFUSED, "the database has no sample"
        for number, (status, text) in enumerate(found):
            if status is Status.DIFFERS:
                return status, f"sample {number}: {text}"
            if status is Status.ROUNDS or worst[0] is Status.REFUSED:
                worst = status, text and f"sample {number}: {text}"
        return worst

    # The ways, each a function of an operator, a sample and a device.

    def _forward(self, op: OpInfo, sample: SampleInput, device: str) -> list[Observed]:
        call, arguments = _placed(op.op, sample, device)
        return [observe(call, arguments, device)]

    def _strided(self, op: OpInfo, sample: SampleInput, device: str) -> list[Observed]:
        return self._forward(op, _mapped(sample, noncontiguous_like), device)

    def _empty(self, op: OpInfo, sample: SampleInput, device: str) -> list[Observed]:
        return self._forward(op, _mapped(sample, lambda tensor: tensor[:0] if tensor.dim() else tensor), device)

    def _backward(self, op: OpInfo, sample: SampleInput, device: str) -> list[Observed]:
        found = self._gradients(op, sample, device, of_all=True)
        if _NOT_DIFFERENTIABLE in str(found.error):  # by some arguments, such as running statistics
            found = self._gradients(op, sample, device, of_all=False)
        return [found]

    def _gradients(self, op: OpInfo, sample: SampleInput, device: str, *, of_all: bool) -> Observed:
        leaves = list[torch.Tensor]()
        call, arguments = _placed(op.op, sample, device, leaves, of_all=of_all)
        return observe(lambda: _differentiate(call(), leaves, device), arguments, device, is_backward=True)

    def _in_place(self, op: OpInfo, sample: SampleInput, device: str) -> list[Observed]:
        call, arguments = _placed(op.inplace_variant, sample, device)
        return [observe(call, arguments, device)]

    def _out(self, op: OpInfo, sample: SampleInput, device: str) -> list[Observed]:
        expected = observe(*_placed(op.op, sample, HOST), HOST)
        results = expected.results
        if expected.error or not all(isinstance(each, torch.Tensor) for each in results):
            return []  # other ways compare the error
        found = []
        for make in (_transposed, _sizeless, _of_wrong_type):
            outs = tuple(make(each, device) for each in results)
            call, arguments = _placed(op.op, sample, device, out=outs if len(outs) > 1 else outs[0])
            found.append(observe(call, arguments, device))
        return found

    def _errors(self, op: OpInfo) -> Iterator[tuple[Status, str]]:
        for wrong in op.error_inputs(HOST):
            may_lack = torch.float32 not in op.supported_dtypes("cuda")
            yield from self._judged(partial(self._forward, op), wrong.sample_input, may_lack=may_lack, elements=True)

    def _of_module(self, group: str, dtype: torch.dtype, training: bool) -> Iterator[tuple[Status, str]]:
        module = _MODULES[group]
        inputs = module.module_inputs_func(module, device=HOST, dtype=dtype, requires_grad=False, training=training)
        for each in itertools.islice(inputs, self._samples or None):
            if each.forward_input is None:
                continue
            made = each.constructor_input
            torch.manual_seed(0)
            built = module.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            if any(is_lazy(parameter) for parameter in built.parameters()):
                args, kwargs = copy_to(HOST, (each.forward_input.args, each.forward_input.kwargs))
                built(*args, **kwargs)
            host, device = (self._module(built, each, where, training) for where in (HOST, self._device))
            yield compare(host, device, self._device)

    @staticmethod
    def _module(built: torch.nn.Module, given: Any, device: str, training: bool) -> Observed:
        state = {name: _leaf(value, training) for name, value in copy_to(device, built.state_dict()).items()}
        parameters = [state[name] for name, _ in built.named_parameters()]
        leaves = list[torch.Tensor]() if training else None
        args, kwargs = copy_to(device, (given.forward_input.args, given.forward_input.kwargs), leaves)

        def program() -> Any:
            result = torch.func.functional_call(built, state, args, kwargs)
            return _differentiate(result, [*(leaves or ()), *parameters], device) if training else result

        return observe(program, (list(state.values()), args, kwargs), device, is_backward=True)


def _leaf(value: Any, with_grad: bool) -> Any:
    wants = with_grad and isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.requires_grad_() if wants else value


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _mapped(sample: SampleInput, change: Callable[[torch.Tensor], torch.Tensor]) -> SampleInput:
    """Return the sample with each strided tensor changed."""

    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, torch.Tensor) and is_strided(value) else value

    first, args, kwargs = tree_map(changed, (sample.input, sample.args, sample.kwargs))
    return SampleInput(first, args=args, kwargs=kwargs)


def _placed(
    function: Callable[..., Any],
    sample: SampleInput,
    device: str,
    leaves: list[torch.Tensor] | None = None,
    *,
    of_all: bool = True,
    **more: Any,
) -> tuple[Callable[[], Any], Any]:
    """Return the call of ``function`` with ``sample`` on ``device``, and its arguments."""
    first = copy_to(device, sample.input, leaves)
    rest = HOST if getattr(function, "__name__", "") in _WITH_HOST_ARGUMENTS else device
    args, kwargs = copy_to(rest, (sample.args, sample.kwargs), leaves if of_all else None)
    kwargs |= more
    return (lambda: function(first, *args, **kwargs)), (first, args, kwargs)


def _differentiate(result: Any, leaves: list[torch.Tensor], device: str) -> list[Any]:
    """Return ``result``'s tensors and the gradients of ``leaves``, for fixed gradients of the result."""
    tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    dense = [each for each in tensors if each.requires_grad and is_strided(each)]
    if not dense or not leaves:
        return tensors
    steps = [torch.arange(each.numel(), device=HOST).remainder(7).sub(3).div(4) for each in dense]
    given = [step.to(each.dtype).view(each.shape).to(device) for step, each in zip(steps, dense, strict=True)]
    return [*tensors, *torch.autograd.grad(dense, leaves, given, allow_unused=True)]


def _transposed(like: torch.Tensor, device: str) -> torch.Tensor:
    reverse = tuple(reversed(range(like.dim())))
    return torch.full(tuple(reversed(like.shape)), 1, dtype=like.dtype, device=device).permute(reverse)


def _sizeless(like: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype, device=device)


def _of_wrong_type(like: torch.Tensor, device: str) -> torch.Tensor:
    other = torch.uint8 if like.dtype != torch.uint8 else torch.bool
    return torch.full(tuple(like.shape), 1, dtype=other, device=device)
