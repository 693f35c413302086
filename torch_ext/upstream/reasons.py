"""Failures that say by themselves why a test cannot run here: an error, and its sentence. Without torch."""

from __future__ import annotations

import re

from torch_ext.runner.results import Problem, Raised, RanksFailed

__all__ = ["ASKS_BY_NAME", "WITH_THE_OPTION", "errors", "reason_of"]

ASKS_BY_NAME = "the test asks for CUDA or NCCL by name"
WITH_THE_OPTION = f"{ASKS_BY_NAME}: --cuda-as-sim has it mean the simulated accelerator"
_TRITON = "needs Triton, which has no compiler for this device"

# Errors that a build without CUDA raises wherever it is asked for.
_NAMES_CUDA = (
    re.compile(r"AssertionError: Torch not compiled with CUDA enabled"),
    re.compile(r"RuntimeError: Distributed package doesn't have NCCL built in"),
    re.compile(r"RuntimeError: Attempting to deserialize object on a CUDA device"),
    re.compile(r"RuntimeError: Invalid device, must be cuda device"),
)
_NAMES_TRITON = (
    re.compile(r"ModuleNotFoundError: No module named 'triton"),
    re.compile(r"\w*(?:Triton|BackendCompilerFailed)\w*: .*[Cc]annot find a working triton installation"),
    re.compile(r"(?:\w+\.)*TritonMissing\b"),
)


def reason_of(error: str, *, cuda_as_sim: bool) -> str:
    """Return why a test that failed with ``error`` cannot run here, in a sentence; empty if the error does not say.

    >>> reason_of("AssertionError: Torch not compiled with CUDA enabled", cuda_as_sim=False)
    'the test asks for CUDA or NCCL by name: --cuda-as-sim has it mean the simulated accelerator'
    >>> reason_of("AssertionError: Torch not compiled with CUDA enabled", cuda_as_sim=True)
    ''
    """
    if any(pattern.match(error) for pattern in _NAMES_TRITON):
        return _TRITON
    # Under --cuda-as-sim nothing should have asked for CUDA, so that this is a failure of ours.
    return WITH_THE_OPTION if not cuda_as_sim and any(pattern.match(error) for pattern in _NAMES_CUDA) else ""


def errors(problem: Problem) -> list[str]:
    """Return the first line of each exception that ``problem`` is; an empty text for what is no exception."""
    if isinstance(problem, Raised):
        return [problem.error]
    if isinstance(problem, RanksFailed):
        receipts = [outcome.receipt for outcome in problem.report.outcomes if not outcome.ok]
        # A rank whose peer is gone fails or hangs because of it, but not with an error that speaks for itself.
        own = [
            receipt.reason
            for receipt in receipts
            if receipt is not None and (not receipt.transport or reason_of(receipt.reason, cuda_as_sim=False))
        ]
        return own or [""]
    return [""]
