"""Measures the table of waits, and writes it to studies/waits/README.md.

python -m studies.waits [--family FSDP2 ...] [--most 6]
"""

from __future__ import annotations

import argparse
import re
import sys
import time

import torch

from studies.waits.measure import PAGE, SUITES, all_sites, measure
from studies.waits.sites import MODULES
from studies.waits.table import render


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


main()
