"""The helper that runs ranks fails when a rank does, so that the tests which use it can."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from test.torch_ext.sim import ranks


def _pass(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(1, device="sim"))


def _fail(rank: int, world_size: int) -> None:
    assert rank == 0, "this rank is wrong"


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.leave()


def _vanish(rank: int, world_size: int) -> None:
    os._exit(0)


def test_a_rank_that_fails_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 raised.*in _fail.*this rank is wrong"):
        ranks.run(2, _fail)


def test_a_rank_that_dies_must_be_the_one_that_is_meant_to() -> None:
    ranks.run(2, _die, killed=1)
    for killed in (None, 0):
        with pytest.raises(AssertionError, match="rank 1 was killed by SIGKILL"):
            ranks.run(2, _die, killed=killed)
    with pytest.raises(AssertionError):
        ranks.run(2, _pass, killed=1)


def test_a_rank_that_ends_without_a_word_has_not_passed() -> None:
    with pytest.raises(AssertionError, match=r"rank [01] exited with code 0"):
        ranks.run(2, _vanish)
