"""The table of waits as text, and back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from test.torch_ext.suite_waits.covers import Cover
from test.torch_ext.suite_waits.measure import Verdict
from test.torch_ext.suite_waits.sites import MODULES, Site

__all__ = ["CoveredRow", "covered_rows", "release_of", "render"]


def render(chosen: Sequence[Site], verdicts: Mapping[str, Verdict], release: str, most: int) -> str:
    """Return the table as Markdown: a summary, then one section for each family."""
    lines = [
        f"Measured with torch {release}, each wait deleted in up to {most} tests.",
        "",
        "| | waits | load-bearing | of these by a race | redundant | of these covered by others | not reached |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    families = [family for family in MODULES if any(site.family == family for site in chosen)]
    for family in families:
        those = [verdicts[site.id] for site in chosen if site.family == family]
        said = Counter(each.said for each in those)
        races = sum(each.how.startswith("race: ") for each in those)
        covered = sum(each.cover is not None and bool(each.cover.others) for each in those)
        lines.append(
            f"| {family} | {len(those)} | {said['load-bearing']} | {races} | {said['redundant']} | {covered} | "
            f"{said['not reached']} |"
        )
    for family in families:
        lines += ["", f"### {family}", "", "| wait | where | verdict | shown by |", "| --- | --- | --- | --- |"]
        for site in chosen:
            if site.family == family:
                lines.append(_row(site, verdicts[site.id]))
    return "\n".join(lines) + "\n"


def _row(site: Site, verdict: Verdict) -> str:
    shown = ""
    if verdict.said == "load-bearing":
        shown = f"{verdict.how.removeprefix('race: ')}; `{verdict.test.partition(':')[2]}`"
    elif verdict.said == "redundant":
        shown = f"silent in {verdict.tries} test{'s' * (verdict.tries != 1)}{_stand_in(verdict.cover)}"
    text = site.text if len(site.text) < 70 else site.text[:67] + "..."
    return f"| `{text}` | {_where(site.id)} | {verdict.said} | {shown.replace('|', ' ')} |"


def _where(site: str) -> str:
    module, function, line = site.split(":")
    return f"`{module.rpartition('.')[2]}.py:{line}` `{function.rpartition('.')[2]}`"


def _stand_in(cover: Cover | None) -> str:
    if cover is None:
        return ""
    if not cover.others:
        return "; nothing that runs depends on it"
    others = ", ".join(_where(other) for other in cover.others)
    return f"; covered by {others}: without them, {cover.race}; `{cover.test.partition(':')[2]}`"


@dataclass(frozen=True)
class CoveredRow:
    """What a table says of a wait that others cover.

    Attributes:
        site: the wait.
        others: the waits that cover it.
        race: what is reported without all of them.
        test: where, as ``Class.method``.
    """

    site: str
    others: tuple[str, ...]
    race: str
    test: str


_WHERE = r"`\S+:\d+` `\S+`"
_COVERED = re.compile(
    rf"^\| .* \| ({_WHERE}) \| redundant \| .*; covered by ({_WHERE}(?:, {_WHERE})*): without them, (.*); `(\S+)` \|$",
    re.MULTILINE,
)


def covered_rows(table: str, known: Sequence[Site]) -> list[CoveredRow]:
    """Return the rows of a table that name what covers a wait.

    Raises:
        KeyError: a row names a place that is none of the ``known`` waits.
    """
    ids = {_where(site.id): site.id for site in known}
    return [
        CoveredRow(ids[where], tuple(ids[other] for other in re.findall(_WHERE, others)), race, test)
        for where, others, race, test in _COVERED.findall(table)
    ]


def release_of(table: str) -> str:
    """Return the release of torch that a table was measured with.

    >>> release_of("Measured with torch 2.13.0+cpu, each wait deleted in up to 4 tests.")
    '2.13.0+cpu'
    """
    (release,) = re.findall(r"^Measured with torch (\S+), ", table, re.MULTILINE)
    return str(release)
