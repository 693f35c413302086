"""The report: scores, the mutants that survive, and whether failures are about their mutant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from torch_ext.mutate.runs import Outcome, Test, reaching
from torch_ext.mutate.sources import Mutant

# Of the normal distribution: 95 % of it lies this many deviations around the middle.
_Z = 1.959964
_RESET = re.compile(r"connection (was )?(reset|closed|refused)|closed by peer|broken pipe", re.IGNORECASE)
# Words of changed lines that say nothing about a subject.
_COMMON = re.compile(
    "self|return|false|params?|kwargs|state|group|device|tensors?|modules?|torch|items|values?|forward|backward|range"
    "|enumerate|isinstance|import|contextlib|nullcontext|index"
)
_RESULTS = ("caught", "survived", "unreached", "equivalent")


def interval(noticed: int, number: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, by Wilson's formula.

    >>> [round(each, 3) for each in interval(48, 73)]
    [0.543, 0.756]
    """
    if not number:
        return 0.0, 1.0
    share, square = noticed / number, _Z * _Z / number
    middle, spread = share + square / 2, _Z * (share * (1 - share) / number + square / 4 / number) ** 0.5
    return (middle - spread) / (1 + square), (middle + spread) / (1 + square)


def diagnosis(mutant: Mutant, text: str) -> str:
    """Return whether a failure's ``text`` is about the subject of ``mutant``: it names the function, or something in
    the changed lines. Otherwise it is a lost connection, or unrelated.
    """
    changed = "\n".join(line[1:] for line in mutant.diff.splitlines()[1:] if line[:1] in "+-")
    found = {mutant.function.rpartition(".")[2], *re.findall(r"[A-Za-z_]{5,}", changed)}
    names, said = (_plain(name) for name in found if not _COMMON.fullmatch(name)), f" {_plain(text)}"
    if any(f" {name}" in said for name in names if len(name) > 4):
        return "named"
    return "reset connection" if _RESET.search(text) else "unrelated"


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def report(mutants: Iterable[Mutant], outcomes: Mapping[str, Outcome], tests: Sequence[Test]) -> dict[str, Any]:
    """Return the report as data for JSON."""
    listed, functions = list[dict[str, Any]](), dict[str, list[int]]()
    for mutant in mutants:
        outcome = outcomes[mutant.id]
        one = dict[str, Any](id=mutant.id, operator=mutant.operator, distributed=mutant.is_field, line=mutant.line)
        one |= {"diff": mutant.diff, "result": outcome.status, "took_s": round(outcome.took_s, 2), "ran": outcome.ran}
        if outcome.status == "caught":
            one |= {"test": outcome.test, "says": outcome.text, "diagnosis": diagnosis(mutant, outcome.text)}
        else:
            one |= {"why": outcome.text, "reached_by": [test.name.id for test in reaching(mutant, tests)]}
        if outcome.status != "equivalent":
            counts = functions.setdefault(mutant.place, [0, 0])
            counts[0], counts[1] = counts[0] + (outcome.status == "caught"), counts[1] + 1
        listed.append(one)
    found, said = Counter(one["result"] for one in listed), Counter(one.get("diagnosis") for one in listed)
    number, took_s = len(listed) - found["equivalent"], [one["took_s"] for one in listed if one["ran"]]
    return {
        **{name: found[name] for name in _RESULTS}, "distributed": sum(bool(one["distributed"]) for one in listed),
        "score": found["caught"] / max(number, 1), "interval": interval(found["caught"], number),
        "diagnoses": {name: said[name] for name in ("named", "unrelated", "reset connection")},
        "median_s": median(took_s) if took_s else 0.0, "mutants": listed,
        "functions": dict(sorted(functions.items(), key=lambda one: (one[1][0] - one[1][1], one[0]))),
    }  # fmt: skip


def text(found: Mapping[str, Any]) -> str:
    """Return a report for a terminal: survivors, then a line for each function, then the numbers."""
    parts = []
    for one in found["mutants"]:
        if one["result"] in ("survived", "unreached"):
            by = one["reached_by"]
            reached = f"{len(by)} tests reach it, such as {by[0]}" if by else "no test reaches it"
            parts.append(f"SURVIVED {one['id']}  {one['operator']}\n{one['diff']}\n{reached}")
    counts = found["functions"].items()
    parts.append("\n".join(f"{caught:>4} of {number:<4} {name}" for name, (caught, number) in counts))
    low, high = found["interval"]
    results = ", ".join(f"{found[name]} {name}" for name in _RESULTS)
    said = ", ".join(f"{number} {name}" for name, number in found["diagnoses"].items())
    parts.append(
        f"{len(found['mutants'])} mutants, {found['distributed']} by operators of distributed code: {results}\n"
        f"score {found['score']:.1%}, 95 % interval {low:.1%} to {high:.1%}\n"
        f"first failures: {said}; median of a mutant {found['median_s']:.1f} s"
    )
    return "\n\n".join(parts)
