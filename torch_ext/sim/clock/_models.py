"""Cost models. Their constants are data: see the JSON files in ``models``.

A constant has its ``value``, and the ``source`` (an address) and ``quote`` that it comes from, or ``"definition"``.
Rates are per nanosecond: of bytes for ``memory``, ``to_device``, ``to_host``, and, one way for each rank, ``link``
within a node and ``network`` between nodes; of operations for ``flops.TYPE``. Latencies are nanoseconds: ``kernel``,
``copy``, ``collective`` and, for each step of a collective's algorithm, ``message`` or, to another node,
``network_message``. ``node`` is the number of ranks on a node; without it all are on one. Latencies that a model lacks
are 0; a rate that it lacks and a program needs is an error.

A kernel lasts ``kernel``. In a roofline, a model with ``flops.TYPE``, it lasts longer by its bytes through ``memory``
or its operations, as ``torch.utils.flop_counter`` counts them, whatever takes more.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import flop_counter

_FOLDER = Path(__file__).parent / "models"
_RATES = {"memory", "to_device", "to_host", "link", "network"}
_OTHERS = {"kernel", "copy", "collective", "message", "network_message", "node"}
MODELS = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


class NoModelError(RuntimeError):
    """The model lacks constants that a program needs."""

    def __init__(self, model: str, names: Iterable[str]) -> None:
        super().__init__(
            f"no model: {model} has no {', '.join(sorted(names))}. Use another type or model, or add the constant with "
            "its source to a copy of the model's file."
        )


@dataclass(frozen=True)
class Model:
    """A cost model: the contents of its file."""

    name: str
    about: str
    validated: bool  # compared with measurements
    constants: dict[str, dict[str, Any]]

    @classmethod
    def load(cls, name: str) -> Model:
        """Load one of ``MODELS``, or the file at a path.

        Raises:
            ValueError: there is no such model, or a constant lacks its source.
        """
        path = _FOLDER / f"{name}.json" if name in MODELS else Path(name)
        if not path.is_file():
            raise ValueError(f"Got the model {name!r}, expected one of {', '.join(MODELS)} or the path of a JSON file.")
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            loaded = cls(path.stem, read["about"], read["validated"], read["constants"])
            loaded.rates()
            without = [key for key, each in loaded.constants.items() if not each.get("source")]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no cost model: {error!r}. {_FOLDER} has examples.") from error
        if without:
            raise ValueError(f"{path}: {', '.join(without)} without a source. Add its address, or drop the constant.")
        wrong = [f"{name} = {value:g}" for name, value in loaded.rates().items() if not _is_possible(name, value)]
        unknown = [name for name in loaded.rates() if name not in _RATES | _OTHERS and not name.startswith("flops.")]
        if unknown:
            known = ", ".join(sorted(_RATES | _OTHERS))
            raise ValueError(f"{path}: got {', '.join(unknown)}, expected {known} or flops.TYPE.")
        if wrong:
            raise ValueError(
                f"{path}: got {', '.join(wrong)}, expected rates above 0, latencies from 0 on, whole nodes."
            )
        return loaded

    def rates(self) -> dict[str, float]:
        """Return the constants' values by name."""
        return {name: float(each["value"]) for name, each in self.constants.items()}

    @property
    def identity(self) -> str:
        """The model's name, with a checksum of its values unless it is one of ``MODELS``."""
        checksum = zlib.crc32(repr(sorted(self.rates().items())).encode())
        return self.name if self.name in MODELS else f"{self.name} ({checksum:08x})"


def _is_possible(name: str, value: float) -> bool:
    is_rate = name in _RATES or name.startswith("flops.")
    return 0 <= value < math.inf and not (is_rate and value == 0) and not (name == "node" and value % 1)


def count_flops(kernel: str, reads: list[list[int]], writes: list[list[int]]) -> int:
    """Return the operations of a kernel of these shapes by torch's formula, or 0 if torch has none.

    >>> count_flops("aten::mm", [[2, 3], [3, 4]], [[2, 4]])
    48
    """
    name = kernel.removeprefix("aten::").removesuffix(".out")
    if name.startswith("_scaled_dot_product_fused_attention_overrideable"):
        if name.endswith("_backward"):
            return int(flop_counter.sdpa_backward_flop_count(*reads[:4]))
        return int(flop_counter.sdpa_flop_count(*reads[:3]))
    if name == "convolution":
        return _count_convolution(reads[0], reads[1], writes[-1])
    if name == "convolution_backward":
        out, x, weight = reads[:3]
        return 2 * _count_convolution(x, weight, out)  # for the gradients of the input and of the weight
    formula = flop_counter.flop_registry.get(getattr(torch.ops.aten, name, None))
    return int(formula(*reads, out_val=writes[-1])) if formula and writes else 0


def _count_convolution(x: list[int], weight: list[int], out: list[int]) -> int:
    # The weight is [out, in / groups, ...], of a transposed convolution [in, out / groups, ...].
    return int(flop_counter.conv_flop_count(x, weight, out, transposed=weight[0] != out[1]))
