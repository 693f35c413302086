"""Runs in ranks: receives drawn examples from the parent half (see ``examples.py``), runs each, reports a receipt."""

from __future__ import annotations

import functools
import pickle
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as c10d
from hypothesis.errors import HypothesisDeprecationWarning, UnsatisfiedAssumption

from torch_ext.testing._internal._distributed import receipts
from torch_ext.testing._internal._distributed.methods import run_method
from torch_ext.testing._internal.common_utils import set_rng_seed
from torch_ext.world import rank as world_rank
from torch_ext.world.protocol import RankStatus, Receipt

__unittest = True

# Sent instead of an example after the last one.
NO_MORE = b""
# The reason in the receipt of an example that assume() rejected.
REJECTED = "the example does not satisfy assume()"


def serve(case: Any, body: Callable[..., Any]) -> None:
    """Run ``body(case, ...)`` on each example that arrives, until there are no more or one fails.

    The first receipt says that this rank is ready, so that earlier failures are not blamed on an example.

    Raises:
        SystemExit: an example failed.
        TypeError: the ranks of ``case`` are not started for one test.
    """
    rank, examples = world_rank.current(), getattr(case, "parent_pipe", None)
    if rank is None or not isinstance(examples, Connection):
        needed = "across_ranks() needs a test class that starts processes for each test, such as FSDPTest"
        raise TypeError(f"{needed}; got {type(case).__name__}")
    # Hypothesis runs in another process, so assume() would complain that it is used outside of a test.
    warnings.simplefilter("ignore", HypothesisDeprecationWarning)
    rank.report(receipts.passed())
    while example := receipts.next_order(examples):
        if rank.report(_run(case, body, example)).status is RankStatus.FAILED:
            sys.exit(receipts.TEST_ERROR_EXIT_CODE)


def _run(case: Any, body: Callable[..., Any], example: bytes) -> Receipt:
    """Run one example. The barrier at its end finds what it left in the process group, and blames the example."""
    set_rng_seed()
    try:
        receipt = _receipt_of_body(case, body, example)
        if c10d.is_initialized():
            c10d.barrier()
    except BaseException as error:
        failure = receipts.receipt_of(error)
        if failure is None:
            raise
        return failure
    return receipt


def _receipt_of_body(case: Any, body: Callable[..., Any], example: bytes) -> Receipt:
    """Run the body. Return a receipt if it rejects the example or skips, because its peers go on to the barrier."""
    args, kwargs = pickle.loads(example)
    try:
        with receipts.race_check():
            run_method(case, functools.partial(body, case, *args, **kwargs))
    except UnsatisfiedAssumption:
        return receipts.skipped(REJECTED)
    except (Exception, SystemExit) as error:
        receipt = receipts.receipt_of(error)
        if receipt is None or receipt.status is RankStatus.FAILED:
            raise
        return receipt
    return receipts.passed()
