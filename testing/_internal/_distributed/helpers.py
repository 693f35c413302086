"""Small helpers that test bodies call."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import socket
import sys
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.compat.c10d import _get_default_store
from torch_ext.world import rank as world_rank
from torch_ext.world import wording
from torch_ext.world.settings import LIMIT_ATTRIBUTE, seconds_of
from torch_ext.world.verdict import check_ran
from torch_ext.world.wording import add_note, ranks_phrase

__all__ = [
    "captured_output",
    "create_tcp_store",
    "init_multigpu_helper",
    "run_subtests",
    "with_dist_debug_levels",
    "with_timeout",
]

_Test = TypeVar("_Test", bound=Callable[..., Any])

_DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
_PLAIN = (bool, int, str, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter)
# torch.equal knows these on each device; it refuses some that assertEqual compares, such as complex32.
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def plainly_equal(x: Any, y: Any) -> bool:
    """Whether ``x`` and ``y`` have one type and equal values, so that torch's ``assertEqual(x, y)`` would pass. That
    takes 100 times as long for tensors, and a suite compares thousands. False also where only ``assertEqual`` can say.
    """
    if type(x) is not type(y):
        return False
    if type(x) not in _TENSORS:
        return type(x) in _PLAIN and bool(x == y)
    alike = x.dtype == y.dtype and x.device == y.device and x.layout == y.layout == torch.strided
    return alike and x.dtype in _DTYPES and not x.is_meta and torch.equal(x, y)


def run_subtests(
    cls_inst: Any,
    subtest_config: Mapping[str, Sequence[Any]],
    test_fn: Callable[..., Any],
    *test_args: Any,
    **test_kwargs: Any,
) -> None:
    """Call ``test_fn(*test_args, **test_kwargs, ...)`` once for each combination of the values in ``subtest_config``,
    all in the same ranks, with a barrier after each. A note on an exception names its subtest.

    All ranks must skip the same subtests, whose number the run prints with the reasons. The test skips if all do.

    Raises:
        ValueError: there is no combination.
        AssertionError: some ranks skipped a subtest that others ran.
        unittest.SkipTest: all ranks skipped all subtests.
    """
    empty = [name for name, values in subtest_config.items() if not values]
    if empty:
        raise ValueError(f"there is no subtest to run: {', '.join(map(repr, empty))} has no values")
    skipped = Counter[str]()
    combinations = list(itertools.product(*subtest_config.values()))
    grid = cls_inst._torch_ext_grids = getattr(cls_inst, "_torch_ext_grids", 0) + 1
    for number, values in enumerate(combinations):
        chosen = dict(zip(subtest_config, values, strict=True))
        name = ", ".join(f"{axis}={value!r}" for axis, value in chosen.items())
        # Not within case.subTest(), which continues after a failure: the next subtest's collectives would then match
        # this one's on ranks where it has not failed.
        _reset_dynamo()
        reason = _run_subtest(name, functools.partial(test_fn, *test_args, **test_kwargs, **chosen))
        _reset_dynamo()
        if reason is not None:
            skipped[reason] += 1
        _compare_skips(f"{cls_inst.id()}/{grid}/{number}", name, reason)
    if not skipped:
        return
    listed = ", ".join(f"{count} x {reason}" for reason, count in skipped.most_common())
    summary = f"{skipped.total()} of {len(combinations)} subtests skipped: {listed}"
    if skipped.total() == len(combinations):
        raise unittest.SkipTest(summary)
    if c10d.get_rank() == 0:
        # The output of a rank is shown only if the test fails.
        process = world_rank.current()
        announce = process.notify if process else wording.announce
        announce(f"{cls_inst.id()}: {summary}")


def _run_subtest(name: str, call: Callable[[], Any]) -> str | None:
    """Run one subtest; return why it skipped, or None if it ran."""
    try:
        check_ran(call(), f"the subtest with {name}")
    except unittest.SkipTest as skip:
        return str(skip)
    except BaseException as error:
        add_note(error, f"in the subtest with {name}")
        raise
    return None


def _compare_skips(key: str, name: str, reason: str | None) -> None:
    """Wait for all ranks at the end of a subtest, and raise an AssertionError if only some skipped it.

    A rank that skips sets a key in the store before the barrier, so that one look after it shows whether ranks agree.
    """
    if not c10d.is_initialized():
        c10d.barrier()  # raises the error that says so
        return
    store, rank, size = _get_default_store(), c10d.get_rank(), c10d.get_world_size()
    if reason is not None:
        store.set(f"{key}/{rank}", reason)
        store.set(f"{key}/skipped", "")
    c10d.barrier()
    if c10d.get_backend() == "fake" or not (reason is not None or store.check([f"{key}/skipped"])):
        return
    reasons = {peer: store.get(f"{key}/{peer}").decode() for peer in range(size) if store.check([f"{key}/{peer}"])}
    if len(reasons) < size:
        others = ranks_phrase([peer for peer in range(size) if peer not in reasons])
        why = ", ".join(dict.fromkeys(reasons.values()))
        raise AssertionError(
            f"{ranks_phrase(list(reasons))} skipped the subtest with {name} ({why}), {others} did not. "
            "Make the condition the same on every rank."
        )


def _reset_dynamo() -> None:
    # Importing it takes half a second; if it is not loaded, there is nothing to reset.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def with_timeout(seconds: float) -> Callable[[_Test], _Test]:
    """Give one test its own time limit, in seconds.

    Raises:
        ValueError: the limit is no finite number above 0.
    """
    seconds_of(seconds, "the limit of @with_timeout")

    def decorator(function: _Test) -> _Test:
        setattr(function, LIMIT_ATTRIBUTE, seconds)
        return function

    return decorator


def with_dist_debug_levels(levels: Sequence[str]) -> Callable[[_Test], _Test]:
    """Run a test once at each of these distributed debug levels (OFF, INFO, DETAIL), then restore the level."""

    def decorator(function: _Test) -> _Test:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # Not by mock.patch.dict, which clears the environment at its end: gloo's threads may read it then.
            result, before = None, os.environ.get(_DEBUG_VARIABLE)
            try:
                for level in levels:
                    os.environ[_DEBUG_VARIABLE] = level
                    c10d.set_debug_level_from_env()
                    result = function(*args, **kwargs)
                    c10d.barrier()
            finally:
                os.environ.pop(_DEBUG_VARIABLE, None)
                if before is not None:
                    os.environ[_DEBUG_VARIABLE] = before
                c10d.set_debug_level_from_env()
            return result

        return wrapper  # type: ignore[return-value]

    return decorator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a TCP port of this machine that no other process is given until the block is left: a socket stays bound to
    it. A store that names it may bind it, because stores set ``SO_REUSEADDR``.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


def create_tcp_store(
    addr: str = "localhost",
    world_size: int = 1,
    is_master: bool = True,
    timeout: timedelta = timedelta(minutes=5),
    wait_for_workers: bool = True,
    jit_class: bool = False,
    use_libuv: bool = True,
) -> Any:
    """Return a TCP store with the arguments of ``dist.TCPStore``, on a free port: its attribute ``port``. ``jit_class``
    returns the TorchScript class instead.
    """
    if jit_class:
        import torch

        milliseconds = int(timeout / timedelta(milliseconds=1))
        with reserved_port() as port:
            return torch.classes.dist_c10d.TCPStore(addr, port, world_size, is_master, milliseconds)
    return c10d.TCPStore(
        addr, 0, world_size, is_master, timeout=timeout, wait_for_workers=wait_for_workers, use_libuv=use_libuv
    )


def init_multigpu_helper(world_size: int, backend: str) -> dict[int, list[int]]:
    """Return the device indices of each rank: one if there are enough, otherwise an equal share, which may be empty."""
    count = accelerator.device_count() if accelerator.is_accelerator() else 0
    share = 1 if world_size <= count else count // world_size
    return {rank: list(range(count))[rank * share : (rank + 1) * share] for rank in range(world_size)}


@contextlib.contextmanager
def captured_output() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Collect what Python code in this process writes to stdout and stderr while the block runs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
