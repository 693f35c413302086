"""Random models for property-based tests: trees of small linear layers, in float64, so
that a sharded and an unsharded run differ only by the order of summation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
import torch.nn as nn

__all__ = ["BlockSpec", "LayerSpec", "build_tree", "module_trees", "train_tree"]

INPUT_WIDTH = 3
_DTYPE = torch.float64


@dataclass(frozen=True)
class LayerSpec:
    """Describes a linear layer. If ``wrapped``, it is sharded on its own."""

    width: int
    bias: bool = True
    wrapped: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """Describes parts in sequence, each followed by tanh. ``wrapped`` as above."""

    parts: tuple[LayerSpec | BlockSpec, ...]
    wrapped: bool = False


_Parts = st.SearchStrategy[LayerSpec | BlockSpec]


def module_trees() -> st.SearchStrategy[BlockSpec]:
    """Return a Hypothesis strategy for what :func:`build_tree` builds.

    Widths start at 1, so over a few ranks shards are uneven and many are empty.
    Examples shrink towards a block with a single layer of width 1.
    """
    widths, flags = st.integers(1, 6), st.booleans()
    layer = st.builds(LayerSpec, width=widths, bias=flags, wrapped=flags)

    def some(parts: _Parts) -> st.SearchStrategy[tuple[LayerSpec | BlockSpec, ...]]:
        return st.lists(parts, min_size=1, max_size=3).map(tuple)

    parts: _Parts = st.recursive(
        layer,
        lambda inner: st.builds(BlockSpec, parts=some(inner), wrapped=flags),
        max_leaves=6,
    )
    return st.builds(BlockSpec, parts=some(parts))


def build_tree(
    tree: BlockSpec,
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    seed: int = 0,
    dtype: torch.dtype = _DTYPE,
) -> nn.Module:
    """Return the model that ``tree`` describes, with the weights of ``seed``. ``wrap``
    wraps the root and each ``wrapped`` part, innermost first.
    """
    torch.manual_seed(seed)
    make = functools.partial(nn.Linear, dtype=dtype)
    module, _ = _build(tree, INPUT_WIDTH, make, lambda module: wrap(module.to(device)))
    return wrap(module.to(device))


def _build(
    part: LayerSpec | BlockSpec,
    width: int,
    make: Callable[[int, int, bool], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
) -> tuple[nn.Module, int]:
    module: nn.Module
    if isinstance(part, LayerSpec):
        module, width = make(width, part.width, part.bias), part.width
    else:
        modules: list[nn.Module] = []
        for each in part.parts:
            inner, width = _build(each, width, make, wrap)
            modules += [inner, nn.Tanh()]
        module = nn.Sequential(*modules)
    return (wrap(module) if part.wrapped else module), width


def train_tree(
    model: nn.Module,
    rows: slice,
    steps: int,
    device: torch.device,
    accumulate: Callable[[], AbstractContextManager[None]] | None = None,
) -> torch.Tensor:
    """Train by Adam on ``rows`` of each step's batch of 8 and return the losses, one
    for each step. With ``accumulate``, every other step only accumulates gradients,
    inside that context.
    """
    # The default eps would hide a wrong scale of gradients.
    optim = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        batch = torch.randn(8, INPUT_WIDTH, dtype=_DTYPE).to(device)
        with accumulate() if accumulate and step % 2 == 0 else torch.enable_grad():
            loss = model(batch[rows]).square().sum(dim=1).mean()
            loss.backward()
        losses.append(loss.detach())
        if accumulate is None or step % 2:
            optim.step()
            optim.zero_grad()
    return torch.stack(losses)
