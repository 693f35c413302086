"""Failures that say by themselves why a test cannot run here: an error, and its sentence. Without torch."""

from __future__ import annotations

import re

from torch_ext.runner.results import WITHOUT_TESTS, Problem, Raised, RanksFailed

__all__ = ["ASKS_BY_NAME", "WITH_THE_OPTION", "advised", "errors", "reason_of", "told"]

ASKS_BY_NAME = "the test asks for CUDA or NCCL by name"
WITH_THE_OPTION = f"{ASKS_BY_NAME}: --cuda-as-sim has it mean the simulated accelerator"
_TRITON = "needs Triton, which has no compiler for this device"
_SYMMETRIC = (
    "needs symmetric memory, and torch has none for this device: it needs hardware that can map its peers' memory"
)

# What our harness says of a test that --cuda-as-sim has run: the torch has no NCCL, or the file counts CUDA devices.
_NO_NCCL = re.compile(r"^This torch is built without NCCL\.$", re.MULTILINE)
_NO_RANKS = re.compile(r"^no rank was started, because the test's world_size is 0$", re.MULTILINE)
# What upstream's helpers say where Inductor has no Triton for a GPU.
_NEEDS_TRITON = re.compile(r"^(?:requires (?:gpu|triton)\b|Inductor\+gpu needs triton\b)", re.IGNORECASE)
# What upstream's files say themselves where they find no CUDA, in one line.
_WANTS_CUDA = re.compile(
    r"\A(?:(?:no|CUDA|multi-?GPU)\b[^\n]*\b(?:unavailable|not (?:available|supported)|found)"
    r"|(?:no supported device|[Rr]equires|[Nn]eeds)\b[^\n]*\b(?:cuda|CUDA)\b[^\n]*)\.?\Z"
)
_NAMES_CUDA_ITSELF = re.compile(r"\bcuda\b|\bTEST_(?:CUDA|MULTIGPU)\b")
_COUNTS_CUDA = re.compile(r"\bcuda\.device_count\b")

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
_NAMES_SYMMETRIC = (
    re.compile(r"RuntimeError: SymmetricMemory does not (?:support device type|find allocation backend)\b"),
    re.compile(r"NotImplementedError: The operator 'symm_mem::\w+(?:\.\w+)?' is not implemented for the device\b"),
)


def reason_of(error: str, *, cuda_as_sim: bool) -> str:
    """Return why a test that failed with ``error`` cannot run here, in a sentence; empty if the error does not say.

    >>> reason_of("AssertionError: Torch not compiled with CUDA enabled", cuda_as_sim=False)
    'the test asks for CUDA or NCCL by name: --cuda-as-sim has it mean the simulated accelerator'
    >>> reason_of("AssertionError: Torch not compiled with CUDA enabled", cuda_as_sim=True)
    ''
    >>> reason_of("RuntimeError: SymmetricMemory does not support device type sim", cuda_as_sim=True)[:22]
    'needs symmetric memory'
    """
    if any(pattern.match(error) for pattern in _NAMES_TRITON):
        return _TRITON
    if any(pattern.match(error) for pattern in _NAMES_SYMMETRIC):
        return _SYMMETRIC
    # Under --cuda-as-sim nothing should have asked for CUDA, so that this is a failure of ours.
    return WITH_THE_OPTION if not cuda_as_sim and any(pattern.match(error) for pattern in _NAMES_CUDA) else ""


def told(skip: str) -> str:
    """Return why a test was skipped, in words where upstream's helpers have a few only.

    >>> told("requires gpu")
    'needs Triton, which has no compiler for this device: requires gpu'
    >>> told("requires 4 GPUs")
    'requires 4 GPUs'
    """
    return f"{_TRITON}: {skip}" if _NEEDS_TRITON.search(skip) else skip


def advised(skip: str, source: str) -> str:
    """Return why a test of a file was skipped, with the advice of ``--cuda-as-sim`` where that has the test run.

    >>> advised("This torch is built without NCCL.", "")
    'This torch is built without NCCL: --cuda-as-sim has it mean the simulated one'
    >>> told = "no rank was started, because the test's world_size is 0"
    >>> advised(told, "world_size = 0") == told
    True
    >>> advised(told, "world_size = torch.cuda.device_count()").removeprefix(told)
    ', as there is no CUDA device: --cuda-as-sim has CUDA mean the simulated accelerator'
    """
    if skip == WITHOUT_TESTS and _NAMES_CUDA_ITSELF.search(source):
        return f"{skip}, and asks whether there is CUDA: --cuda-as-sim has it mean the simulated accelerator"
    if _WANTS_CUDA.search(skip) and _NAMES_CUDA_ITSELF.search(source):
        return f"{skip.rstrip('.')}: --cuda-as-sim has CUDA mean the simulated accelerator"
    if _NO_NCCL.search(skip):
        return _NO_NCCL.sub("This torch is built without NCCL: --cuda-as-sim has it mean the simulated one", skip)
    if _COUNTS_CUDA.search(source) and (found := _NO_RANKS.search(skip)):
        more = ", as there is no CUDA device: --cuda-as-sim has CUDA mean the simulated accelerator"
        return skip[: found.end()] + more + skip[found.end() :]
    return skip


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
