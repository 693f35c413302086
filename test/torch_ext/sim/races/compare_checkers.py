"""Compare checkers of races: which of the zoo's pairs each reports, and which of their safe twins.

Runs every pair that needs one process under ``torch.sim.races`` and under torch's CUDA stream sanitizer, on the
simulated device as CUDA's. Prints the counts, and the pairs on which the two differ.

    TORCH_EXT_SIM=cuda python -m test.torch_ext.sim.races.compare_checkers
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import torch
from torch.cuda import _sanitizer

from test.torch_ext.sim.races import stage, zoo_copies, zoo_memory, zoo_orders, zoo_patterns, zoo_streams

PAIRS = stage.pairs_of(zoo_streams, zoo_orders, zoo_memory, zoo_copies, zoo_patterns)


def by_races(pair: stage.Pair, fixed: bool) -> str:
    return "reported" if stage.run(pair, fixed=fixed) else "silent"


def by_sanitizer(pair: stage.Pair, fixed: bool) -> str:
    sanitizer = _sanitizer.cuda_sanitizer
    sanitizer.dispatch.event_handler.__init__()  # type: ignore[misc]  # forgets the program before
    on = stage.Stage()
    sanitizer.enable()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            pair.program(on, fixed)
    except _sanitizer.CUDASanitizerErrors:
        return "reported"
    except Exception as error:
        return f"raised {type(error).__name__}"
    finally:
        sanitizer.disable()
        torch.cuda.synchronize()
    return "silent"


def main() -> None:
    checkers: dict[str, Callable[[stage.Pair, bool], str]] = {
        "torch.sim.races": by_races,
        "CUDA stream sanitizer": by_sanitizer,
    }
    found = {
        name: [(checker(pair, False), checker(pair, True)) for pair in PAIRS] for name, checker in checkers.items()
    }
    for name, ends in found.items():
        for which, column in (("races", 0), ("twins", 1)):
            counts = {end: sum(row[column] == end for row in ends) for end in sorted({row[column] for row in ends})}
            print(f"{name}, {which} of {len(PAIRS)}: {counts}")
    for pair, one, other in zip(PAIRS, *found.values(), strict=True):
        if one != other:
            room = pair.program.__module__.rpartition(".")[2]
            print(f"  {room} {pair.name}: sanitizer {other[0]}, twin {other[1]}")


if __name__ == "__main__":
    main()
