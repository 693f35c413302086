"""The helper that runs ranks fails when a rank does, so that the tests which use it can."""

import os
import signal

import pytest

from test.torch_ext.sim import ranks


def _fail(rank, world_size):
    assert rank == 0, "this rank is wrong"


def _die(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.leave()


def _vanish(rank, world_size):
    os._exit(0)


@pytest.mark.parametrize(
    ("body", "killed", "message"),
    [
        (_fail, None, r"(?s)rank 1 raised.*in _fail.*this rank is wrong"),
        (_die, None, "rank 1 was killed by SIGKILL"),
        (_die, 0, "rank 1 was killed by SIGKILL"),
        (_vanish, None, r"rank [01] exited with code 0"),
    ],
)
def test_ranks_that_end_otherwise_fail_the_test(body, killed, message):
    with pytest.raises(AssertionError, match=message):
        ranks.run(2, body, killed=killed)
