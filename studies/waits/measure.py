"""Deletes waits, one at a time, and runs tests that reach them with the race check.

One run of the runner marks every site and says which tests reach it. Then each site is deleted in the shortest of those
tests, and in more of them for as long as none reports anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from studies.waits.sites import MODULES, Site, delete, mark, sites

__all__ = ["PAGE", "SUITES", "Verdict", "all_sites", "begin", "mark_all", "measure"]

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("README.md")
DEADLINE_S = 3600
FOLDER_VARIABLE = "SUITE_WAITS_FOLDER"

# Module and class; a pattern that a test's name must match.
SUITES: dict[str, str] = {
    "test.distributed.fsdp.test_fsdp_anatomy:TestSteps": "",
    "test.distributed.fsdp.test_fsdp_anatomy:TestMixedPrecision": "",
    "test.distributed.fsdp.test_fsdp_anatomy:TestGradScaler": "",
    "test.distributed.fsdp.test_fsdp_core:TestParityWithDDP": "offload_and_original.*class0|prefetch.*class0",
    "test.distributed.fsdp.test_fsdp_core:TestHooks": "",
    "test.distributed.fsdp.test_fsdp_grad_acc:TestGradAcc": "",
    "test.distributed.fsdp.test_fsdp_unshard_params:TestUnshardParams": "",
    "test.distributed.fsdp.test_fsdp_mixed_precision:TestFSDPMixedPrecisionSharded": "",
    "test.distributed.fsdp.test_fsdp_optim_state:TestFSDPOptimStateInterface": "",
    "test.distributed.fsdp.test_fsdp_state_dict_details:TestFSDPStateDictDetails": "",
    "test.distributed._composable.fsdp.test_fully_shard_anatomy:TestSteps": "",
    "test.distributed._composable.fsdp.test_fully_shard_anatomy:TestState": "",
    "test.distributed._composable.fsdp.test_fully_shard_comm:TestFullyShardCommunication": "",
    "test.distributed._composable.fsdp.test_fully_shard_comm:TestFullyShardUnshard": "",
    "test.distributed._composable.fsdp.test_fully_shard_comm:TestFullyShardPrefetch": "",
    "test.distributed._composable.fsdp.test_fully_shard_mixed_precision:TestFullyShardMixedPrecisionTraining": "",
    "test.distributed._composable.fsdp.test_fully_shard_memory:TestFullyShardMemory": "",
    "test.distributed._composable.fsdp.test_fully_shard_training:TestFullyShardGradientAccumulation": "",
    "test.distributed._composable.fsdp.test_fully_shard_training:TestFullyShardHSDPTraining": "",
    "test.distributed._composable.fsdp.test_fully_shard_training:TestFullyShardShareCommContext": "",
    "studies.waits.scenarios:TestDDP": "",
    "studies.waits.scenarios:TestDTensor": "",
    "studies.waits.fsdp_scenarios:TestFSDP1": "",
    "studies.waits.fsdp_scenarios:TestFSDP2": "",
}

CLASS = """

class {name}(suite{number}.{cls}):
    @classmethod
    def _run(cls, *args, **kwargs):
        begin({sites!r}, f"{suite}.{{args[1]}}")
        super()._run(*args, **kwargs)
"""


@cache  # reads all of these modules
def all_sites() -> tuple[Site, ...]:
    return tuple(site for modules in MODULES.values() for module in modules for site in sites(module))


_test = ""
_seen: set[str] = set()


def begin(deleted: Sequence[str] | None, test: str) -> None:
    """Called by a rank before the test: delete sites, or, with None, note which ones the test reaches."""
    global _test
    if deleted is None:
        _test = test
    else:
        delete(*deleted)


def mark_all() -> None:
    """Called by the zygote, since it takes a second: have each site note the first time that a rank reaches it."""

    def reached(site: str) -> None:
        if _test and site not in _seen:
            _seen.add(site)
            with (Path(os.environ[FOLDER_VARIABLE]) / str(os.getpid())).open("a") as file:
                file.write(f"{site} {_test}\n")

    mark(reached)


@dataclass(frozen=True)
class Ending:
    """How one test ended."""

    status: str  # as the runner says
    took_s: float
    text: str = ""  # what the runner says of a failure

    @property
    def races(self) -> list[str]:
        """The headings of the races that it reports."""
        return re.findall(r"^\s*race \d+: (.*?)(?: \(\d+ times\))?$", self.text, re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """The result for one site."""

    said: str  # `load-bearing`, `redundant` or `not reached`
    test: str = ""  # the first test that failed without it
    how: str = ""  # that test's report
    tries: int = 0  # in how many tests it was deleted


def reach(suites: Mapping[str, str]) -> tuple[dict[str, set[str]], dict[str, Ending]]:
    """Run the suites with every site marked. Return which tests reach each site, and how long each test that passes
    takes. A test is named ``module:Class.method``.
    """
    with tempfile.TemporaryDirectory() as notes:
        endings = _run([(suite, None, pattern) for suite, pattern in suites.items()], {FOLDER_VARIABLE: notes})
        tests: dict[str, set[str]] = defaultdict(set)
        for line in (line for path in Path(notes).iterdir() for line in path.read_text().splitlines()):
            site, _, test = line.partition(" ")
            tests[site].add(test)
    sound = {test: ending for (test, _), ending in endings.items() if ending.status == "passed"}
    return {site: those & set(sound) for site, those in tests.items()}, sound


Deleted = tuple[str, ...]


def try_without(wanted: Iterable[tuple[str, Deleted]]) -> dict[tuple[str, Deleted], Ending]:
    """Run tests, each with some sites deleted."""
    asked = [(test.rpartition(".")[0], sites, f"^{test.rpartition('.')[2]}$") for test, sites in wanted]
    return {(test, sites): ending for (test, sites), ending in _run(asked, {}).items() if sites is not None}


def _run(
    wanted: Sequence[tuple[str, Deleted | None, str]], environment: Mapping[str, str]
) -> dict[tuple[str, Deleted | None], Ending]:
    """Run tests of classes, with sites deleted; with None, all are marked."""
    patterns: dict[tuple[str, Deleted | None], list[str]] = defaultdict(list)
    for suite, deleted, pattern in wanted:
        patterns[suite, deleted].append(pattern)
    modules = sorted({suite.partition(":")[0] for suite, _ in patterns})
    text = "from studies.waits.measure import begin, mark_all\n"
    text += "".join(f"import {module} as suite{number}\n" for number, module in enumerate(modules))
    names: dict[str, tuple[str, Deleted | None]] = {}
    for number, (suite, deleted) in enumerate(patterns):
        module, _, cls = suite.partition(":")
        name = f"Test{number:04}{cls}"
        names[name] = suite, deleted
        text += CLASS.format(name=name, number=modules.index(module), cls=cls, sites=deleted, suite=suite)
    if any(deleted is None for _, deleted in patterns):
        text += "\nmark_all()\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_waits.py").write_text(text)
        command = [sys.executable, str(CHECKOUT / "run_test.py"), "--root", folder, "--device", "sim", "-v"]
        command += ["--races", "error", "--timeout", "60"]
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCH_EXT_", "PYTEST_")) or name == "TORCH_EXT_CACHE"
        }
        kept |= {"PYTHONPATH": str(CHECKOUT), **environment}

        def run(*more: str) -> str:
            return subprocess.run(
                [*command, *more], cwd=folder, env=kept, text=True, errors="replace", stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, timeout=DEADLINE_S,
            ).stdout  # fmt: skip

        listed = re.findall(r"^test_waits\.py::(\w+)::(\w+)$", run("--list"), re.MULTILINE)
        chosen = [
            f"test_waits.py::{cls}::{method}"
            for cls, method in listed
            if any(re.search(pattern, method) for pattern in patterns[names[cls]])
        ]
        output = run("-i", *chosen)
    texts = dict(re.findall(r"^FAILED test_waits\.py::(\S+?)  [\d.]+ s\n(.*?)^rerun: ", output, re.M | re.S))
    endings = {}
    for cls, method, status, took in re.findall(r"^test_waits\.py::(\w+)::(\w+)  (\w+)  ([\d.]+) s", output, re.M):
        suite, deleted = names[cls]
        endings[f"{suite}.{method}", deleted] = Ending(status, float(took), texts.get(f"{cls}::{method}", ""))
    if not endings:
        raise RuntimeError(f"no test ran:\n{output[-4000:]}")
    return endings


def measure(
    suites: Mapping[str, str], chosen: Sequence[Site], most: int, say: Callable[[str], None]
) -> dict[str, Verdict]:
    """Return the verdict on each site, by its id.

    Args:
        suites: the classes that run, and a pattern for the names of their tests.
        chosen: the sites to judge.
        most: in how many tests a site is deleted before it counts as redundant.
        say: prints a line of progress.
    """
    tests, sound = reach(suites)
    say(f"{len(sound)} tests reach {sum(bool(tests.get(site.id)) for site in chosen)} of {len(chosen)} waits")
    verdicts = {site.id: Verdict("not reached") for site in chosen if not tests.get(site.id)}
    waiting = {site.id: _of_many_classes(tests[site.id], sound)[:most] for site in chosen if site.id not in verdicts}
    tried: dict[str, int] = defaultdict(int)
    batch = 1
    while waiting:
        now = [(test, (site,)) for site, left in waiting.items() for test in left[:batch]]
        say(f"{len(waiting)} waits are left; {len(now)} tests run")
        for (test, deleted), ending in try_without(now).items():
            (site,) = deleted
            tried[site] += 1
            if ending.status != "passed" and site not in verdicts:
                how = f"race: {ending.races[0]}" if ending.races else _reason(ending)
                verdicts[site] = Verdict("load-bearing", test, how, tried[site])
        for site, left in list(waiting.items()):
            del left[:batch]
            if site in verdicts:
                del waiting[site]
            elif not left:
                del waiting[site]
                verdicts[site] = Verdict("redundant", tries=tried[site])
        batch *= 3
    return verdicts


def _of_many_classes(tests: Iterable[str], sound: Mapping[str, Ending]) -> list[str]:
    """Return tests in the order in which they are tried: the shortest of each class, then the next one of each.

    Tests of one class need much the same waits.
    """
    rank: dict[str, int] = defaultdict(int)
    ranked = []
    for test in sorted(tests, key=lambda test: sound[test].took_s):
        cls = test.rpartition(".")[0]
        ranked.append((rank[cls], sound[test].took_s, test))
        rank[cls] += 1
    return [test for _, _, test in sorted(ranked)]


def _reason(ending: Ending) -> str:
    first = ending.text.splitlines()[0] if ending.text else ending.status
    return f"no race, but the test fails: {first[:100]}"
