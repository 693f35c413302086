"""Measures the table of waits, and writes it to studies/waits/README.md.

python -m studies.waits [--family FSDP2 ...] [--most 6]
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from studies.waits.measure import PAGE, SUITES, Verdict, all_sites, measure
from studies.waits.sites import MODULES, Site


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.waits", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--family", nargs="+", choices=[*MODULES], default=[*MODULES], help="whose waits (default: all)"
    )
    parser.add_argument("--most", type=int, default=6, help="tests in which a wait is deleted (default: 6)")
    parser.add_argument("--suites", default="", help="only in classes whose module and name this pattern finds")
    parser.add_argument(
        "--print", action="store_true", help="print the table, and leave studies/waits/README.md as it is"
    )
    asked = parser.parse_args()
    start = time.monotonic()
    chosen = [site for site in all_sites() if site.family in asked.family]
    suites = {suite: tests for suite, tests in SUITES.items() if re.search(asked.suites, suite)}
    verdicts = measure(suites, chosen, asked.most, lambda text: print(text, file=sys.stderr, flush=True))
    table = render(chosen, verdicts, torch.__version__, asked.most)
    print(f"took {time.monotonic() - start:.0f} s", file=sys.stderr)
    if asked.print:
        print(table)
        return
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"(?<=<!-- measured -->\n).*(?=<!-- end -->)", lambda _: table, text, flags=re.DOTALL))


def render(chosen: Sequence[Site], verdicts: Mapping[str, Verdict], release: str, most: int) -> str:
    """Return the table as Markdown: a summary, then one section for each family."""
    lines = [
        f"Measured with torch {release}, each wait deleted in up to {most} tests.",
        "",
        "| | waits | load-bearing | of these by a race | redundant | not reached |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    families = [family for family in MODULES if any(site.family == family for site in chosen)]
    for family in families:
        those = [verdicts[site.id] for site in chosen if site.family == family]
        said = Counter(each.said for each in those)
        races = sum(each.how.startswith("race: ") for each in those)
        cells = [family, len(those), said["load-bearing"], races, said["redundant"], said["not reached"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for family in families:
        lines += ["", f"### {family}", "", "| wait | where | verdict | shown by |", "| --- | --- | --- | --- |"]
        for site in chosen:
            if site.family == family:
                lines.append(_row(site, verdicts[site.id]))
    return "\n".join(lines) + "\n"


def _row(site: Site, verdict: Verdict) -> str:
    shown = ""
    if verdict.said == "load-bearing":
        race = "a race in " if verdict.how.startswith("race: ") else ""
        shown = f"{race}`{verdict.test.partition(':')[2]}`"
    elif verdict.said == "redundant":
        shown = f"silent in {verdict.tries} test{'s' * (verdict.tries != 1)}"
    text = site.text if len(site.text) < 70 else site.text[:67] + "..."
    return f"| `{text}` | {_where(site.id)} | {verdict.said} | {shown.replace('|', ' ')} |"


def _where(site: str) -> str:
    module, function, line = site.split(":")
    return f"`{module.rpartition('.')[2]}.py:{line}` `{function.rpartition('.')[2]}`"


main()
