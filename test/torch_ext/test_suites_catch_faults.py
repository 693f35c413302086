"""The suites are worth running: for every mistake in a list, made in torch's FSDP, a test of theirs fails and says why.

A few runs of the runner serve all. Each gets a folder with a file for each suite, which holds a class for each mistake
that the suite must notice. Its ranks make the mistake before they run the test. The same tests pass in the suite's own
class: in the same run, or in an earlier one if nothing that they depend on has changed since (``--long`` does not look
there). One mistake for each class of a suite is made by default, since all take a quarter of an hour; the others are
marked ``long``.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from test.torch_ext.suite_faults.mutation import Edit, OtherTorchError
from test.torch_ext.suite_faults.record import Record, Store, fingerprint
from test.torch_ext.suite_faults.table import FAULTS

CHECKOUT = Path(__file__).resolve().parents[2]
# Far above what any run takes.
DEADLINE_S = 900

# What the tests without a mistake, and how they are run here, depend on.
OURS = [CHECKOUT / name for name in ("torch_ext", "testing", "test/distributed", "test/torch_ext/suite_faults")]

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


class Shard(NamedTuple):
    """Mistakes that one run of the runner makes; the runs take about equally long and need nothing of each other."""

    device: str
    part: str

    @classmethod
    def of(cls, name: str) -> Shard:
        device, module = FAULTS[name].device, TARGETS[name].module
        if device != "cpu":
            return cls(device, "all")
        return cls(device, "properties" if module.endswith("_properties") else module.partition(".")[0])

    def __str__(self) -> str:
        return f"{self.device}-{self.part}"


ReportOf = Callable[[Shard], Report]


@pytest.fixture(scope="module")
def report_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReportOf:
    """Runs the mistakes of a shard that this run of pytest asks for: all take minutes, one alone seconds."""
    asked = sorted(name for name in asked_for(request.session.items) if not missing(name))
    is_long = request.config.getoption("--long", default=False)
    store = None if is_long else getattr(request.config, "cache", None)

    @functools.cache
    def report_of(shard: Shard) -> Report:
        names = [name for name in asked if Shard.of(name) == shard]
        return run_faulty(tmp_path_factory.mktemp(str(shard)), shard, names, store)

    return report_of


def asked_for(items: Sequence[pytest.Item]) -> set[str]:
    """Return the mistakes whose tests are among ``items``, and one for each sound counterpart that has none of them."""
    asked = {params["name"] for params in _params(items, test_the_suites_notice)}
    for params in _params(items, test_without_the_mistake_they_pass):
        mistakes = mistakes_of(params["shard"], params["target"])
        if asked.isdisjoint(mistakes):
            asked.add(next((name for name in mistakes if not missing(name)), mistakes[0]))
    return asked


def _params(items: Sequence[pytest.Item], test: Callable[..., None]) -> list[dict[str, Any]]:
    return [item.callspec.params for item in items if isinstance(item, pytest.Function) and item.function is test]


def state_of_the_machine() -> str:
    import torch

    return fingerprint([*OURS, Path(__file__)], [Path(torch.__file__).parent], environment())


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_EXT_", "PYTEST_"))}
    return kept | {"PYTHONPATH": str(CHECKOUT)}


def run_faulty(folder: Path, shard: Shard, faults: Sequence[str], store: Store | None) -> Report:
    """Run the tests with the mistakes, and without those that are not on record."""
    by_module = defaultdict(list)
    for fault in faults:
        by_module[TARGETS[fault].module].append(fault)
    for module, those in by_module.items():
        write(folder, module, those)
    before = state_of_the_machine()
    record = Record(store, str(shard), before)
    on_record = record.passed()
    sound = {sound_test(TARGETS[fault]) for fault in faults} - on_record
    report = run(folder, shard.device, sorted({*map(faulty_test, faults), *sound}))
    if state_of_the_machine() == before:
        record.add(report.endings, sound)
    return Report(report.output, {**dict.fromkeys(on_record, "passed"), **report.endings}, report.texts)


def run(folder: Path, device: str, selected: Sequence[str]) -> Report:
    command = [str(CHECKOUT / "run_test.py"), "--root", str(folder), "--device", device, "-v", "-i", *selected]
    try:
        output = subprocess.run(
            [sys.executable, *command],
            env=environment(), cwd=folder, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return Report(f"{error}\n{(error.stdout or b'').decode(errors='replace')}", {}, {})
    endings = dict(re.findall(r"^(test_\S+::\w+::\w+)  (\w+)  [\d.]+ s", output, re.MULTILINE))
    texts = dict(re.findall(r"^FAILED (\S+?)  [\d.]+ s\n(.*?)^rerun: ", output, re.MULTILINE | re.DOTALL))
    return Report(output, endings, texts)


# The first mistake of each class.
DEFAULT = {(Shard.of(name), target.module, target.cls): name for name, target in reversed(TARGETS.items())}.values()


def of_shard(shard: Shard, *values: object, id: str, mistakes: Collection[str]) -> Any:
    """The tests of a shard are named so that they run in one process: see ``parallel.scope``."""
    marks = () if any(name in DEFAULT for name in mistakes) else pytest.mark.long
    return pytest.param(shard, *values, id=f"{shard}/{id}", marks=marks)


def mistakes_of(shard: Shard, target: Target) -> list[str]:
    """Return the mistakes that ``target`` must notice on the device of ``shard``."""
    return [name for name, each in TARGETS.items() if (Shard.of(name), each) == (shard, target)]


@pytest.mark.parametrize(
    ("shard", "name"), [of_shard(Shard.of(name), name, id=name, mistakes=[name]) for name in FAULTS]
)
def test_the_suites_notice(report_of: ReportOf, shard: Shard, name: str) -> None:
    if why := missing(name):
        pytest.skip(f"this torch words it in another way: {why}")
    test, report = faulty_test(name), report_of(shard)
    assert report.endings.get(test) == "failed", report.output[-4000:]
    assert re.search(FAULTS[name].says, report.texts[test]), report.texts[test]


SOUND = sorted({(Shard.of(name), target) for name, target in TARGETS.items()}, key=str)


@pytest.mark.parametrize(
    ("shard", "target"),
    [
        of_shard(shard, target, id=f"{target.cls}.{target.method}", mistakes=mistakes_of(shard, target))
        for shard, target in SOUND
    ],
)
def test_without_the_mistake_they_pass(report_of: ReportOf, shard: Shard, target: Target) -> None:
    mistakes = mistakes_of(shard, target)
    if all(map(missing, mistakes)):
        pytest.skip(f"this torch can make none of {mistakes}")
    test, report = sound_test(target), report_of(shard)
    assert report.endings.get(test) == "passed", report.texts.get(test, report.output[-4000:])


def test_what_is_on_record_runs_again_only_when_something_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "wrong_divisor"
    faulty, sound = faulty_test(name), sound_test(TARGETS[name])
    kept: dict[str, Any] = {}
    state, selected = ["first"], []

    def pretend(folder: Path, device: str, tests: Sequence[str]) -> Report:
        selected.append(set(tests))
        state[0] = state[0].removesuffix(", and edited meanwhile")
        return Report("", {test: "failed" if test == faulty else "passed" for test in tests}, {})

    monkeypatch.setitem(globals(), "run", pretend)
    monkeypatch.setitem(globals(), "state_of_the_machine", lambda: state[0])

    def go() -> Report:
        return run_faulty(tmp_path, Shard.of(name), [name], types.SimpleNamespace(get=kept.get, set=kept.__setitem__))

    both = {faulty: "failed", sound: "passed"}
    assert [go().endings, go().endings] == [both, both]
    assert selected == [{faulty, sound}, {faulty}]
    state[0] = "second, and edited meanwhile"  # its result belongs to no state, so nothing is kept
    go()
    state[0] = "second, and edited meanwhile"
    go()
    state[0] = "first"
    go()
    assert selected[2:] == [{faulty, sound}, {faulty, sound}, {faulty}]


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
