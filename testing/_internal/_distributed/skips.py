"""Skips: the exit codes that stand for a reason, and the decorators that require hardware or backends."""

from __future__ import annotations

import functools
import os
import sys
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.compat import testing as torch_testing

__all__ = [
    "ACCELERATOR_DIST_BACKENDS",
    "TEST_SKIPS",
    "TestSkip",
    "at_least_x_gpu",
    "get_required_world_size",
    "requires_accelerator_dist_backend",
    "requires_gloo",
    "requires_nccl",
    "requires_world_size",
    "skip_if_lt_x_gpu",
    "skip_if_no_gpu",
    "skip_if_rocm_multiprocess",
]

_Test = TypeVar("_Test", bound=Callable[..., Any])

ACCELERATOR_DIST_BACKENDS = ["nccl", "xccl", "hccl"]


class TestSkip(NamedTuple):
    """An exit code that means "skipped", and the reason it stands for."""

    exit_code: int
    message: str


TestSkip.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for a test class


_ANY_REASON = 86
_TORCH_TABLE = "torch.testing._internal.common_distributed"


def _too_few_devices(exit_code: int, needed: int) -> TestSkip:
    devices = f"{needed} accelerator device{'s' if needed > 1 else ''}"
    return TestSkip(exit_code, f"Needs {devices}. Run with --device sim to use simulated ones.")


class _SkipTable(dict[str, TestSkip]):
    """Upstream has exit codes for up to 8 devices. Larger numbers get the code for any reason."""

    def __missing__(self, name: str) -> TestSkip:
        count = name.removeprefix("multi-gpu-")
        if count == name or not count.isdecimal():
            raise KeyError(name)
        return _too_few_devices(_ANY_REASON, int(count))


# The exit codes are upstream's: test classes elsewhere call sys.exit() with them.
TEST_SKIPS: dict[str, TestSkip] = _SkipTable(
    {
        "backend_unavailable": TestSkip(72, "The process group's backend is not available on this machine."),
        "small_worldsize": TestSkip(73, "The world size is too small for this test."),
        "odd_worldsize": TestSkip(87, "The world size is odd."),
        "no_cuda": TestSkip(74, "No accelerator is available. Run with --device sim to use the simulated one."),
        "nccl": TestSkip(76, "This torch is built without NCCL."),
        "skipIfRocm": TestSkip(78, "The test does not work on ROCm."),
        "no_peer_access": TestSkip(79, "The GPUs cannot access each other's memory."),
        "generic": TestSkip(_ANY_REASON, "A rank skipped the test; its output says why."),
        "importerror": TestSkip(88, "A module that the test needs cannot be imported."),
        "no_accelerator": TestSkip(89, "No accelerator is available. Run with --device sim to use the simulated one."),
        **{
            f"multi-gpu-{count}": _too_few_devices(code, count)
            for count, code in enumerate((75, 77, 80, 81, 82, 83, 84, 85), start=1)
        },
    }
)


def skip_reason(exit_code: object) -> str:
    """Return the reason that ``exit_code`` stands for, in our table or torch's; empty if it does not mean "skipped"."""
    tables: list[Mapping[str, Any]] = [TEST_SKIPS]
    if _TORCH_TABLE in sys.modules:  # its import takes seconds per rank; its codes need it loaded
        tables.append(torch_testing.TEST_SKIPS)
    for table in tables:
        for skip in table.values():
            if skip.exit_code == exit_code:
                return str(skip.message)
    return ""


def at_least_x_gpu(x: int) -> bool:
    """Whether the device under test is an accelerator with at least ``x`` devices."""
    return accelerator.is_accelerator() and accelerator.device_count() >= x


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Callable[[_Test], _Test]:
    """Skip a test, in its ranks, unless the accelerator under test has at least ``x`` devices. The simulated one has as
    many as the test needs. ``allow_cpu`` runs it on ``cpu`` too, which has no memory apart from the host's.
    """

    def reason() -> str:
        enough = at_least_x_gpu(x) or (allow_cpu and not accelerator.is_accelerator())
        return "" if enough else f"multi-gpu-{x}"

    def decorator(function: _Test) -> _Test:
        wrapper = _skip_if(reason, function)
        wrapper._required_devices = x  # type: ignore[attr-defined]
        return wrapper

    return decorator


def _skip_if(reason: Callable[[], str], function: _Test) -> _Test:
    """Skip ``function``, in its ranks, if ``reason`` returns a name of ``TEST_SKIPS``: through the test class's own
    handler if it has one, else as :func:`skip_rank` does.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        name = reason()
        if not name:
            return function(*args, **kwargs)
        handler = getattr(args[0], "_handle_test_skip", None) if args else None
        if handler is None:
            skip_rank(name)
        return handler(TEST_SKIPS[name].message)

    return wrapper  # type: ignore[return-value]


def required_devices(cls: type, test_name: str = "") -> int:
    """Return how many devices the decorators of a test require, or 0. Without a name, the maximum over all tests."""
    names = [test_name] if test_name else [name for name in dir(cls) if name.startswith("test")]
    tests = [getattr(cls, name, None) for name in names]
    attributes = ("_required_devices", "_required_world_size")
    return max((int(getattr(test, attribute, 0)) for test in tests for attribute in attributes), default=0)


def skip_if_no_gpu(func: _Test) -> _Test:
    """Skip a test, in its ranks, unless there is a device for each. Reads ``WORLD_SIZE`` from the environment."""

    def reason() -> str:
        if not accelerator.is_accelerator():
            return "no_cuda"
        world_size = int(os.environ["WORLD_SIZE"])
        return "" if at_least_x_gpu(world_size) else f"multi-gpu-{world_size}"

    return _skip_if(reason, func)


def skip_rank(name: str) -> NoReturn:
    """Skip the test in this rank, for the reason that ``TEST_SKIPS`` has under ``name``: by its exit code, or by a
    ``unittest.SkipTest`` if other reasons have it too.
    """
    skip = TEST_SKIPS[name]
    if skip.exit_code == _ANY_REASON:
        raise unittest.SkipTest(skip.message)
    sys.exit(skip.exit_code)


def requires_world_size(n: int) -> Callable[[_Test], _Test]:
    """Run this test with ``n`` ranks. Skip it if an accelerator that is not simulated has fewer devices."""

    def decorator(function: _Test) -> _Test:
        function._required_world_size = n  # type: ignore[attr-defined]

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if accelerator.is_accelerator() and not at_least_x_gpu(n):
                found = f"{accelerator.device_count()} of {accelerator.device_type()}"
                raise unittest.SkipTest(f"requires {n} devices, found {found}")
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorator


def get_required_world_size(obj: Any, default: int) -> int:
    """Return the world size that :func:`requires_world_size` sets for the current test, else ``default``."""
    name = getattr(obj, "_testMethodName", "")
    current = getattr(obj, "_current_test_name", None)
    if current is not None:
        name = current() if callable(current) else current
    return int(getattr(getattr(type(obj), name, None), "_required_world_size", default))


def requires_gloo() -> Callable[[_Test], _Test]:
    """Skip unless this torch has the gloo backend."""
    return unittest.skipUnless(c10d.is_gloo_available(), "This torch is built without gloo.")


def requires_nccl() -> Callable[[_Test], _Test]:
    """Skip unless this torch has the NCCL backend."""
    return unittest.skipUnless(c10d.is_backend_available("nccl"), TEST_SKIPS["nccl"].message)


def requires_accelerator_dist_backend(backends: Sequence[str] | None = None) -> Callable[[_Test], _Test]:
    """Skip unless one of ``backends`` is available; by default, unless an accelerator's own backend is. The backend of
    the device under test counts wherever an accelerator's does.
    """
    wanted = list(backends or ACCELERATOR_DIST_BACKENDS)
    if accelerator.is_accelerator() and not set(ACCELERATOR_DIST_BACKENDS).isdisjoint(wanted):
        wanted.append(accelerator.backend())
    available = any(c10d.is_backend_available(name) for name in wanted)
    return unittest.skipUnless(available, f"This torch has none of the backends {', '.join(wanted)}.")


def skip_if_rocm_multiprocess(func: _Test) -> _Test:
    """Skip on ROCm builds."""
    return unittest.skipIf(torch.version.hip is not None, TEST_SKIPS["skipIfRocm"].message)(func)
