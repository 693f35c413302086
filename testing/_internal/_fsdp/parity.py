"""Checks of sharded tensors against tensors that are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ext.testing._internal._fsdp.extensions.values import inner_tensors

__all__ = ["check_sharded_parity", "reduce_scatter_with_assert"]


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
