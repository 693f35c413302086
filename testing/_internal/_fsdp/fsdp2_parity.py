"""FSDP2 against an unsharded replica: compares shards, gradients and training steps.

The replica averages its gradients by plain all-reduces of this module, so that the
reference depends on neither DDP nor FSDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ext.testing._internal._fsdp.extension_hooks import inner_tensors
from torch_ext.testing._internal._fsdp.models.mlp import MLP

__all__ = [
    "average_gradients",
    "check_sharded_parity",
    "check_train_parity",
    "effective_reduce_dtype",
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
    """Call ``assert_fn`` on the output tensor of a reduce-scatter, then run the
    reduce-scatter and return its result.

    Bind the first three arguments with :func:`functools.partial`, and pass the partial
    to ``patch_reduce_scatter``. ``assert_fn`` sees the output before it is written:
    shape, type and device are valid, values are not.

    Raises:
        AssertionError: the call has no output argument. Errors of ``assert_fn`` are
            passed on.
    """
    if not args and "output" not in kwargs:
        raise AssertionError(
            f"a reduce-scatter was called without an output: got args {args} and "
            f"kwargs {kwargs}"
        )
    assert_fn(args[0] if args else kwargs["output"])
    return orig_reduce_scatter(*args, **kwargs)


def check_sharded_parity(
    cls: Any,
    replicated_module: nn.Module,
    sharded_module: nn.Module,
    prefixes_to_ignore: tuple[str, ...] = (),
) -> None:
    """Check that ``sharded_module`` holds the shards of ``replicated_module``: names,
    values, gradients, placements.

    Not collective: each rank shards its own replicated tensors, with the placements of
    the sharded parameters.

    ``cls`` is the test case. ``prefixes_to_ignore`` are substrings to remove from the
    sharded names, such as wrappers'.

    Raises:
        AssertionError: anything differs; or a parameter is sharded twice along
            dimension 0, for which the order of shards in FSDP and in
            ``distribute_tensor`` differs.
    """
    replicated = list(replicated_module.named_parameters())
    sharded = list(sharded_module.named_parameters())
    cls.assertEqual(
        [name for name, _ in replicated],
        [_without(name, prefixes_to_ignore) for name, _ in sharded],
    )
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
        cls.assertIsNone(
            part.grad, f"{name}: only the sharded parameter has a gradient"
        )
        return
    cls.assertIsNotNone(
        part.grad, f"{name}: only the replicated parameter has a gradient"
    )
    gradient = _check_is_dtensor(cls, part.grad, f"{name}.grad")
    cls.assertEqual(
        tuple(gradient.placements), tuple(part.placements), f"placements of {name}.grad"
    )
    cls.assertEqual(gradient.device_mesh, part.device_mesh, f"mesh of {name}.grad")
    _check_shard(cls, whole.grad, gradient, part, f"{name}.grad")


def _check_is_dtensor(cls: Any, tensor: object, name: str) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise AssertionError(
            f"{name} is a {type(tensor).__name__}, not a DTensor: its module is "
            "unsharded"
        )
    return tensor


def _check_shard(
    cls: Any, whole: torch.Tensor, part: DTensor, layout: DTensor, name: str
) -> None:
    if tuple(layout.placements) == (Shard(0), Shard(0)):
        raise AssertionError(
            f"{name}: placements (Shard(0), Shard(0)) have another order of shards "
            "than in distribute_tensor, "
            "so the two cannot be compared. Compare full_tensor() instead."
        )
    expected = distribute_tensor(
        whole, layout.device_mesh, layout.placements, src_data_rank=None
    )
    cls.assertEqual(part.shape, whole.shape, f"shape of {name}")
    found, wanted = _comparable(part.to_local(), expected.to_local())
    cls.assertEqual(found, wanted, msg=lambda text: f"{name}: {text}")


def _comparable(*tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return the inner tensors of each, because comparing a subclass is slow and may
    ignore some of them.

    A plain tensor, such as a gradient that FSDP has reduced, is compared with every
    inner tensor of a subclass.
    """
    parts = [
        inner_tensors(each) if hasattr(each, "__tensor_flatten__") else [each]
        for each in tensors
    ]
    count = max(map(len, parts))
    return [inside * count if len(inside) == 1 else inside for inside in parts]


def effective_reduce_dtype(
    policy: MixedPrecisionPolicy, original: torch.dtype = torch.float32
) -> torch.dtype:
    """Return the type in which FSDP2 reduces gradients of parameters of type
    ``original`` under ``policy``.

    Without ``policy.reduce_dtype`` it is the type of the computation, or since torch
    2.15 the type of the parameters; see the documentation of ``MixedPrecisionPolicy``.
    """
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    # torch.__version__ is a TorchVersion, which compares as one.
    follows_parameters = torch.__version__ >= "2.15"
    return original if follows_parameters else policy.param_dtype or original


def sequential_mlps(count: int = 3, width: int = 5) -> nn.Sequential:
    """Return a sequence of up to three MLPs, the same on every rank. Shapes: ``(*,
    width)`` in and out.

    With the default width no first dimension is divisible by 4, so on four ranks FSDP2
    pads every parameter.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        *(MLP(width, dim_multiplier=multiplier) for multiplier in (2, 3, 2)[:count])
    )


def average_gradients(model: nn.Module) -> None:
    """Average ``model``'s gradients over the world, in place. Collective."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def check_train_parity(
    cls: Any,
    reference: nn.Module,
    sharded: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    check: Callable[[nn.Module, nn.Module], None] | None = None,
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    **tolerance: float,
) -> None:
    """Train both models; compare losses, gradients and parameters in each step, and
    check that parameters change.

    Collective. ``reference`` is a copy of ``sharded`` from before ``fully_shard``, and
    ``inputs`` has this rank's input of each step. ``check`` compares gradients and
    parameters after each backward and at the end, by default with
    :func:`check_sharded_parity`. ``loss_of`` computes the loss from a model and its
    input, by default the sum of the squared output. ``tolerance`` is for losses.
    """
    models = (reference, sharded)
    compare = check or functools.partial(check_sharded_parity, cls)
    # Not foreach, so that parameters on different meshes may share an optimizer.
    optimizers = [
        torch.optim.SGD(
            model.parameters(), lr=_LEARNING_RATE, momentum=0.9, foreach=False
        )
        for model in models
    ]
    before = [parameter.detach().clone() for parameter in reference.parameters()]
    for step, rows in enumerate(inputs):
        losses = [
            loss_of(model, rows) if loss_of else model(rows).square().sum()
            for model in models
        ]
        for loss in losses:
            loss.backward()
        average_gradients(reference)
        cls.assertEqual(losses[1], losses[0], f"loss of step {step}", **tolerance)
        compare(reference, sharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(reference, sharded)
    cls.assertNotEqual(
        before, [parameter.detach() for parameter in reference.parameters()]
    )
