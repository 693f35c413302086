"""The text that tells a user what became of a world. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ext.world.collectives import read_record
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.verdict import Verdict, WorldReport
from torch_ext.world.wording import left_behind, ranks_phrase, without_ranks

__all__ = ["WorldFailure", "end_of_output", "render"]


_CAUSE = ("Fatal Python error:", "terminate called", "Windows fatal exception:")
_OUTPUT_LINES = 20
_COLLECTIVES = 3
# The share of its time that a rank which timed out has waited for a core for, from which on that is told.
_DELAYED = 0.25


class WorldFailure(RuntimeError):
    """A test failed in its ranks. ``report`` is what became of each; as text, the exception tells it."""

    def __init__(self, report: WorldReport) -> None:
        super().__init__(report)
        self.report = report

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self.report.outcomes)

    def __str__(self) -> str:
        return render(self.report)


def render(report: WorldReport) -> str:
    """Return the text of a failed world: the verdict, every rank's ending, then tracebacks and output."""
    outcomes, verdict = report.outcomes, report.verdict
    parts = [verdict.summary, *report.details]
    if verdict.collectives:
        parts.append(f"Collectives: {verdict.collectives}.")
    parts.append(_endings(outcomes, verdict, report.took_s))
    if failed := _failed_sub_tests(outcomes):
        parts.append(f"Sub-tests that failed:\n{_indent(failed)}")
    if any(_was_delayed(outcome, report.took_s) for outcome in outcomes):
        parts.append(
            "This machine had more to do than it has cores: run fewer tests at once (-j, --slots), or raise --timeout."
        )
    if any(outcome.out_of_memory for outcome in outcomes):
        parts.append(
            "The kernel has killed processes of this machine for want of memory while these ranks ran: use fewer ranks "
            "at once, smaller tensors on the host, or --memory, which bounds each simulated device."
        )
    parts += _by_rank(outcomes, verdict)
    return "\n\n".join(parts)


def _by_rank(outcomes: Sequence[Outcome], verdict: Verdict) -> list[str]:
    """Tracebacks, stacks and output, culprits first; what several ranks have in common is shown once."""
    in_order = sorted(outcomes, key=lambda o: (o.rank not in verdict.culprits, o.time_s))
    parts = []
    for title, text_of in (("Traceback", _trace), ("Stacks", _stacks), ("Output", _output)):
        grouped: dict[str, tuple[list[int], str]] = {}
        for outcome in in_order:
            text = text_of(outcome)
            if text:
                # What a rank printed is its own, numbers included.
                key = text if text_of is _output else without_ranks(text)
                grouped.setdefault(key, ([], text))[0].append(outcome.rank)
        parts += [f"{title} of {ranks_phrase(ranks)}:\n{_indent(text)}" for ranks, text in grouped.values()]
    return parts


def _failed_sub_tests(outcomes: Sequence[Outcome]) -> str:
    ranks: dict[str, list[int]] = {}
    for outcome in outcomes:
        for name in outcome.sub_tests if outcome.ending is Ending.FAILED else ():
            ranks.setdefault(name, []).append(outcome.rank)
    return "\n".join(f"{name} on {ranks_phrase(failed)}" for name, failed in ranks.items())


def _trace(outcome: Outcome) -> str:
    return outcome.receipt.trace.rstrip() if outcome.receipt else ""


def _stacks(outcome: Outcome) -> str:
    return outcome.stacks.rstrip()


def _endings(outcomes: Sequence[Outcome], verdict: Verdict, took_s: float) -> str:
    lines = [f"What each rank did in {took_s:.1f} s:"]
    for outcome in outcomes:
        role = "  <- first" if outcome.rank in verdict.culprits[:1] and len(outcomes) > 1 else ""
        because = "  (because of that)" if outcome.rank in verdict.victims and outcome.ending is Ending.FAILED else ""
        lines.append(f"  {outcome.who} {outcome.describe()}{role}{because}")
        lines += [f"    {left_behind(each)}" for each in outcome.left_behind]
        lines += [f"    was in {wait.words}" for wait in outcome.waits if outcome.ending is not Ending.FAILED]
        if _was_delayed(outcome, took_s):
            lines.append(f"    waited for a core for {outcome.delayed_s:.1f} s of these")
        record = read_record(outcome.collectives)
        lines += [f"    {'called' if each.finished else 'was in'} {each}" for each in record[-_COLLECTIVES:]]
    return "\n".join(lines)


def _was_delayed(outcome: Outcome, took_s: float) -> bool:
    return outcome.ending is Ending.TIMED_OUT and outcome.delayed_s >= _DELAYED * took_s > 0


def _output(outcome: Outcome) -> str:
    return "\n".join(end_of_output(outcome.output, died=outcome.ending is Ending.KILLED))


def end_of_output(text: str, *, died: bool) -> list[str]:
    """Return the last lines of what a process printed, and above them how many were left out.

    A process that ``died`` gets more lines: they are all there is to go by, and the cause stands above the stacks.
    """
    lines = text.rstrip().splitlines()
    most = 3 * _OUTPUT_LINES if died else _OUTPUT_LINES
    if len(lines) <= most:
        return lines
    # faulthandler tells first what the process died of, and then a stack that may be long.
    cause = [line for line in lines[:-most] if line.startswith(_CAUSE)][-1:] if died else []
    return [*cause, f"... {len(lines) - most - len(cause)} lines before these", *lines[-most:]]


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
