"""The block of text that tells a user what became of a world. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch_ext.world.collectives import first_mismatch, read_record
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.phrases import ranks_phrase
from torch_ext.world.verdict import Verdict

__all__ = ["end_of_output", "render"]

_OUTPUT_LINES = 20
_COLLECTIVES = 3
# In faulthandler's dumps, the same every time: the thread that listens to the parent half, the frames from where a
# rank's body or a class of tests was called outwards, and the list of extension modules.
_FRAME = r'  File "[^"]*", line \d+ in .*\n'
_FRAMES_OF_HARNESS = re.compile(
    rf'^(?:Current )?[Tt]hread .*\n(?:{_FRAME})*?  File "[^"]*/world/rank\.py", line \d+ in _listen\n(?:{_FRAME})*\n?'
    r'|^  File "[^"]*/testing/_internal/(?:_distributed/\w+|_fsdp/cases|hypothesis_utils)\.py", line \d+ in '
    r"(?:wrapper|run_test|_run|run_rank|serve|in_rank|_receipt_of_body)\n"
    rf'|^  File "[^"]*/(?:world/rank\.py", line \d+ in _body|runner/case\.py", line \d+ in main)\n(?:{_FRAME})*'
    r"|^Extension modules: .*\n?",
    re.MULTILINE,
)
# What differs between the tracebacks of ranks that failed in the same way.
_RANK_DEPENDENT = re.compile(
    r"0x[0-9a-f]+|(?<=rank )\d+|(?<=rank=)\d+|(?<=process )\d+|(?<=pid )\d+|(?<=:)\d{4,5}\b", re.IGNORECASE
)


def render(outcomes: Sequence[Outcome], verdict: Verdict, took_s: float) -> str:
    """Return the report of a failed world: every rank's ending, then tracebacks and output."""
    mismatch = first_mismatch({o.rank: read_record(o.collectives) for o in outcomes if o.collectives})
    parts = [verdict.summary]
    if mismatch:
        parts.append(f"Collectives: {mismatch.sentence}.")
    parts.append(_endings(outcomes, verdict, took_s))
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
                grouped.setdefault(_RANK_DEPENDENT.sub("*", text), ([], text))[0].append(outcome.rank)
        parts += [f"{title} of {ranks_phrase(ranks)}:\n{_indent(text)}" for ranks, text in grouped.values()]
    return parts


def _trace(outcome: Outcome) -> str:
    return outcome.receipt.trace.rstrip() if outcome.receipt else ""


def _stacks(outcome: Outcome) -> str:
    return trim_stacks(outcome.stacks).rstrip()


def _endings(outcomes: Sequence[Outcome], verdict: Verdict, took_s: float) -> str:
    lines = [f"What each rank did in {took_s:.1f} s:"]
    for outcome in outcomes:
        role = "  <- first" if outcome.rank in verdict.culprits[:1] and len(outcomes) > 1 else ""
        because = "  (because of that)" if outcome.rank in verdict.victims and outcome.ending is Ending.FAILED else ""
        lines.append(f"  rank {outcome.rank} {outcome.describe()}{role}{because}")
        lines += [f"    left a process behind, which was ended: {command}" for command in outcome.left_behind]
        record = read_record(outcome.collectives)
        lines += [f"    {'called' if each.finished else 'was in'} {each}" for each in record[-_COLLECTIVES:]]
    return "\n".join(lines)


def _output(outcome: Outcome) -> str:
    return "\n".join(end_of_output(outcome.output, died=outcome.ending is Ending.KILLED))


def end_of_output(text: str, *, died: bool) -> list[str]:
    """Return the last lines of what a process printed, and before them how many there were more.

    Of a process that ``died`` that is all there is to go by, and the cause stands above the stacks: it gets more lines.
    """
    lines = trim_stacks(text).rstrip().splitlines()
    most = 3 * _OUTPUT_LINES if died else _OUTPUT_LINES
    cut = [f"... {len(lines) - most} lines before these"] if len(lines) > most else []
    return cut + lines[-most:]


def trim_stacks(text: str) -> str:
    """Leave out of faulthandler's dumps the frames between the start of the process and the test."""
    return _FRAMES_OF_HARNESS.sub("", text)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
