"""What test files need besides base classes. Other names are torch's own."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy.random  # numpy loads it on use, which takes every rank ten milliseconds
import torch
from torch.testing._internal import common_utils as _upstream
from torch.testing._internal.common_utils import (
    FILE_SCHEMA,
    SEED,
    TestCase,
    find_free_port,
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)

from torch_ext import accelerator

# torch's advice on how to rerun a test fits its own checkout only.
_upstream.PRINT_REPRO_ON_FAILURE = False

__all__ = [
    "FILE_SCHEMA",
    "SEED",
    "TestCase",
    "find_free_port",
    "get_cycles_per_ms",
    "instantiate_parametrized_tests",
    "parametrize",
    "run_tests",
    "set_rng_seed",
    "subtest",
]


def __getattr__(name: str) -> Any:
    return getattr(_upstream, name)


def run_tests(argv: Sequence[str] | None = None) -> None:
    """Run the tests of the file that is ``__main__``, and exit: with 0 if all passed, 1
    if a test failed, 2 for wrong usage or if nothing was selected, 130 if interrupted.
    Do nothing where the file was only imported (in a zygote, by another runner).
    """
    main = sys.modules["__main__"]
    if main.__name__ != "__main__" or not getattr(main, "__file__", None):
        return
    from torch_ext.runner.cli import main_for_file  # a zygote needs no runner

    arguments = sys.argv[1:] if argv is None else argv
    raise SystemExit(main_for_file(str(main.__file__), arguments, _load_device))


def _load_device(requested: str) -> None:
    """Load the device here, before this process is forked, for all ranks."""
    if requested:
        os.environ[accelerator.DEVICE_VARIABLE] = requested
    accelerator.device_type()


def set_rng_seed(seed: int | None = None) -> None:
    """Seed the generators of Python, numpy, torch and the device under test, by default
    as torch does, whose function asks every device type: milliseconds in every rank.
    """
    number = SEED if seed is None else seed
    random.seed(number)
    numpy.random.seed(number)
    torch.default_generator.manual_seed(number)
    if accelerator.is_accelerator():
        accelerator.device_module().manual_seed_all(number)


# TestCase.setUp seeds through this name in the parent half of every test, while ranks
# start.
_upstream.set_rng_seed = set_rng_seed


@functools.cache
def get_cycles_per_ms() -> float:
    """Return how many cycles of ``torch.<device>._sleep`` take a millisecond, measured
    once with the device's events.

    Raises:
        RuntimeError: ``accelerator.can_sleep()`` is false.
    """
    if not accelerator.can_sleep():
        kind = accelerator.device_type()
        raise RuntimeError(f"{kind} has no _sleep; sleep on the host instead")
    module, cycles = accelerator.device_module(), 1_000_000
    samples = []
    for _ in range(9):  # the first ones include start-up; the median ignores them
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        start.record()
        module._sleep(cycles)
        end.record()
        end.synchronize()
        samples.append(cycles / max(start.elapsed_time(end), 1e-6))
    return sorted(samples)[len(samples) // 2]
