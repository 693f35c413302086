"""Deletes waits, one at a time, in tests that reach them with the race check on. Writes studies/waits/README.md.

A first run records which tests reach each wait. A second one deletes each wait in the shortest of these tests.

python -m studies.waits                  # all
python -m studies.waits FSDP2 DDP        # only these, and prints the table
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch

from studies.waits.sites import FOLDER_VARIABLE, MODULES, Site, all_sites
from test.torch_ext.interpreter import RUN_TEST, python

PAGE = Path(__file__).with_name("README.md")
DEADLINE_S = 3600
# A wait counts as redundant after this many tests have passed without it.
MAX_TESTS = 4

# Module and class; a pattern that a test's name must match.
SUITES = {
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
    "studies.waits.scenarios:TestFSDP1": "",
    "studies.waits.scenarios:TestFSDP2": "",
}

# A class whose ranks delete waits, with the tests of the original whose names match.
CLASS = """
import {module}

class {name}({module}.{cls}):
    @classmethod
    def _run(cls, *args, **kwargs):
        begin({deleted!r}, f"{module}:{cls}.{{args[1]}}")
        super()._run(*args, **kwargs)

for each in dir({name}):
    if each.startswith("test") and not re.search({pattern!r}, each):
        setattr({name}, each, None)
"""


class Ending(NamedTuple):
    """How a test (``module:Class.method``) ended with the wait ``deleted``; empty for none."""

    test: str
    deleted: str
    passed: bool
    took_s: float
    text: str  # the runner's report of the failure


# The verdict on one wait (``load-bearing``, ``redundant`` or ``not reached``), and its evidence in words.
Verdict = tuple[str, str]


def run(selections: Iterable[tuple[str, str, str]], notes: str = "") -> list[Ending]:
    """Run tests of classes, each with a wait deleted and a pattern for its tests; ranks note in the folder ``notes``
    which waits they reach.
    """
    originals = {f"Test{number:04}": each for number, each in enumerate(selections)}
    text = "import re\n\nfrom studies.waits.sites import begin, wrap_all\n\nwrap_all()\n"
    for name, (suite, deleted, pattern) in originals.items():
        module, _, cls = suite.partition(":")
        text += CLASS.format(name=name, module=module, cls=cls, deleted=deleted, pattern=pattern)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_waits.py").write_text(text)
        options = ("--root", folder, "--device", "sim", "--json", "-", "--races", "error", "--timeout", "60")
        done = python(RUN_TEST, *options, folder=Path(folder), timeout_s=DEADLINE_S, **{FOLDER_VARIABLE: notes})
    endings = []
    for event in map(json.loads, done.stdout.splitlines()):
        if event["event"] == "result" and event["method"]:
            suite, deleted, _ = originals[event["class"]]
            test, passed = f"{suite}.{event['method']}", event["status"] == "passed"
            endings.append(Ending(test, deleted, passed, event["duration_s"], event["text"]))
    if not endings:
        raise RuntimeError(f"no test ran:\n{done.stderr[-4000:]}")
    return endings


def reach() -> dict[str, list[str]]:
    """Return which tests reach each wait, in the order in which it is deleted in them."""
    with tempfile.TemporaryDirectory() as notes:
        endings = run([(suite, "", pattern) for suite, pattern in SUITES.items()], notes)
        lines = [line for path in Path(notes).iterdir() for line in path.read_text().splitlines()]
    took_s = {ending.test: ending.took_s for ending in endings if ending.passed}
    tests: dict[str, set[str]] = defaultdict(set)
    for site, _, test in (line.partition(" ") for line in lines):
        tests[site].add(test)
    return {site: _interleave_classes(reached & took_s.keys(), took_s) for site, reached in tests.items()}


def _interleave_classes(tests: Iterable[str], took_s: Mapping[str, float]) -> list[str]:
    """Return the shortest test of each class, then the next one of each, since tests of a class need the same waits."""
    of_class: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=took_s.__getitem__):
        of_class[test.rpartition(".")[0]].append(test)
    rounds = zip_longest(*of_class.values())
    return [test for each in rounds for test in sorted(filter(None, each), key=took_s.__getitem__)]


def measure(chosen: Sequence[Site]) -> dict[Site, Verdict]:
    """Return the verdict on each wait."""
    tests = {site: each[:MAX_TESTS] for site, each in reach().items()}
    selections = []
    for site in chosen:
        for suite, _, method in (test.rpartition(".") for test in tests.get(site.id, ())):
            selections.append((suite, site.id, f"^{method}$"))
    failures: dict[str, Ending] = {}
    for ending in run(selections):
        if not ending.passed:
            failures.setdefault(ending.deleted, ending)
    return {site: _verdict(failures.get(site.id), len(tests.get(site.id, ()))) for site in chosen}


def _verdict(evidence: Ending | None, tries: int) -> Verdict:
    if evidence is not None:
        is_race = re.search(r"^\s*race \d+: ", evidence.text, re.MULTILINE)
        return "load-bearing", f"{'a race in ' if is_race else ''}`{evidence.test.partition(':')[2]}`"
    return ("redundant", f"silent in {tries} test{'s' * (tries != 1)}") if tries else ("not reached", "")


def render(verdicts: Mapping[Site, Verdict]) -> str:
    """Return the table as Markdown: a summary, then one section for each family."""
    summary = ["| | waits | load-bearing | of these by a race | redundant | not reached |"]
    summary += ["| --- | --- | --- | --- | --- | --- |"]
    sections: list[str] = []
    for family in MODULES:
        rows = {site: verdict for site, verdict in verdicts.items() if site.family == family}
        if not rows:
            continue
        counts = Counter(kind for kind, _ in rows.values())
        races = sum(evidence.startswith("a race in ") for _, evidence in rows.values())
        cells = [family, len(rows), counts["load-bearing"], races, counts["redundant"], counts["not reached"]]
        summary.append(f"| {' | '.join(map(str, cells))} |")
        sections += ["", f"### {family}", "", "| wait | where | verdict | shown by |", "| --- | --- | --- | --- |"]
        for site, (kind, evidence) in rows.items():
            text = site.text if len(site.text) < 70 else site.text[:67] + "..."
            where = f"`{site.module.rpartition('.')[2]}.py:{site.line}` `{site.function.rpartition('.')[2]}`"
            sections.append(f"| `{text}` | {where} | {kind} | {evidence} |")
    head = f"Measured with torch {torch.__version__}, each wait deleted in up to {MAX_TESTS} tests."
    return "\n".join([head, "", *summary, *sections]) + "\n"


def main(families: Sequence[str]) -> None:
    """Measure the waits of ``families``, by default of all."""
    if unknown := set(families) - MODULES.keys():
        sys.exit(f"got {', '.join(unknown)}; there are {', '.join(MODULES)}")
    table = render(measure([site for site in all_sites() if not families or site.family in families]))
    if families:
        print(table)
    else:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(re.sub(r"(?<=<!-- measured -->\n).*(?=<!-- end -->)", lambda _: table, page, flags=re.DOTALL))


main(sys.argv[1:])
