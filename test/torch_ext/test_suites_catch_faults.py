"""The suites are worth running: for every mistake in a list, made in torch's FSDP, a test of theirs fails and says why.

One run of the runner for each device serves all: it gets a folder with a file for each suite, which holds a class for
each mistake that the suite must notice. Its ranks make the mistake before they run the test. The same tests pass in the
suite's own class.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from test.torch_ext.suite_faults.mutation import Edit, OtherTorchError
from test.torch_ext.suite_faults.table import FAULTS

CHECKOUT = Path(__file__).resolve().parents[2]
# Far above what all of it takes.
DEADLINE_S = 900

# The same examples in every run; and none is shrunk, which would take most of the time and show nothing more.
BEGINNING = """\
import hypothesis

hypothesis.settings.register_profile(
    "first failure",
    hypothesis.settings(
        derandomize=True, database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
    ),
)
hypothesis.settings.load_profile("first failure")
"""


@dataclass(frozen=True)
class Target:
    """A test, by module below ``test.distributed``, class and method."""

    module: str
    cls: str
    method: str

    @classmethod
    def parse(cls, name: str) -> Target:
        module, _, rest = name.partition(":")
        return cls(module, *rest.split("."))


TARGETS = {name: Target.parse(fault.noticed_by) for name, fault in FAULTS.items()}


def missing(name: str) -> str:
    """Say why this torch cannot make the mistake; empty if it can."""
    try:
        for edit in FAULTS[name].edits:
            edit.source()
    except OtherTorchError as error:
        return str(error)
    return ""


CLASS = """

class {name}({module}.{cls}):
    @classmethod
    def _run(cls, *args, **kwargs):
        inject({fault!r})
        super()._run(*args, **kwargs)
"""


def class_name(fault: str) -> str:
    return f"Test_{fault}"


def file_name(module: str) -> str:
    return f"test_{module.replace('.', '_')}.py"


def faulty_test(fault: str) -> str:
    target = TARGETS[fault]
    return f"{file_name(target.module)}::{class_name(fault)}::{target.method}"


def sound_test(target: Target) -> str:
    return f"{file_name(target.module)}::{target.cls}::{target.method}"


def write(folder: Path, module: str, faults: Sequence[str]) -> None:
    """Write the file of one suite, with a class for each of the faults."""
    classes = sorted({TARGETS[fault].cls for fault in faults})
    text = f"{BEGINNING}\nimport test.distributed.{module} as suite\n"
    text += f"from test.distributed.{module} import {', '.join(classes)}\n"
    text += "from test.torch_ext.suite_faults.table import inject\n"
    for fault in faults:
        text += CLASS.format(name=class_name(fault), module="suite", cls=TARGETS[fault].cls, fault=fault)
    (folder / file_name(module)).write_text(text)


@dataclass(frozen=True)
class Report:
    """How each test of the run ended, by its full name, and what was said of those that failed."""

    output: str
    endings: Mapping[str, str]
    texts: Mapping[str, str]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Report]:
    """One for each device, of the mistakes that this run of pytest asks for: all take minutes, one alone seconds."""
    possible = defaultdict(list)
    for name in sorted(asked_for(request.session.items)):
        if not missing(name):
            possible[FAULTS[name].device].append(name)
    return {device: run_faulty(tmp_path_factory.mktemp(device), device, names) for device, names in possible.items()}


def asked_for(items: Sequence[pytest.Item]) -> set[str]:
    """Return the mistakes whose tests, or whose sound counterparts, are among ``items``."""
    noticed = {params["name"] for params in _params(items, test_the_suites_notice)}
    sound = [(params["device"], params["target"]) for params in _params(items, test_without_the_mistake_they_pass)]
    return noticed | {name for name, target in TARGETS.items() if (FAULTS[name].device, target) in sound}


def _params(items: Sequence[pytest.Item], test: Callable[..., None]) -> list[dict[str, Any]]:
    return [item.callspec.params for item in items if isinstance(item, pytest.Function) and item.function is test]


def run_faulty(folder: Path, device: str, faults: Sequence[str]) -> Report:
    by_module = defaultdict(list)
    for fault in faults:
        by_module[TARGETS[fault].module].append(fault)
    for module, those in by_module.items():
        write(folder, module, those)
    selected = sorted({*map(faulty_test, faults), *(sound_test(TARGETS[fault]) for fault in faults)})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_EXT_")}
    command = [str(CHECKOUT / "run_test.py"), "--root", str(folder), "--device", device, "-v", "-i", *selected]
    done = subprocess.run(
        [sys.executable, *command],
        env=environment | {"PYTHONPATH": str(CHECKOUT)}, cwd=folder, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S,
    )  # fmt: skip
    endings = dict(re.findall(r"^(test_\S+::\w+::\w+)  (\w+)  [\d.]+ s", done.stdout, re.MULTILINE))
    texts = dict(re.findall(r"^FAILED (\S+?)  [\d.]+ s\n(.*?)^rerun: ", done.stdout, re.MULTILINE | re.DOTALL))
    return Report(done.stdout, endings, texts)


@pytest.mark.parametrize("name", FAULTS)
def test_the_suites_notice(reports: Mapping[str, Report], name: str) -> None:
    if why := missing(name):
        pytest.skip(f"this torch words it in another way: {why}")
    test, report = faulty_test(name), reports[FAULTS[name].device]
    assert report.endings.get(test) == "failed", report.output[-4000:]
    assert re.search(FAULTS[name].says, report.texts[test]), report.texts[test]


@pytest.mark.parametrize(
    ("device", "target"), sorted({(FAULTS[name].device, target) for name, target in TARGETS.items()}, key=str)
)
def test_without_the_mistake_they_pass(reports: Mapping[str, Report], device: str, target: Target) -> None:
    test, report = sound_test(target), reports[device]
    assert report.endings.get(test) == "passed", report.texts.get(test, report.output[-4000:])


def test_there_are_enough_and_both_fsdps_have_theirs() -> None:
    """The torch that the list was written for can make every one."""
    assert len(FAULTS) >= 25
    assert len([name for name in FAULTS if name.startswith("fully_shard_")]) >= 10
    import torch

    if torch.__version__.startswith("2.13."):
        assert [why for name in FAULTS if (why := missing(name))] == []


def probe(value: int) -> int:
    """What the tests below change."""
    return value + 1


imported_before = probe


def test_an_edit_reaches_whoever_imported_the_function_before() -> None:
    code = probe.__code__
    try:
        Edit(f"{__name__}:probe", "value + 1", "value + 2").apply()
        assert imported_before(1) == 3
    finally:
        probe.__code__ = code
    assert imported_before(1) == 2


@pytest.mark.parametrize(
    ("function", "old", "words"),
    [
        ("probe", "value - 1", "contains 0 times: value - 1"),
        ("probe", "value", "contains 2 times: value"),
        ("nothing", "value", "there is no"),
        ("Report", "value", "is no function but"),
    ],
)
def test_an_edit_that_does_not_fit_is_told(function: str, old: str, words: str) -> None:
    with pytest.raises(OtherTorchError, match=re.escape(words)):
        Edit(f"{__name__}:{function}", old, "").source()
