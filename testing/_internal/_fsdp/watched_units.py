"""A model of three units whose computation, all-gathers and reductions are marked on
the streams' clocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torch_ext.testing._internal._fsdp.patches import (
    ALL_GATHER,
    REDUCE_SCATTER,
    patch_all_gather,
    patch_all_reduce,
    patch_reduce_scatter,
)
from torch_ext.testing._internal._fsdp.step_log import ThreeUnits
from torch_ext.testing._internal._fsdp.streams import StreamOrder

__all__ = ["WatchedUnits"]

_RELATION = re.compile("(.+) (?:overlaps|comes before|issued after) (.+)")


class WatchedUnits:
    """A sharded :class:`ThreeUnits` that marks when each unit is computed, gathered,
    reduced and all-reduced.

    A moment is called ``"0 forward: gather second"``, with the number of the step. Both
    FSDPs gather the unit ``last``, which is the root's, first.

    Args:
        device: where the model is made.
        shard: shards the units ``first`` and ``second`` each on their own, then the
            model, which it returns.
    """

    def __init__(
        self, device: torch.device, shard: Callable[[ThreeUnits], nn.Module]
    ) -> None:
        units = ThreeUnits().to(device)
        self.order, self.phase = StreamOrder(), ""
        self._rows = torch.ones(2, 4, device=device)
        self._names = {
            getattr(units, name).weight.numel(): name for name in units.UNITS
        }
        for name, unit in units.named_children():
            unit.register_forward_hook(self._note_compute(name))
        self.model = shard(units)

    def mark(self, what: str) -> None:
        self.order.mark(f"{self.phase}: {what}")

    def _note_compute(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.mark(f"computed {name}")
            if output.requires_grad:
                args[0].register_hook(lambda _: self.mark(f"computed {name}"))

        return note

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps of the body.

        Raises:
            unittest.SkipTest: the device has no race checker.
        """

        def marking(
            what: str, collective: Callable[..., Any], whole: str, position: int
        ) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                numel = (kwargs[whole] if whole in kwargs else args[position]).numel()
                self.mark(f"{what} {self._names.get(numel) or self._names[2 * numel]}")
                return collective(*args, **kwargs)

            return call

        with (
            self.order.watching(),
            patch_all_gather(marking("gather", getattr(dist, ALL_GATHER), "output", 0)),
            patch_reduce_scatter(
                marking("reduce", getattr(dist, REDUCE_SCATTER), "input", 1)
            ),
            patch_all_reduce(marking("all-reduce", dist.all_reduce, "tensor", 0)),
        ):
            yield

    def run_step(self, number: int) -> None:
        """Run forward and backward, and mark what an optimizer would come after."""
        self.phase = f"{number} forward"
        # A new leaf in each step: hooks stay on a tensor.
        loss = self.model(self._rows.detach().requires_grad_()).sum()
        self.phase = f"{number} backward"
        loss.backward()
        self.mark("optimizer")

    def run_steps(self, number: int) -> None:
        """Watch ``number`` steps."""
        with self.watching():
            for step in range(number):
                self.run_step(step)

    def check(self, case: Any, relations: str) -> None:
        """Check with ``case``'s assertion that moments relate as ``relations`` says, in
        a line for each pair.

        Raises:
            AssertionError: two moments relate otherwise; the message shows both lines.
            ValueError: a line states no relation, or a moment that was not marked.
        """
        case.assertMultiLineEqual(
            relations, "\n".join(map(self._as_found, relations.splitlines()))
        )

    def _as_found(self, line: str) -> str:
        match = _RELATION.fullmatch(line)
        if match is None:
            raise ValueError(
                f"Got {line!r}, expected 'A overlaps B', 'A comes before B' or 'A "
                "issued after B'."
            )
        first, second = match.groups()
        return f"{first} {self.order.relation(first, second)} {second}"
