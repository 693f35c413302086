"""``torch_ext conformance``: runs tiers of conformance tests on one device, and reports them.

A tier is a module of this package with two functions: ``groups(options)`` returns its cases by group, and
``findings(groups, options)`` runs them. Findings are kept, so that a second run goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType

from torch_ext import accelerator
from torch_ext.conformance import parity
from torch_ext.conformance.forks import DONE, Finding, Status, first_line
from torch_ext.conformance.kept import Kept, fingerprint
from torch_ext.results import Died, Remark, RunEnded, SetupError, TestName, TestResult, Tick
from torch_ext.results import Status as Result
from torch_ext.runner.interrupts import Interrupts
from torch_ext.runner.names import TestFile
from torch_ext.runner.options import RunOptions, count, seconds, typed
from torch_ext.runner.reporters.jsonlines import JsonReporter
from torch_ext.runner.reporters.junit import write_junit
from torch_ext.runner.reporters.tally import Reporter, ReportFile, Tally
from torch_ext.runner.reporters.text import ProgressLines, Writer
from torch_ext.runner.schedule import cores, make_plan
from torch_ext.upstream.judge import Differences, read

TIERS = ("ops", "c10d", "distributed", "parity")
DIFFERENCES = Path(__file__).with_name("differences.json")
# A finding's status, as the result of a test.
_RESULTS = {
    Status.AGREES: Result.PASSED,
    Status.ROUNDS: Result.PASSED,
    Status.REFUSED: Result.SKIPPED,
    Status.DIFFERS: Result.FAILED,
    Status.CRASHED: Result.FAILED,
    Status.HUNG: Result.FAILED,
}
# Seconds between two looks at the clock for a line of progress.
_TICK_S = 1.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse ``arguments``. Raises SystemExit: 2 after a usage error, 0 after ``--help``."""
    parser = argparse.ArgumentParser("torch_ext conformance", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--device", metavar="TYPE", default="", help="device type, such as sim, cpu, npu (default: this machine's)")
    add("--tier", action="append", choices=TIERS, help="run this tier; may be repeated (default: all)")
    add("-k", dest="patterns", action="append", default=[], metavar="PATTERN",
        help="only groups, such as operators and files, that fit a glob; may be repeated")  # fmt: skip
    add("-n", "--slots", type=typed(count(1)), default=cores(), metavar="N", help="groups at a time (the cores)")
    add("--samples", type=typed(count(0)), default=8, metavar="N", help="samples of each operator and way; 0: all (8)")
    add("--backend", metavar="NAME", default="", help="c10d backend, such as gloo, threaded (default: the device's)")
    add("--checkout", metavar="PATH", default="", help="PyTorch checkout, for the tiers c10d and distributed")
    add("--programs", metavar="PATH", default="", help="folder with programs, for the tier parity (this checkout's)")
    add("--record", action="store_true", help="record what the programs of the tier parity observe on a real device")
    add("--timeout", type=typed(seconds), default=120.0, metavar="S", help="seconds after which a case hangs (120)")
    add("--fresh", action="store_true", help="run the chosen groups again, also if an earlier run has")
    add("--differences", action="append", default=[], metavar="FILE", help="more known differences, such as yours")
    add("--json", default="", metavar="FILE", help="write each result as it is made; - is stdout")
    add("--junit", default="", metavar="FILE", help="write JUnit XML")
    add("--page", default="", metavar="FILE", help="write the page; its changes are those since FILE was written last")
    found = parser.parse_args(arguments)
    has = {"distributed": found.checkout, "parity": found.programs or parity.PROGRAMS.is_dir()}
    default = ["parity"] if found.record else [tier for tier in TIERS if has.get(tier, True)]
    found.tier = [*dict.fromkeys(found.tier or default)]
    if "distributed" in found.tier and not (found.checkout and Path(found.checkout, "test/distributed").is_dir()):
        parser.error(f"--checkout {found.checkout}: no test/distributed there; the tier distributed needs a checkout")
    if found.record and (found.tier != ["parity"] or found.patterns or not found.device):
        parser.error("--record is for the tier parity alone, for all its programs, and for a --device")
    return found


def release(options: argparse.Namespace) -> str:
    """Return the release of the checkout; empty if there is none, or if it does not say."""
    file = Path(options.checkout, "version.txt")
    return file.read_text(encoding="utf-8").strip() if options.checkout and file.is_file() else ""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 0, or 1 if there is a crash, a hang, a difference that is not known, or
    a known one that is none any more; 2 for a usage error; 130 after an interrupt.
    """
    options = parse(arguments)
    if options.device:
        os.environ[accelerator.DEVICE_VARIABLE] = options.device
    interrupts = Interrupts(once=True)
    try:
        if options.tier == ["parity"] and options.record:
            accelerator.assume(options.device)  # each program finds out in a fork of its own
        options.device = accelerator.device_type()
        if options.record:
            parity.record(options)
        run = Run(options)
        try:
            for tier in run.found:
                run.tier(tier)
        except KeyboardInterrupt:
            run.interrupted = True
        return run.end()
    except (accelerator.UnknownDeviceError, SetupError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        interrupts.restore()


class Run:
    """One run of the command: plans every tier, runs what is not kept, judges and reports each result."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.interrupted = False
        self._out = Writer(sys.stderr if options.json == "-" else sys.stdout)
        entries = [entry for path in (DIFFERENCES, *map(Path, options.differences)) for entry in read(path)]
        device = accelerator.SIMULATED if accelerator.is_simulated() else options.device  # whatever its name
        surroundings = {"torch": metadata.version("torch"), "device": device, "checkout": release(options)}
        self._differences = Differences(entries, surroundings)
        self._modules = {tier: importlib.import_module(f"torch_ext.conformance.{tier}") for tier in options.tier}
        planned = {tier: self._plan(module) for tier, module in self._modules.items()}
        self._planned = {tier: groups for tier, groups in planned.items() if groups}
        tests = [TestName(tier, group, case) for tier, groups in self._planned.items()
                 for group, cases in groups.items() for case in cases]  # fmt: skip
        if not tests:
            raise SetupError(f"no group fits -k {' or '.join(map(repr, options.patterns or '*'))}")
        files = [TestFile(tier, Path(tier), tier, Path()) for tier in self._planned]
        self._tally = Tally(make_plan(files, tests))
        start_s, report = time.time(), RunOptions(Path.cwd(), device=options.device)
        self._reporters: list[Reporter] = [self._tally, ProgressLines(self._tally, lambda test: 1.0, self._out)]
        if options.json:
            self._reporters.append(JsonReporter(self._tally, report, ReportFile(options.json, "the JSON report")))
        self._junit = ReportFile(options.junit, "the JUnit report") if options.junit else None
        self._end = lambda file: write_junit(self._tally, self.interrupted, options=report, file=file, start_s=start_s)
        self.found: dict[str, list[tuple[Finding, TestResult]]] = {tier: [] for tier in self._planned}

    def _plan(self, module: ModuleType) -> dict[str, list[str]]:
        groups: Mapping[str, Sequence[str]] = module.groups(self.options)
        patterns = self.options.patterns or ["*"]
        fits = [name for name in groups if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        return {name: [*groups[name]] for name in fits}

    def tier(self, tier: str) -> None:
        """Run what is left of a tier."""
        module, planned = self._modules[tier], self._planned[tier]
        key = fingerprint(self.options.device, *module.key(self.options))
        kept = Kept(tier, self.options.device, key)
        if self.options.fresh:
            kept.drop(planned)
        left = {group: dict.fromkeys(cases) for group, cases in planned.items()}
        self._take_kept(tier, kept, left)
        for group, cases in left.items():
            for case in [*cases]:
                if why := self._differences.skipped(TestName(tier, group, case)):
                    del cases[case]
                    self._publish(tier, Finding(group, case, Status.DIFFERS, why, known=why))
        looked_s = 0.0
        with closing(module.findings({group: [*cases] for group, cases in left.items()}, self.options)) as findings:
            for finding in findings:
                kept.add(finding)
                self._publish(tier, finding)
                if time.monotonic() - looked_s > _TICK_S:
                    looked_s = time.monotonic()
                    self._report(Tick())

    def _take_kept(self, tier: str, kept: Iterable[Finding], left: dict[str, dict[str, None]]) -> None:
        """Publish kept findings, and remove their cases from ``left``."""
        by_group: dict[str, dict[str, Finding]] = {group: {} for group in left}
        for finding in kept:
            by_group.get(finding.group, {})[finding.case] = finding
        for group, found in by_group.items():
            # A tier may find more cases than it has planned; they count once all planned ones of the group are kept.
            is_whole = set(left[group]) <= set(found)
            for case, finding in found.items():
                is_planned = case in left[group]
                if finding.status is Status.HUNG and is_planned:
                    continue  # it may have been slow
                if is_planned or is_whole:
                    left[group].pop(case, None)
                    self._publish(tier, finding)

    def _publish(self, tier: str, finding: Finding) -> None:
        test, status = TestName(tier, finding.group, finding.case), _RESULTS[finding.status]
        problems: tuple[Died | Remark, ...] = ()
        if status is Result.FAILED:
            kind = Remark if finding.status is Status.DIFFERS else Died
            problems = (kind(finding.text or finding.status.value),)
        reason = finding.text if status is Result.SKIPPED else ""
        result = TestResult(test, status, finding.duration_s, problems, reason=reason)
        if finding.status in (Status.AGREES, Status.ROUNDS, Status.DIFFERS):
            result = self._differences.judged(result)
        if result.status is Result.SKIPPED and finding.status is Status.DIFFERS:  # listed: it fails on any device
            finding = replace(finding, status=Status.REFUSED, text=result.reason, known=result.reason)
        elif result.status is Result.FAILED and finding.known:
            result = replace(result, status=Result.XFAIL, problems=(), reason=finding.known)
        if result.status is Result.FAILED:
            self._out.line((f"{finding.status.value.upper()} {test.id}", "failed"), f"  {first_line(finding.text)}")
        self.found[tier].append((finding, result))
        self._report(result)

    def _report(self, event: TestResult | Tick | RunEnded) -> None:
        for reporter in self._reporters:
            reporter(event)

    def end(self) -> int:
        """Report stale differences and the numbers, write the reports, and return the exit code."""
        whole = not self.options.patterns and not self.interrupted
        stale = [] if self.interrupted else self._differences.out_of_date(self._tally.plan.tests, whole=whole)
        for result in stale:
            self._out.line(result.problems[0].sentence)
            self._report(result)
        self._report(RunEnded(self.interrupted))
        if self._junit is not None:
            self._end(self._junit)
        for tier, found in self.found.items():
            self._out.line(f"{tier} on {self.options.device}: {describe(found)}")
        if self.options.page and not self.interrupted:
            from torch_ext.conformance.page import write

            write(Path(self.options.page), self.options, self.found)
        if self.interrupted:
            return 130
        return 0 if self._tally.passed and not stale else 1


def numbers(found: Iterable[tuple[Finding, TestResult]]) -> dict[str, int]:
    """Return how many cases agree, and how many do not, by the way they do not."""
    cases = [(finding.status, result.status is Result.XFAIL) for finding, result in found if finding.case != DONE]
    of = Counter(status for status, _ in cases)
    return {
        "cases": len(cases) - of[Status.REFUSED],
        "agree": of[Status.AGREES] + of[Status.ROUNDS],
        "of these round differently": of[Status.ROUNDS],
        "known": sum(is_known for _, is_known in cases),
        "differ": cases.count((Status.DIFFERS, False)),
        "crashed": of[Status.CRASHED],
        "hung": of[Status.HUNG],
        "not comparable": of[Status.REFUSED],
    }


def describe(found: Sequence[tuple[Finding, TestResult]]) -> str:
    """Return the numbers of a tier as a line."""
    all_numbers = numbers(found)
    share = 100 * all_numbers["agree"] / max(1, all_numbers["cases"])
    always = ("differ", "crashed")
    shown = ", ".join(f"{number} {name}" for name, number in all_numbers.items() if number or name in always)
    took_s = sum(finding.duration_s for finding, _ in found)
    return f"{share:.2f} % agree ({shown}; {took_s:.0f} s of cases)"
