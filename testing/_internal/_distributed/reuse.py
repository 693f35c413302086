"""Ranks that serve all tests of a class that would otherwise start fresh ones for each: ``--reuse class``.

Note [Reused ranks]
~~~~~~~~~~~~~~~~~~~
What a test leaves behind in its ranks, the next one finds: globals, caches, the random state of libraries, the process
group of FSDP's test cases. That is faster where ranks or groups start slowly, and it is how tests are found out that
depend on those before them (``--audit-order``). Ranks are kept only after a test that every rank has passed or skipped,
and only for one with the same number of ranks, environment, working directory and arguments. So a failure costs its own
test and no other.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch.distributed as c10d

from torch_ext import accelerator
from torch_ext.testing._internal._distributed import receipts
from torch_ext.world import rank as world_rank
from torch_ext.world.follow import World, ZygoteLostError
from torch_ext.world.outcome import Outcome
from torch_ext.world.protocol import Said

__unittest = True

__all__ = ["Conditions", "Kept", "in_reused_rank", "run_tests_in_rank"]

_reused = False


def in_reused_rank() -> bool:
    """Whether this process is a rank that serves more than one test: a group may be there, and is to stay."""
    return _reused


class Conditions(NamedTuple):
    """What must be the same for two tests to share ranks."""

    size: int
    kwargs: tuple[tuple[str, Any], ...]
    environment: dict[str, str]
    directory: str
    argv: tuple[str, ...]

    @classmethod
    def now(cls, size: int, kwargs: dict[str, Any]) -> Conditions:
        """Return those that hold in this process."""
        return cls(size, tuple(sorted(kwargs.items())), dict(os.environ), os.getcwd(), tuple(sys.argv))


class Kept:
    """The ranks of a class between two of its tests."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._conditions: Conditions | None = None

    def take(self, conditions: Conditions, test: str, name: str, file_name: str) -> World | None:
        """Have the kept ranks run a test, and return them; None if there are none that fit."""
        world, self._world = self._world, None
        if world is None:
            return None
        with contextlib.suppress(ZygoteLostError):
            world.pump(0)
            if conditions == self._conditions and all(process.exitcode is None for process in world.processes):
                ticket = world.new_round(test)
                for process in world.processes:
                    with contextlib.suppress(OSError):  # it died just now, which its outcome will tell
                        process.connections[1].send((ticket, name, file_name))
                return world
        world.close()
        return None

    def keep(self, world: World, conditions: Conditions, outcomes: list[Outcome]) -> bool:
        """Keep the ranks for the next test if all are alive and none failed; return whether they are kept."""
        if any(not outcome.ok or outcome.exit_code is not None for outcome in outcomes):
            return False
        self._world, self._conditions = world, conditions
        return True

    def end(self) -> None:
        """End the ranks."""
        world, self._world = self._world, None
        if world is not None:
            world.close()


def run_tests_in_rank(
    devices: int,
    run: Callable[..., None],
    rank: int,
    name: str,
    file_name: str,
    pipe: Connection,
    tests: Connection,
    **kwargs: Any,
) -> None:
    """The body of a rank: call ``run`` (a class's ``_run``) for its first test, and for each that ``tests`` brings."""
    global _reused
    _reused = True
    me = world_rank.this_rank()
    accelerator.request_devices(devices)
    while True:
        connection = Connection(os.dup(pipe.fileno()))
        receipt = receipts.run_test(run, rank, name, file_name, connection, **kwargs)
        if me.report(receipt).said is Said.FAILED:
            sys.exit(receipts.TEST_ERROR_EXIT_CODE)
        try:
            ticket, name, file_name = tests.recv()
        except (EOFError, OSError):  # the parent half has let go
            ticket = None
        # Now that all ranks have reported: before, another one may not have made its group yet.
        if receipts.take_wish_to_end_group() and c10d.is_initialized():
            c10d.destroy_process_group()
        if ticket is None:
            return
        me.begin(ticket)
