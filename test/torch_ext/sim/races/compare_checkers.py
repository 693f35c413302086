"""Compare checkers of races: which of the zoo's pairs each reports, and which of their safe twins.

Runs every pair that needs one process under ``torch.sim.races`` and under torch's CUDA stream sanitizer, on the
simulated device as CUDA's. Prints the pairs on which the two differ, and the counts.

    TORCH_EXT_SIM=cuda python -m test.torch_ext.sim.races.compare_checkers
"""

import contextlib
import io
from collections import Counter

import torch
from torch.cuda import _sanitizer

from test.torch_ext.sim.races import stage
from test.torch_ext.sim.races.test_zoo import PAIRS


def by_sanitizer(pair, fixed):
    sanitizer = _sanitizer.cuda_sanitizer
    sanitizer.dispatch.event_handler.__init__()  # forgets the program before
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


CHECKERS = {
    "torch.sim.races": lambda pair, fixed: "reported" if stage.run(pair, fixed=fixed) else "silent",
    "CUDA stream sanitizer": by_sanitizer,
}


def main():
    counts = Counter()
    for pair in PAIRS:
        ends = {name: (check(pair, False), check(pair, True)) for name, check in CHECKERS.items()}
        for name, (racy, twin) in ends.items():
            counts.update([(f"{name}, races", racy), (f"{name}, twins", twin)])
        if len({*ends.values()}) > 1:
            room = pair.program.__module__.rpartition(".")[2]
            print(f"  {room} {pair.name}: {ends}")
    for (of, end), count in sorted(counts.items()):
        print(f"{of} of {len(PAIRS)}: {end} {count}")


if __name__ == "__main__":
    main()
