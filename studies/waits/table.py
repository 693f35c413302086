"""The table of waits as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from studies.waits.covers import Cover
from studies.waits.measure import Verdict
from studies.waits.sites import MODULES, Site

__all__ = ["render"]


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
