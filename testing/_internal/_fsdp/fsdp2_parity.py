"""FSDP2 against an unsharded replica: shards, gradients, whole training steps.

The replica averages its gradients by plain all-reduces of this module, so that the reference depends on neither DDP nor
FSDP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ext.testing._internal._fsdp.cases import FourRankTest
from torch_ext.testing._internal._fsdp.extensions.values import inner_tensors
from torch_ext.testing._internal._fsdp.models.mlp import MLP

__all__ = [
    "FullyShardParityTest",
    "average_gradients",
    "check_sharded_parity",
    "effective_reduce_dtype",
    "full_tensor",
    "fully_shard_children",
    "reduce_scatter_with_assert",
    "sequential_mlps",
]

_LEARNING_RATE = 0.05


def reduce_scatter_with_assert(
    cls: Any,
    orig_reduce_scatter: Callable[..., Any],
    assert_fn: Callable[[torch.Tensor], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``assert_fn`` on the output tensor of a reduce-scatter, then run the reduce-scatter and return its result.

    Bind the first three arguments with :func:`functools.partial` and hand the rest to ``patch_reduce_scatter``. The
    output is seen before it is written: its shape, type and device hold, its values do not.

    Raises:
        AssertionError: the call has no output argument; and whatever ``assert_fn`` raises.
    """
    if not args and "output" not in kwargs:
        raise AssertionError(f"a reduce-scatter was called without an output: got args {args} and kwargs {kwargs}")
    assert_fn(args[0] if args else kwargs["output"])
    return orig_reduce_scatter(*args, **kwargs)


def check_sharded_parity(
    cls: Any,
    replicated_module: nn.Module,
    sharded_module: nn.Module,
    prefixes_to_ignore: tuple[str, ...] = (),
) -> None:
    """Check that ``sharded_module`` holds the shards of ``replicated_module``: names, values, gradients, placements.

    Not collective: each rank cuts its shard out of its own replicated tensors, by the layout of the sharded parameter.

    Args:
        cls: the test case, for its assertions.
        replicated_module: plain tensors, the same number of parameters in the same order.
        sharded_module: DTensor parameters; a gradient must exist where the replicated one does, and be laid out as
            its parameter is.
        prefixes_to_ignore: substrings to drop from the sharded names, such as those of wrappers.

    Raises:
        AssertionError: anything differs; or a parameter is sharded twice along dimension 0, where FSDP's order of
            shards is not ``distribute_tensor``'s.
    """
    replicated, sharded = list(replicated_module.named_parameters()), list(sharded_module.named_parameters())
    cls.assertEqual([name for name, _ in replicated], [_without(name, prefixes_to_ignore) for name, _ in sharded])
    for (name, whole), (_, parameter) in zip(replicated, sharded, strict=True):
        part = _check_is_dtensor(cls, parameter, name)
        _check_shard(cls, whole.detach(), part, part, name)
        _check_gradient(cls, whole, part, name)


def _without(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        name = name.replace(prefix, "")
    return name


def _check_gradient(cls: Any, whole: torch.Tensor, part: DTensor, name: str) -> None:
    if whole.grad is None:
        cls.assertIsNone(part.grad, f"{name}: only the sharded parameter has a gradient")
        return
    cls.assertIsNotNone(part.grad, f"{name}: only the replicated parameter has a gradient")
    gradient = _check_is_dtensor(cls, part.grad, f"{name}.grad")
    cls.assertEqual(tuple(gradient.placements), tuple(part.placements), f"placements of {name}.grad")
    cls.assertEqual(gradient.device_mesh, part.device_mesh, f"mesh of {name}.grad")
    _check_shard(cls, whole.grad, gradient, part, f"{name}.grad")


def _check_is_dtensor(cls: Any, tensor: object, name: str) -> DTensor:
    cls.assertIsInstance(tensor, DTensor, name)
    if not isinstance(tensor, DTensor):  # for the type checker: the assertion above has already failed
        raise AssertionError(f"{name}: got {type(tensor).__name__}, expected DTensor")
    return tensor


def _check_shard(cls: Any, whole: torch.Tensor, part: DTensor, layout: DTensor, name: str) -> None:
    if tuple(layout.placements) == (Shard(0), Shard(0)):
        raise AssertionError(
            f"{name}: placements (Shard(0), Shard(0)) order their shards otherwise than distribute_tensor does, "
            "so the two cannot be compared. Compare full_tensor() instead."
        )
    expected = distribute_tensor(whole, layout.device_mesh, layout.placements, src_data_rank=None)
    cls.assertEqual(part.shape, whole.shape, f"shape of {name}")
    found, wanted = _comparable(part.to_local(), expected.to_local())
    cls.assertEqual(found, wanted, msg=lambda text: f"{name}: {text}")


def _comparable(*tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return the tensors inside each: comparing a subclass dispatches dozens of operations and may look at one part.

    A plain tensor, as FSDP reduces gradients into, stands for every part of a subclass.
    """
    parts = [inner_tensors(each) if hasattr(each, "__tensor_flatten__") else [each] for each in tensors]
    count = max(map(len, parts))
    return [inside * count if len(inside) == 1 else inside for inside in parts]


def effective_reduce_dtype(policy: MixedPrecisionPolicy, original: torch.dtype = torch.float32) -> torch.dtype:
    """Return the type in which FSDP2 reduces gradients of parameters of type ``original`` that ask for no other type.

    Without ``policy.reduce_dtype`` it is the type of the computation, and since torch 2.15 that of the parameters (see
    the documentation of ``MixedPrecisionPolicy``).
    """
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    follows_parameters = torch.__version__ >= "2.15"  # a TorchVersion, which compares as one
    return original if follows_parameters else policy.param_dtype or original


def sequential_mlps(count: int = 3, width: int = 5) -> nn.Sequential:
    """Return up to three perceptrons in turn, the same on every rank.

    By default no number of ranks divides a width, so that every parameter is padded. Shapes: ``(*, width)`` in and out.
    """
    torch.manual_seed(0)
    return nn.Sequential(*(MLP(width, dim_multiplier=multiplier) for multiplier in (2, 3, 2)[:count]))


def fully_shard_children(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each child of ``model``, then ``model`` with what is left; return it."""
    for child in model.children():
        fully_shard(child, **options)
    fully_shard(model, **options)
    return model


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient of ``model``, which every rank holds whole, by its mean over the world. Collective."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` unsharded and detached. Collective if it is a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class FullyShardParityTest(FourRankTest):
    """Four ranks, each with data of its own, that train a sharded model and a whole one in the same steps."""

    def rows(self, width: int, step: int = 0, count: int = 3) -> torch.Tensor:
        """Return this rank's data of that step, shape ``(count, width)``; no other rank or step has the same."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(count, width, generator=generator).to(self.device)

    def replica(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model``, taken before it is sharded, on this rank's device."""
        return copy.deepcopy(model).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # One tensor at a time, so that parameters of different meshes may share an optimizer.
        return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9, foreach=False)

    def check_train_parity(
        self,
        reference: nn.Module,
        sharded: nn.Module,
        width: int,
        *,
        steps: int = 2,
        check: Callable[[nn.Module, nn.Module], None] | None = None,
        loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
        **tolerance: float,
    ) -> None:
        """Train both and compare loss, gradients and parameters in each step, and that parameters moved. Collective.

        Args:
            reference: plain tensors, a :meth:`replica` of ``sharded``.
            sharded: has been given to ``fully_shard``.
            width: last dimension of the input.
            steps: optimizer steps.
            check: compares gradients and parameters after each backward and at the end; shard by shard by default.
            loss_of: of a model and its input; by default the sum of the squared output.
            tolerance: ``atol`` and ``rtol`` for losses.
        """
        compare = check or self.check_shards
        optimizers = [self.optimizer(model) for model in (reference, sharded)]
        before = [parameter.detach().clone() for parameter in reference.parameters()]
        for step in range(steps):
            losses = [(loss_of or _squares)(model, self.rows(width, step)) for model in (reference, sharded)]
            for loss in losses:
                loss.backward()
            average_gradients(reference)
            self.check_equal(f"loss of step {step}", losses[1], losses[0], **tolerance)
            compare(reference, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        compare(reference, sharded)
        self.assertNotEqual(before, [parameter.detach() for parameter in reference.parameters()])

    def check_shards(self, reference: nn.Module, sharded: nn.Module, **kwargs: Any) -> None:
        """Compare parameters and gradients shard by shard, layouts included."""
        check_sharded_parity(self, reference, sharded, **kwargs)

    def check_whole(self, reference: nn.Module, sharded: nn.Module) -> None:
        """Compare parameters and gradients unsharded, for layouts that ``distribute_tensor`` orders otherwise."""
        pairs = zip(reference.named_parameters(), sharded.named_parameters(), strict=True)
        for (name, expected), (_, found) in pairs:
            self.check_equal(name, full_tensor(found), expected.detach())
            self.check_equal(f"{name} has a gradient", found.grad is None, expected.grad is None)
            if expected.grad is not None and found.grad is not None:
                self.check_equal(f"{name}.grad", full_tensor(found.grad), expected.grad)


def _squares(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().sum()
