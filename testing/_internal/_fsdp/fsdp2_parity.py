"""FSDP2 against an unsharded replica, which averages its gradients by plain all-reduces
and so depends on neither DDP nor FSDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ext.testing._internal._fsdp.device import world_mesh
from torch_ext.testing._internal._fsdp.extension_hooks import inner_tensors
from torch_ext.testing._internal._fsdp.models.mlp import MLP
from torch_ext.testing._internal._fsdp.step_log import ThreeUnits

__all__ = [
    "average_gradients",
    "check_sharded_parity",
    "check_train_parity",
    "effective_reduce_dtype",
    "fully_shard_units",
    "reduce_scatter_with_assert",
    "sequential_mlps",
    "shard_units",
]


def shard_units(model: ThreeUnits, mesh: DeviceMesh, **options: Any) -> ThreeUnits:
    """Apply ``fully_shard`` with ``options`` over ``mesh`` to the first two units of
    ``model``, then to the whole; return it.
    """
    for unit in (model.first, model.second, model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def fully_shard_units(
    cls: Any, mesh: DeviceMesh | None = None, **options: Any
) -> ThreeUnits:
    """Return a :class:`ThreeUnits` on the device of the test case ``cls``, sharded by
    :func:`shard_units` with ``options`` over ``mesh`` or the world.
    """
    model = ThreeUnits().to(cls.device)
    return shard_units(model, mesh or world_mesh(cls.world_size), **options)


def reduce_scatter_with_assert(
    cls: Any,
    orig_reduce_scatter: Callable[..., Any],
    assert_fn: Callable[[torch.Tensor], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``assert_fn`` on the output tensor of a reduce-scatter, whose values are not
    yet written, then run the reduce-scatter and return its result.

    Bind the first three arguments with :func:`functools.partial`, and pass the partial
    to ``patch_reduce_scatter``.

    Raises:
        AssertionError: the call has no output argument, or ``assert_fn`` raised.
    """
    if not args and "output" not in kwargs:
        raise AssertionError(f"a reduce-scatter without an output: got kwargs {kwargs}")
    assert_fn(args[0] if args else kwargs["output"])
    return orig_reduce_scatter(*args, **kwargs)


def check_sharded_parity(
    cls: Any,
    replicated_module: nn.Module,
    sharded_module: nn.Module,
    prefixes_to_ignore: tuple[str, ...] = (),
) -> None:
    """Check that ``sharded_module`` holds the shards of ``replicated_module``: names,
    values, gradients, placements. Not collective: each rank shards its own tensors.

    ``cls`` is the test case. ``prefixes_to_ignore`` are substrings to remove from the
    sharded names, such as wrappers'.

    Raises:
        AssertionError: anything differs; or a parameter is sharded twice along
            dimension 0, where FSDP's order is not that of ``distribute_tensor``.
    """
    replicated = list(replicated_module.named_parameters())
    sharded = list(sharded_module.named_parameters())
    names = [name for name, _ in sharded]
    for prefix in prefixes_to_ignore:
        names = [name.replace(prefix, "") for name in names]
    cls.assertEqual(names, [name for name, _ in replicated])
    for (name, whole), (_, part) in zip(replicated, sharded, strict=True):
        _check_shard(cls, name, whole.detach(), part, part)
        if (whole.grad is None) != (part.grad is None):
            side = "sharded" if whole.grad is None else "replicated"
            cls.fail(f"{name}: only the {side} parameter has a gradient")
        if whole.grad is not None:
            _check_shard(cls, f"{name}.grad", whole.grad, part.grad, part)


def _check_shard(
    cls: Any, name: str, whole: torch.Tensor, part: object, layout: object
) -> None:
    """Check that ``part`` is this rank's shard of ``whole``, laid out as ``layout``."""
    if not (isinstance(part, DTensor) and isinstance(layout, DTensor)):
        why = "not a DTensor: its module is unsharded"
        raise AssertionError(f"{name} is a {type(part).__name__}, {why}")
    mesh, placements = layout.device_mesh, tuple(layout.placements)
    if placements == (Shard(0), Shard(0)):
        raise AssertionError(
            f"{name}: placements (Shard(0), Shard(0)) have another order of shards "
            "than in distribute_tensor. Compare full_tensor() instead."
        )
    found = tuple(part.placements)
    if (found, part.device_mesh) != (placements, mesh):
        layouts = f"{found} over {part.device_mesh}, expected {placements} over {mesh}"
        raise AssertionError(f"placements of {name} are {layouts}")
    expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    cls.assertEqual(part.shape, whole.shape, f"shape of {name}")
    local, wanted = _comparable(part.to_local(), expected.to_local())
    cls.assertEqual(local, wanted, msg=lambda text: f"{name}: {text}")


def _comparable(*tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return the inner tensors of each, since comparing a subclass may ignore some. A
    plain tensor, such as a reduced gradient, is compared with all of a subclass.
    """
    parts = [
        inner_tensors(each) if hasattr(each, "__tensor_flatten__") else [each]
        for each in tensors
    ]
    count = max(map(len, parts))
    return [inside * count if len(inside) == 1 else inside for inside in parts]


def effective_reduce_dtype(policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the type in which FSDP2 reduces gradients of float32 parameters: without
    ``policy.reduce_dtype`` the type of the computation, and float32 since torch 2.15.
    """
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    follows_parameters = torch.__version__ >= "2.15"
    computed_in = None if follows_parameters else policy.param_dtype
    return computed_in or torch.float32


def sequential_mlps(count: int = 3) -> nn.Sequential:
    """Return up to three MLPs, the same on every rank: ``(*, 5)`` in and out. FSDP2
    pads every parameter of this width on four ranks.
    """
    torch.manual_seed(0)
    multipliers = (2, 3, 2)[:count]
    return nn.Sequential(*(MLP(5, dim_multiplier=each) for each in multipliers))


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
    ``inputs`` has this rank's input of each step. ``check`` (default:
    :func:`check_sharded_parity`) compares gradients and parameters after each backward
    and at the end. ``loss_of`` computes the loss from a model and its input (default:
    the sum of the squared output). ``tolerance`` is for losses.
    """
    models = (reference, sharded)
    compare = check or functools.partial(check_sharded_parity, cls)
    # Not foreach, so that parameters on different meshes may share an optimizer.
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "foreach": False}
    optimizers = [torch.optim.SGD(model.parameters(), **options) for model in models]
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
    after = [parameter.detach() for parameter in reference.parameters()]
    cls.assertNotEqual(before, after)
