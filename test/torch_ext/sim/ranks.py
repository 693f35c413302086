"""Runs a function in several forked ranks, with a deadline, until the world engine takes over.

Children of a process that has used a device cannot use one, so there a fresh interpreter forks the ranks; suites that
keep their device code in ranks and run first (see conftest.py) spare its start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 120.0
GROUP_TIMEOUT = timedelta(seconds=30)
SHORT = timedelta(seconds=1)  # the time limit of a group in which somebody is meant to run into it


def run(
    world_size: int, body: Callable[..., None], *args: Any, expected: dict[int, int] | None = None, **options: Any
) -> None:
    """Call ``body(rank, world_size, *args)`` in ``world_size`` forked ranks with a process group, and join them.

    Args:
        expected: wait status expected of a rank, 0 where nothing is said; for tests in which a rank dies.
        options: arguments of ``init_process_group`` that differ from the defaults.

    Raises:
        AssertionError: a rank ended otherwise, with its traceback, or did not end before the deadline.
    """
    if torch.get_device_module("sim").is_initialized():
        _run_in_fresh_process(world_size, body, args, expected, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, world_size, Path(folder), body, args, options) for rank in range(world_size)]
        statuses = _join(pids)
        wanted = [(expected or {}).get(rank, 0) for rank in range(world_size)]
        said = "\n".join(path.read_text() for path in sorted(Path(folder).glob("error-*")))
        assert statuses == wanted, f"ranks ended with {statuses}, expected {wanted}\n{said}"


def leave() -> None:
    """End this rank with success and without leaving its group, which is broken or already gone."""
    os._exit(0)


def _run_in_fresh_process(
    world_size: int,
    body: Callable[..., None],
    args: tuple[Any, ...],
    expected: dict[int, int] | None,
    options: dict[str, Any],
) -> None:
    """Fork from a fresh interpreter, since this process has used a device and children of it could not."""
    keywords = {"expected": expected, **options}
    process = multiprocessing.get_context("spawn").Process(target=run, args=(world_size, body, *args), kwargs=keywords)
    process.start()
    process.join(2 * DEADLINE_S)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, f"the ranks' parent ended with {process.exitcode}; its traceback is on stderr"


def _fork(
    rank: int, world_size: int, folder: Path, body: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        torch.get_device_module("sim").set_device(rank % torch.get_device_module("sim").device_count())
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(
            **{"rank": rank, "world_size": world_size, "store": store, "timeout": GROUP_TIMEOUT, **options}
        )
        # A rank that leaves while another still connects to it takes that one's initialization down.
        store.set(f"initialized {rank}", "")
        store.wait([f"initialized {peer}" for peer in range(world_size)], GROUP_TIMEOUT)
        body(rank, world_size, *args)
        dist.destroy_process_group()
        status = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(status)


def _join(pids: list[int]) -> list[int]:
    """Wait for every rank and return its wait status; ranks past the deadline are killed and show as SIGKILL."""
    deadline = time.monotonic() + DEADLINE_S
    statuses: dict[int, int] = {}
    with _alarm(DEADLINE_S):
        for pid in pids:
            try:
                statuses[pid] = os.waitpid(pid, 0)[1]
            except TimeoutError:
                break
    for pid in pids:
        if pid not in statuses:
            assert time.monotonic() >= deadline - 1
            os.kill(pid, signal.SIGKILL)
            statuses[pid] = os.waitpid(pid, 0)[1]
    return [statuses[pid] for pid in pids]


class _alarm:
    """Raises TimeoutError in the main thread after a while, unless the body ends before."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def ring(*_: object) -> None:
            raise TimeoutError

        self.previous = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.previous)
