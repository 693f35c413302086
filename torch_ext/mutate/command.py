"""``torch_ext mutate``: chooses mutants, runs the tests that reach each, and reports those that no test notices."""

from __future__ import annotations

import argparse
import functools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from torch_ext import cache
from torch_ext.mutate.report import page, report, shown
from torch_ext.mutate.runs import Outcome, Runs, Test, digest, open_kept
from torch_ext.mutate.sources import Mutant, changed_lines, find
from torch_ext.mutate.swap import Code
from torch_ext.results import INTERRUPTED, OK, USAGE, Needs, SetupError
from torch_ext.runner.arguments import parse as parse_runner
from torch_ext.runner.choice import choose, name
from torch_ext.runner.interrupts import Interrupts
from torch_ext.runner.names import environment_key
from torch_ext.runner.options import count, typed
from torch_ext.runner.schedule import cores
from torch_ext.runner.steps import select

_HELP = """Options of the test command work too, such as --root, --device and -k: see torch_ext test --help.

  torch_ext mutate mypackage.hooks --tests tests
  torch_ext mutate torch.distributed.fsdp._fully_shard:foreach_* --tests distributed/_composable --sample 40
"""
_SHOW_S = 15.0  # between two lines of progress where there is no terminal
_T = TypeVar("_T")
Chosen = dict[tuple[Code, ...], Mutant]  # by the code that makes it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "torch_ext mutate", description=__doc__, epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("targets", nargs="+", metavar="MODULE[:FUNCTION]", help="a module or package; FUNCTION is a name or a glob")
    add("--tests", nargs="+", default=[], metavar="PATTERN", help="folders, files, classes, tests (default: all)")
    add("--operators", nargs="+", default=[""], metavar="NAME", help="only operators with one of these in their name")
    add("--sample", type=typed(count(1)), metavar="N", help="N mutants, half of them by operators of distributed code")
    add("--seed", type=lambda text: int(text, 0), help="of the sample (default: 8 hex digits of git's HEAD)")
    add("--since", default="", metavar="REV", help="only functions with lines that differ from REV in git")
    add("-j", "--jobs", type=typed(count(1)), default=cores(), metavar="N", help="mutants at a time (one a core)")
    add("--equivalent", default="", metavar="FILE", help="JSON: ids of mutants that no test can notice, with reasons")
    add("--list", action="store_true", help="show the mutants and run none")
    add("--json", default="", metavar="FILE", help="write the report as JSON")
    add("--html", default="", metavar="FILE", help="write the report as a page")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 after a whole run, whatever survives; 2 for a usage error or a stale entry; else 130."""
    options, rest = _parser().parse_known_args(arguments)
    interrupts = Interrupts(once=True)
    try:
        return Command(options, rest).run()
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except (SetupError, SyntaxError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    finally:
        interrupts.restore()


class Command:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, rest: Sequence[str]) -> None:
        self._options = options
        self._runner = parse_runner([*options.tests, *rest])
        self._targets = [target.partition(":") for target in options.targets]
        path = [str(self._runner.root.parent), *sys.path]
        self._sources = {name: source for module, *_ in self._targets for name, source in find(module, path).items()}
        offset = 0
        for source in self._sources.values():
            source.offset, offset = offset, offset + source.lines + 1
        self._why = json.loads(Path(options.equivalent).read_text(encoding="utf-8")) if options.equivalent else {}
        every = {mutant.id for source in self._sources.values() if self._why for mutant in source.mutants()}
        if stale := [each for each in self._why if each.partition(":")[0] in self._sources and each not in every]:
            raise SetupError(f"{options.equivalent} names mutants that are none any more: {', '.join(stale)}")
        if options.seed is None:
            git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
            options.seed = int(git.stdout[:8] or "0", 16)

    def _chosen(self) -> Chosen:
        """Return the mutants that compile and differ from each other, or a sample of them."""
        fitting = list[Mutant]()
        for source in self._sources.values():
            lines = changed_lines(source.path, self._options.since) if self._options.since else None
            for module, _, function in self._targets:
                if f"{source.name}.".startswith(f"{module}."):
                    fitting += source.mutants(function or "*", lines)
        fitting = [each for each in fitting if any(one in each.operator for one in self._options.operators)]
        random.Random(self._options.seed).shuffle(fitting)
        number, chosen = self._options.sample or len(fitting), Chosen()
        general, field = ([each for each in fitting if each.is_field is kind] for kind in (False, True))
        # Where there are too few of one kind, the other fills up.
        for group, most in ((field, (number + 1) // 2), (general, number), (field, number)):
            for mutant in group:
                if len(chosen) < most and (codes := self._sources[mutant.module].codes_of(mutant)):
                    chosen.setdefault(codes, mutant)
        return chosen

    def run(self) -> int:
        """Run what is left to run, report, and return the exit code."""
        if not (chosen := self._chosen()):
            raise SetupError("there is no mutant: no function fits, or none of its lines")
        if self._options.list:
            print("\n".join(f"{mutant.id}  {mutant.operator}\n{mutant.diff}\n" for mutant in chosen.values()))
            return OK
        kept, outcomes = open_kept(environment_key(self._runner.device)), dict[str, Outcome]()
        with closing(kept), closing(Runs(self._runner, [*self._sources.values()], self._options.jobs, kept)) as runs:
            tests = self._tests(runs)
            for test in _counted(runs.record(tests), "reach of tests", len(tests)):
                if test.status not in ("passed", "skipped"):
                    print(f"warning: {test.name.id} fails without a mutant, and catches none", file=sys.stderr)
            left = {codes: mutant for codes, mutant in chosen.items() if mutant.id not in self._why}
            for outcome in _counted(runs.mutate(left, tests), "mutants", len(left)):
                outcomes[outcome.id] = outcome
        outcomes |= {each: Outcome(each, "equivalent", text=text) for each, text in self._why.items()}
        found = report(chosen.values(), outcomes, tests)
        print(shown(found))
        found |= {"targets": self._options.targets, "seed": self._options.seed, "tests": len(tests)}
        for file, write in ((self._options.json, functools.partial(json.dumps, indent=1)), (self._options.html, page)):
            if file:
                cache.write(Path(file).absolute(), write(found))
        return OK

    def _tests(self, runs: Runs) -> list[Test]:
        request = select(self._runner)
        collected = name(request, lambda: runs)
        chosen, texts = choose(request, collected), [source.bytes for source in self._sources.values()]
        for failure in chosen.failures:
            print(f"warning: {failure.test.id} cannot be imported", file=sys.stderr)
        needs, plan = chosen.needs, [(batch.file, test) for batch in chosen.plan for test in batch.tests]
        paths = {one.file: sorted({str(one.file.path), *one.imported}) for one in collected}
        keys = {file: digest([Path(path).read_bytes() for path in found]) for file, found in paths.items()}
        owned = [(file, test, digest(test.id, keys[file])) for file, test in plan]
        return [Test(test, file, needs.get(test, Needs()), own, digest(own, texts)) for file, test, own in owned]


def _counted(results: Iterator[_T], what: str, number: int) -> Iterator[_T]:
    """Yield ``results``, and show on stderr how many there are: in a line on a terminal, else in one now and then."""
    began_s, is_terminal = time.monotonic(), sys.stderr.isatty()
    shown_s, start = began_s, "\r\x1b[K" * is_terminal
    for done, result in enumerate(results, 1):
        now_s, left = time.monotonic(), number - done
        if is_terminal or not left or now_s - shown_s > _SHOW_S:
            shown_s, about = now_s, f"about {(now_s - began_s) / done * left:.0f} s left"
            line = f"{start}[{'#' * (20 * done // number):<20}] {done} of {number} {what}, {about}"
            print(line, end="" if is_terminal and left else "\n", file=sys.stderr, flush=True)
        yield result
