"""Writes the page of results: a table with a line for each tier, what has changed since the page was written last, and
each case that does not agree. Tiers that did not run stay as they were, with their date.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torch_ext import cache
from torch_ext.conformance import parity, suites
from torch_ext.conformance.command import TIERS, numbers, release
from torch_ext.conformance.forks import Finding, Status, first_line
from torch_ext.results import Status as Result
from torch_ext.results import TestResult

Found = Mapping[str, Sequence[tuple[Finding, TestResult]]]

# A line of the list of cases that do not agree, as it is written and read again.
_CASE = re.compile(r"^\| `(?P<test>.+?)` \| (?P<how>[a-z ]+) \|", re.MULTILINE)
# The line that says when each tier ran.
_FACTS = re.compile(
    r"^torch .*, device `(?P<device>\w+)`, (?P<date>[\d-]+)(?P<others>(?:; \w+: [\d-]+)*)\.$", re.MULTILINE
)
_HEAD = """\
# Conformance

Whether the device does what the host's kernels do, what a c10d backend must, and what programs observe of a real GPU.
Written by `python -m torch_ext conformance --page docs/conformance.md`, in the nightly run; do not edit.
[your_device.md](your_device.md) says how to make the same table for another device.
"""
# How many characters of a difference the list shows.
_SHOWN = 160
# How a case ended that the list of differences takes out of the numbers.
_DISCOUNTED = "not counted"


def write(path: Path, options: argparse.Namespace, found: Found) -> None:
    """Write the page of one device to ``path``."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    cache.write(path, text(options, found, before))


def text(options: argparse.Namespace, found: Found, before: str = "") -> str:
    """Return the page; ``before``: the last one, empty if there is none."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    where = f"torch {torch.__version__}, Python {platform.python_version()}, device `{options.device}`, {today}"
    kept = _kept(before, options.device, found)
    where += "".join(f"; {tier}: {date}" for tier, (date, _, _) in kept.items() if date != today)
    rows = {tier: row for tier, (_, row, _) in kept.items()}
    sections = {tier: section for tier, (_, _, section) in kept.items()}
    for tier, results in found.items():
        rows[tier], sections[tier] = _tier_row(options, tier, results), _list(tier, options, results)
    parts = [_HEAD, _changes(found, before), f"## Numbers\n\n{where}.\n\n{table(rows)}", _meanings()]
    parts += [sections[tier] for tier in TIERS if tier in sections]
    return "\n".join(part for part in parts if part)


def _kept(before: str, device: str, found: Found) -> dict[str, tuple[str, str, str]]:
    """Return the date, the row and the section of each tier of the last page that did not run."""
    facts = _FACTS.search(before)
    if facts is None or facts["device"] != device:
        return {}
    dates: dict[str, str] = dict(re.findall(r"; (\w+): ([\d-]+)", facts["others"]))
    kept: dict[str, tuple[str, str, str]] = {}
    for tier in (tier for tier in TIERS if tier not in found):
        row = re.search(rf"^\| {tier} \|.*$", before, re.MULTILINE)
        section = re.search(rf"^## {tier}\n.*?(?=^## |\Z)", before, re.MULTILINE | re.DOTALL)
        if row and section:
            kept[tier] = dates.get(tier, facts["date"]), row[0], section[0].rstrip("\n") + "\n"
    return kept


def table(rows: Mapping[str, str]) -> str:
    """Return the table of the tiers' rows."""
    lines = ["| tier | cases | agree | | known | differ | crash | hang | command |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]  # fmt: skip
    return "\n".join([*lines, *(rows[tier] for tier in TIERS if tier in rows)]) + "\n"


def _tier_row(options: argparse.Namespace, tier: str, results: Sequence[tuple[Finding, TestResult]]) -> str:
    of = numbers(results)
    share = f"{100 * of['agree'] / max(1, of['cases']):.2f} %"
    columns = ("cases", "agree", "", "known", "differ", "crashed", "hung")
    cells = [share if not each else f"{of[each]:,}" for each in columns]
    command = f"`python -m torch_ext conformance --device {options.device} --tier {tier}"
    command += f" --backend {options.backend}" * bool(options.backend and tier == "c10d")
    if tier in suites.OF_CHECKOUT and options.checkout:
        command += "".join(f" -k '{pattern}'" for pattern in options.patterns) + " --checkout PATH"
    command += "`"
    return f"| {' | '.join((tier, *cells, command))} |"


def _meanings() -> str:
    return """\
A case agrees if values, strides, types, device, shared memory and errors do. Where torch's meta kernels have another
shape, type, stride or error than the host, the device may have theirs; a result that is as near to the one of float32
as the host's is rounds differently. *Known* cases differ, for a reason that
[`differences.json`](../torch_ext/conformance/differences.json) gives, and count as disagreements. A crash or a hang
ends one case. Not counted: cases with nothing to compare, such as a type that CUDA lacks too, and those that the list
says to fail with this torch on a GPU as well.
"""


def _disagreements(found: Found) -> dict[str, tuple[str, str]]:
    listed = {}
    for results in found.values():
        for finding, result in results:
            if finding.status is Status.REFUSED and finding.known:
                listed[result.test.id] = _DISCOUNTED, first_line(finding.known)
            elif finding.status not in (Status.AGREES, Status.ROUNDS, Status.REFUSED):
                is_known = result.status is Result.XFAIL
                why = result.reason.removeprefix("known difference: ") if is_known else finding.text
                listed[result.test.id] = "known" if is_known else finding.status.value, first_line(why)
    return listed


def _changes(found: Found, before: str) -> str:
    if not before:
        return ""
    was = {match["test"]: match["how"] for match in _CASE.finditer(before) if match["test"].partition("::")[0] in found}
    now = {test: how for test, (how, _) in _disagreements(found).items()}
    ran = {result.test.id: finding.group for results in found.values() for finding, result in results}
    # A file's tests are new with the file. Others may be new as well, but the page does not list what agrees.
    new = {group for group in ran.values() if group.endswith(".py") and f"| `{group}` |" not in before}
    files = [f"- new files: {', '.join(f'`{group}`' for group in sorted(new))}"] if new else []
    lines = [f"- `{test}`: {was.get(test, 'agreed')}, now {how}" for test, how in now.items()
             if was.get(test) != how and ran[test] not in new]  # fmt: skip
    refused = {result.test.id for results in found.values() for finding, result in results
               if finding.status is Status.REFUSED}  # fmt: skip
    lines += [f"- `{test}`: {how}, now {_DISCOUNTED if test in refused else 'agrees'}" for test, how in was.items()
              if test not in now and test in ran and not (how == _DISCOUNTED and test in refused)]  # fmt: skip
    gone = [test for test in was if test not in now and test not in ran]
    lines += [f"- `{test}`: is no longer a case" for test in gone]
    return "## Changes since the last page\n\n" + ("\n".join(files + lines) or "None.") + "\n"


def _list(tier: str, options: argparse.Namespace, results: Sequence[tuple[Finding, TestResult]]) -> str:
    """Return a tier's section: what is not counted and why, each file's numbers, each case that does not agree."""
    parts = [f"## {tier}\n"]
    if tier in suites.OF_CHECKOUT and (of := release(options)):
        parts.append(f"Files of PyTorch {of}, `--timeout {options.timeout:g}`.\n")
    if refused := Counter(_reason(finding) for finding, _ in results if finding.status is Status.REFUSED):
        reasons = ", ".join(f"{_cell(why)} ({number:,})" for why, number in refused.most_common())
        parts.append(f"Not counted: {reasons}.\n")
    if tier == "parity":
        parts.append(parity.note(options))
    files: dict[str, list[tuple[Finding, TestResult]]] = {}
    for finding, result in results:
        if tier in suites.OF_CHECKOUT and finding.group.endswith(".py"):
            files.setdefault(finding.group, []).append((finding, result))
    if files:
        rows = ["| file | passed | failed | crash, hang | known | not counted |"]
        rows += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
        rows += [_row(name, numbers(each)) for name, each in files.items()]
        parts.append("\n".join(rows) + "\n")
    if listed := _disagreements({tier: results}):
        order = ["crashed", "hung", "differs", "known", _DISCOUNTED]
        in_order = sorted(listed.items(), key=lambda row: (order.index(row[1][0]), row[0]))
        lines = [f"| `{test}` | {how} | {_cell(why)} |" for test, (how, why) in in_order]
        parts.append("\n".join(["| case | how | why |", "| --- | --- | --- |", *lines]) + "\n")
    return "\n".join(parts)


def _reason(finding: Finding) -> str:
    return re.sub(r"^sample \d+: ", "", finding.text).partition(":")[0]


def _row(name: str, of: Mapping[str, int]) -> str:
    cells = (of["agree"], of["differ"], of["crashed"] + of["hung"], of["known"], of["not comparable"])
    return f"| `{name}` | {' | '.join(map(str, cells))} |"


def _cell(why: str) -> str:
    shown = why if len(why) <= _SHOWN else why[: _SHOWN - 1] + "…"
    return re.sub(r"([|<>*_`])", r"\\\1", shown)
