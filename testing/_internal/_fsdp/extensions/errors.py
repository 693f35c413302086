"""The contract's failures, raised on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from torch_ext.testing._internal._fsdp import device

__all__ = ["ContractError", "together"]

_Result = TypeVar("_Result")


class ContractError(AssertionError):
    """A tensor subclass breaks the contract of all-gather extensions. The message says
    where, how, and what to do.
    """


def together(step: Callable[[], _Result]) -> _Result:
    """Run ``step`` on every rank and return its result. If it fails on one rank, fail
    on all.

    A rank that failed alone would leave its peers in their next collective until the
    time limit. Collective over the default group; ``step`` itself must not communicate.

    Raises:
        ContractError: ``step`` failed on some rank. The message groups ranks with the
            same failure.
    """
    failure: str | None = None
    try:
        result = step()
    except Exception as error:
        kind = "" if isinstance(error, ContractError) else f"{type(error).__name__}: "
        failure = f"{kind}{error}"
    failed = torch.tensor(int(failure is not None), device=device.compute_device())
    # Most steps pass, and reducing one number is much cheaper than gathering messages.
    dist.all_reduce(failed)
    if failed.item():
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        raise ContractError(_by_message(failures))
    return result


def _by_message(failures: list[str | None]) -> str:
    """Return each message once, with the ranks that have it.

    >>> print(_by_message(["no hooks", "no hooks", None, "too small"]))
    on ranks 0, 1 of 4: no hooks
    on rank 3 of 4: too small
    """
    ranks: dict[str, list[int]] = {}
    for rank, message in enumerate(failures):
        if message is not None:
            ranks.setdefault(message, []).append(rank)
    return "\n".join(
        f"on rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))} of "
        f"{len(failures)}: {message}"
        for message, those in ranks.items()
    )
