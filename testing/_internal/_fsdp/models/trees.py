"""Models drawn at random: trees of small linear layers with odd sizes, and a regression to train them on.

Runs in float64: what remains between a sharded and an unsharded run is the order of summation.
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
    """A linear layer with ``width`` outputs; ``wrapped`` means that it is sharded by itself."""

    width: int
    bias: bool = True
    wrapped: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """Layers and blocks in sequence, with a bounded nonlinearity after each; ``wrapped`` as one."""

    parts: tuple[LayerSpec | BlockSpec, ...]
    wrapped: bool = False


def module_trees(max_width: int = 6, max_layers: int = 6) -> st.SearchStrategy[BlockSpec]:
    """Return a Hypothesis strategy for descriptions of models; :func:`build_tree` builds them.

    Widths start at 1, so over a few ranks shards are uneven and many are empty. Examples shrink towards a block with a
    single layer of width 1.
    """
    layers = st.builds(LayerSpec, width=st.integers(1, max_width), bias=st.booleans(), wrapped=st.booleans())
    parts: st.SearchStrategy[LayerSpec | BlockSpec] = st.recursive(layers, _blocks, max_leaves=max_layers)
    return st.builds(BlockSpec, parts=_some(parts))


def _blocks(parts: st.SearchStrategy[LayerSpec | BlockSpec]) -> st.SearchStrategy[BlockSpec]:
    return st.builds(BlockSpec, parts=_some(parts), wrapped=st.booleans())


def _some(parts: st.SearchStrategy[LayerSpec | BlockSpec]) -> st.SearchStrategy[tuple[LayerSpec | BlockSpec, ...]]:
    return st.lists(parts, min_size=1, max_size=3).map(tuple)


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def build_tree(
    tree: BlockSpec,
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module] = _as_it_is,
    seed: int = 0,
    dtype: torch.dtype = _DTYPE,
) -> nn.Module:
    """Return the model that ``tree`` describes, on ``device`` and alike wherever the seed is alike.

    Args:
        wrap: called on every part that is to be wrapped, innermost first, and on the whole.
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
    """Train on ``rows`` (of 8) of each step's batch by Adam and return the losses, 1D, one a step.

    With equal shares of the rows on each rank, averaged gradients are those of all rows at once.

    Args:
        accumulate: if given, every other step only adds to the gradients, inside this context.
    """
    # Adam sees by what factor gradients are wrong through eps alone: the default would hide it.
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
