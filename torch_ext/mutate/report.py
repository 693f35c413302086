"""The report of ``torch_ext mutate``: as data, for a terminal, and as a page."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from torch_ext.mutate.diagnosis import diagnoses
from torch_ext.mutate.runs import Outcome, Test, reaching
from torch_ext.mutate.sources import Mutant

_Methods = Mapping[str, ast.FunctionDef]
_Z = 1.959964  # deviations around the middle of the normal distribution that hold 95 % of it
_RESULTS = ("caught", "survived", "unreached", "equivalent")
_LINES, _COLUMNS = 5, 100  # of the assertions that a terminal shows


def assertions(test: Test) -> Iterator[str]:
    """Yield the assertions in the source of ``test`` and of the methods of its file that it mentions, and its calls of
    functions elsewhere named ``check...``.
    """
    methods = _methods(test.file.path.read_text(encoding="utf-8"), test.name.cls)
    # Parameters follow the name of a method.
    fitting = [name for name in methods if f"{test.name.method}_".startswith(f"{name}_")]
    left, seen = [max(fitting, key=len)] if fitting else [], set[str]()
    while left:
        if (name := left.pop(0)) in seen:
            continue
        seen.add(name)
        for node in ast.walk(methods[name]):
            function = node.func if isinstance(node, ast.Call) else None
            called = getattr(function, "attr", getattr(function, "id", ""))
            compares = called.startswith(("assert", "check")) and called not in methods
            if compares or isinstance(node, ast.Assert):
                yield textwrap.shorten(ast.unparse(node), _COLUMNS)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr in methods:
                left.append(node.attr)


@functools.lru_cache(maxsize=8)
def _methods(text: str, cls: str) -> _Methods:
    """Return the methods of a file by their names; those of class ``cls`` hide others."""
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    classes.sort(key=lambda node: node.name == cls)
    return {each.name: each for node in classes for each in node.body if isinstance(each, ast.FunctionDef)}


def interval(noticed: int, number: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, by Wilson's formula.

    >>> [round(each, 3) for each in interval(48, 73)]
    [0.543, 0.756]
    """
    number = max(number, 1)
    share, square = noticed / number, _Z * _Z / number
    middle, spread = share + square / 2, _Z * (share * (1 - share) / number + square / 4 / number) ** 0.5
    return (middle - spread) / (1 + square), (middle + spread) / (1 + square)


def report(mutants: Iterable[Mutant], outcomes: Mapping[str, Outcome], tests: Sequence[Test]) -> dict[str, Any]:
    """Return the report as data for JSON."""
    listed, functions = list[dict[str, Any]](), dict[str, tuple[int, int]]()
    failures = list[tuple[Mutant, str, str]]()
    for mutant in mutants:
        outcome, place = outcomes[mutant.id], f"{mutant.module}:{mutant.function}"
        one = dict[str, Any](id=mutant.id, operator=mutant.operator, distributed=mutant.is_field, diff=mutant.diff)
        one |= {"result": outcome.status, "took_s": round(outcome.took_s, 2), "ran": outcome.ran}
        if outcome.status == "caught":
            one |= {"test": outcome.test, "says": outcome.text}
            failures.append((mutant, outcome.text, outcome.test))
        else:
            by = sorted(reaching(mutant, tests), key=lambda test: test.duration_s)
            compared = [*assertions(by[0])] if by and outcome.status == "survived" else []
            one |= {"why": outcome.text, "reached_by": [test.name.id for test in by], "compared": compared}
        if outcome.status != "equivalent":
            caught, number = functions.get(place, (0, 0))
            functions[place] = caught + (outcome.status == "caught"), number + 1
        listed.append(one)
    each_diagnosis, by_chance = diagnoses(failures)
    for one, said in zip((one for one in listed if one["result"] == "caught"), each_diagnosis, strict=True):
        one["diagnosis"] = said
    found, counted = Counter(one["result"] for one in listed), Counter(each_diagnosis)
    number, took_s = len(listed) - found["equivalent"], [one["took_s"] for one in listed if one["ran"]]
    return {
        **{name: found[name] for name in _RESULTS}, "distributed": sum(bool(one["distributed"]) for one in listed),
        "score": found["caught"] / max(number, 1), "interval": interval(found["caught"], number),
        "diagnoses": {name: counted[name] for name in ("named", "unrelated", "reset connection")},
        "named_by_chance": by_chance,
        "median_s": median(took_s) if took_s else 0.0, "mutants": listed,
        "functions": dict(sorted(functions.items(), key=lambda one: (one[1][0] - one[1][1], one[0]))),
    }  # fmt: skip


def shown(found: Mapping[str, Any]) -> str:
    """Return a report for a terminal: survivors, then a line for each function, then the numbers."""
    parts = []
    for one in found["mutants"]:
        if one["result"] in ("survived", "unreached"):
            by = one["reached_by"]
            reached = f"tests that reach it: {len(by)}, the quickest {by[0]}" if by else "no test reaches it"
            lines = [f"SURVIVED {one['id']}  {one['operator']}", one["diff"], reached]
            parts.append("\n".join([*lines, *(f"    {each}" for each in one["compared"][:_LINES])]))
    counts = found["functions"].items()
    parts.append("\n".join(f"{caught:>4} of {number:<4} {name}" for name, (caught, number) in counts))
    return "\n\n".join([*parts, numbers(found)])


def numbers(found: Mapping[str, Any]) -> str:
    """Return the last lines of a report."""
    results = ", ".join(f"{found[name]} {name}" for name in _RESULTS)
    said = ", ".join(f"{number} {name}" for name, number in found["diagnoses"].items())
    return (
        f"{len(found['mutants'])} mutants, {found['distributed']} by operators of distributed code: {results}\n"
        f"score {found['score']:.1%}, 95 % interval {' to '.join(f'{each:.1%}' for each in found['interval'])}\n"
        f"first failures: {said}; another mutant's failure would name {found['named_by_chance']:.0%}\n"
        f"median of a mutant {found['median_s']:.1f} s"
    )


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ "%.1f" % (100 * score) }} % of {{ mutants | length }} mutants</title>
<style>
body { font: 15px/1.4 sans-serif; max-width: 70em; margin: 2em auto }
td:first-child { text-align: right; padding-right: 1em }
pre { background: #f4f4f4; padding: .5em; overflow-x: auto }
</style>
<pre>{{ numbers }}</pre>
<h2>Not noticed</h2>
{% for one in mutants if one.result in ("survived", "unreached") %}
<details id="{{ one.id }}">
<summary>{{ one.id }}: {{ one.operator }}</summary>
<pre>{{ one.diff }}</pre>
{% if one.reached_by %}
<p>Tests that reach it:</p>
<ul>{% for test in one.reached_by %}<li>{{ test }}</li>{% endfor %}</ul>
{% if one.compared %}
<p>The first one, which is the quickest, compares:</p>
<pre>{{ one.compared | join("\n") }}</pre>
{% endif %}
{% else %}
<p>No test reaches it.</p>
{% endif %}
</details>
{% endfor %}
<h2>Functions</h2>
<table>
{% for name, (caught, number) in functions.items() %}
<tr><td>{{ caught }} of {{ number }}</td><td>{{ name }}</td></tr>
{% endfor %}
</table>
</html>
"""


def page(found: Mapping[str, Any]) -> str:
    """Return a report as a complete HTML page."""
    import jinja2  # torch requires it

    made = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    return made.render(found, numbers=numbers(found))
