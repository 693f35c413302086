"""What a user reads of a program when it has ended. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_ext.program.options import Options, Output
from torch_ext.program.usage import Facts
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.verdict import Verdict, WorldReport, judge, render
from torch_ext.world.wording import PREFIX, left_behind, ranks_phrase

__all__ = ["as_program", "exit_code", "failure", "hang", "remarks"]

# As shells have it: the code of a process that ended by a signal is this and the signal's number.
_BY_SIGNAL = 128
_STOPPED = (Ending.HUNG, Ending.TIMED_OUT)
_SPAWNED = "multiprocessing.spawn"  # in the command lines of what it starts
_MEETING = "in _create_c10d_store"  # in stacks of torch


def as_program(outcomes: Sequence[Outcome], shown: Output) -> list[Outcome]:
    """Return what became of the ranks of a program: one that left with code 0 has passed, as under torchrun, unless
    others failed because it was gone.

    Output that was shown while the ranks ran is left out.
    """
    verdict = judge(outcomes)
    silent = {outcome.rank for outcome in outcomes if outcome.ending is Ending.SILENT}
    missed = bool(verdict.victims) and silent.issuperset(verdict.culprits)
    seen = {Output.ALL: lambda rank: True, Output.RANK0: lambda rank: rank == 0, Output.QUIET: lambda rank: False}
    return [
        replace(
            outcome,
            task="program",
            died_at=outcome.place if outcome.ending is Ending.KILLED else "",
            ending=Ending.PASSED if outcome.rank in silent and not missed else outcome.ending,
            output="" if seen[shown](outcome.rank) else outcome.output,
        )
        for outcome in outcomes
    ]


def exit_code(outcomes: Sequence[Outcome], facts: Sequence[Facts | None], verdict: Verdict) -> int:
    """Return the exit code of the first rank that failed; 128 and the number for a signal, 1 if it was stopped."""
    first = next(iter(verdict.culprits or verdict.victims), 0)
    outcome, told = outcomes[first], facts[first]
    if outcome.ending is Ending.FAILED:
        return (told.exit_code if told is not None else 1) or 1
    if outcome.ending is Ending.KILLED:
        return _BY_SIGNAL - (outcome.exit_code or 0)
    return (outcome.exit_code or 1) if outcome.ending is Ending.EXITED else 1


def failure(options: Options, report: WorldReport) -> str:
    """Return the text of a program that failed."""
    return f"\nFAILED {_name(options)}  {report.took_s:.2f} s\n{render(report)}{_of_addresses(report)}"


def hang(options: Options, report: WorldReport) -> str:
    """Return the text of a program that hangs, and goes on."""
    until = f"--timeout {options.timeout_s:g}" if options.timeout_s else "a time limit of its own"
    return (
        f"\nHUNG {_name(options)}  {report.took_s:.2f} s\n{render(report)}{_of_addresses(report)}\n\n"
        f"{PREFIX}it goes on until {until} or Ctrl-C ends it; with --hang end, a hang ends it"
    )


def _of_addresses(report: WorldReport) -> str:
    """Return who serves addresses if ranks, or what they had spawned, may have waited at one in vain; see
    ``_create_c10d_store`` in torch.
    """
    spawned = [
        outcome.rank
        for outcome in report.outcomes
        if outcome.ending in _STOPPED and any(_SPAWNED in command for command in outcome.left_behind)
    ]
    met = [outcome.rank for outcome in report.outcomes if _MEETING in outcome.stacks + _trace(outcome)]
    own = 'init_method="tcp://..." or a MASTER_PORT that they set'
    if met:
        asked = f"{ranks_phrase(met)} wanted to meet at an address of their own ({own})."
    elif spawned:
        asked = f"{ranks_phrase(spawned)} had spawned processes. Do these meet at an address of their own ({own})?"
    else:
        return ""
    return (
        f"\n\n{asked} Nobody serves it: under a launcher, torchrun too, torch leaves that to the launcher. Ranks that "
        "were launched call init_process_group() with what the launcher has set. Start a program that spawns its ranks "
        "with python (TORCH_EXT_SIM=1 python train.py), or have it remove TORCHELASTIC_USE_AGENT_STORE from os.environ "
        "first."
    )


def _trace(outcome: Outcome) -> str:
    return outcome.receipt.trace if outcome.receipt is not None else ""


def remarks(outcomes: Sequence[Outcome], silent: Sequence[int]) -> list[str]:
    """Return what is worth saying of a program that passed. ``silent`` ranks ended without saying that it was over."""
    lines = [f"rank {outcome.rank} {left_behind(command)}" for outcome in outcomes for command in outcome.left_behind]
    if silent:
        lines.append(
            f"{ranks_phrase(silent)} left by os._exit(0) or the like, which counts as success; races and unused "
            "devices were not looked for there"
        )
    return lines


def _name(options: Options) -> str:
    return f"-m {options.program.target}" if options.program.is_module else options.program.target
