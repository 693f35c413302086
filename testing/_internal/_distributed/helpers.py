"""Small helpers that test bodies call."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as c10d

from torch_ext import accelerator

__all__ = [
    "captured_output",
    "create_tcp_store",
    "init_multigpu_helper",
    "run_subtests",
    "with_dist_debug_levels",
]

_Test = TypeVar("_Test", bound=Callable[..., Any])

_DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


def run_subtests(
    cls_inst: Any,
    subtest_config: Mapping[str, Sequence[Any]],
    test_fn: Callable[..., Any],
    *test_args: Any,
    **test_kwargs: Any,
) -> None:
    """Call ``test_fn`` once for each combination of values, all in the same ranks. A barrier follows each call.

    Args:
        cls_inst: the test case.
        subtest_config: the values for each keyword argument of ``test_fn``.
        test_args, test_kwargs: passed to every call.

    A note on an exception names the combination that raised it.
    """
    for values in itertools.product(*subtest_config.values()):
        chosen = dict(zip(subtest_config, values, strict=True))
        with cls_inst.subTest(**chosen):
            _reset_dynamo()
            try:
                test_fn(*test_args, **test_kwargs, **chosen)
            except BaseException as error:
                _add_note(
                    error, f"in the subtest with {', '.join(f'{name}={value!r}' for name, value in chosen.items())}"
                )
                raise
            _reset_dynamo()
        c10d.barrier()


def _reset_dynamo() -> None:
    # Importing it takes half a second, and without it there is nothing to reset.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


def with_dist_debug_levels(levels: Sequence[str]) -> Callable[[_Test], _Test]:
    """Run a test once at each of these distributed debug levels (OFF, INFO, DETAIL), then restore the level."""

    def decorator(function: _Test) -> _Test:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = None
            for level in levels:
                with _debug_level(level):
                    result = function(*args, **kwargs)
                    c10d.barrier()
            return result

        return wrapper  # type: ignore[return-value]

    return decorator


@contextlib.contextmanager
def _debug_level(level: str) -> Iterator[None]:
    before = os.environ.get(_DEBUG_VARIABLE)
    try:
        os.environ[_DEBUG_VARIABLE] = level
        c10d.set_debug_level_from_env()
        yield
    finally:
        if before is None:
            os.environ.pop(_DEBUG_VARIABLE, None)
        else:
            os.environ[_DEBUG_VARIABLE] = before
        c10d.set_debug_level_from_env()


def create_tcp_store(
    addr: str = "localhost",
    world_size: int = 1,
    is_master: bool = True,
    timeout: timedelta = timedelta(minutes=5),
    wait_for_workers: bool = True,
    jit_class: bool = False,
    use_libuv: bool = True,
) -> Any:
    """Return a TCP store on a free port, which ``store.port`` tells.

    Args:
        jit_class: return the TorchScript class instead. It needs a port number, so a free port is found first.
    """
    if jit_class:
        import torch

        from torch_ext.compat.testing import find_free_port

        milliseconds = int(timeout / timedelta(milliseconds=1))
        return torch.classes.dist_c10d.TCPStore(addr, find_free_port(), world_size, is_master, milliseconds)
    return c10d.TCPStore(
        addr, 0, world_size, is_master, timeout=timeout, wait_for_workers=wait_for_workers, use_libuv=use_libuv
    )


def init_multigpu_helper(world_size: int, backend: str) -> dict[int, list[int]]:
    """Divide the accelerator's devices among the ranks.

    Returns:
        The device indices of each rank: one if there are enough for all, otherwise an equal share, which may be empty.
    """
    count = accelerator.device_count() if accelerator.is_accelerator() else 0
    share = 1 if world_size <= count else count // world_size
    return {rank: list(range(count))[rank * share : (rank + 1) * share] for rank in range(world_size)}


@contextlib.contextmanager
def captured_output() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Collect what Python code in this process writes to stdout and stderr while the block runs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
