"""For each fault in ``suite_faults``, made in torch, a test of the suites fails and says why.

One run of the runner for each device serves all. Its folder has a file for each suite, with a class for each fault that
the suite must notice. Its ranks make the fault before they run the test. By default one fault for each folder of suites
is made, since all take half an hour; the others are marked ``long``.
"""

import ast
import functools
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from test.torch_ext.suite_faults.mutation import OtherTorchError
from test.torch_ext.suite_faults.table import FAULTS
from test.torch_ext.world.suites import CHECKOUT, Run, endings

# Far above the duration of any run.
DEADLINE_S = 2400

# The same examples in every run, without shrinking, which would take most of the time and show no more.
BEGINNING = """\
import hypothesis

import test.distributed.{module} as suite
from test.distributed.{module} import {classes}
from test.torch_ext.suite_faults.table import inject

hypothesis.settings.register_profile(
    "first failure",
    hypothesis.settings(
        derandomize=True, database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
    ),
)
hypothesis.settings.load_profile("first failure")
"""
CLASS = """

class Test_{name}(suite.{cls}):
    @classmethod
    def _run(cls, *args, **kwargs):
        inject({name!r})
        super()._run(*args, **kwargs)
"""


def missing(fault):
    """Return why this torch cannot have the fault; empty if it can."""
    try:
        fault.edit.source()
    except OtherTorchError as error:
        return str(error)
    return ""


def full_name(fault, cls):
    return f"test_{fault.module.replace('.', '_')}.py::{cls}::{fault.method}"


def write(folder, faults):
    """Write a file for each suite, with a class for each of its faults."""
    suites = defaultdict(list)
    for name, fault in faults.items():
        suites[fault.module].append((name, fault.cls))
    for module, pairs in suites.items():
        text = BEGINNING.format(module=module, classes=", ".join(sorted({cls for _, cls in pairs})))
        text += "".join(CLASS.format(name=name, cls=cls) for name, cls in pairs)
        (folder / f"test_{module.replace('.', '_')}.py").write_text(text)


@dataclass(frozen=True)
class Report:
    """The output of a run, and by the full name of each test its ending and its report if it failed."""

    output: str
    endings: Mapping[str, tuple[str, str]]


@pytest.fixture(scope="module")
def report_of(request, tmp_path_factory):
    """Runs on a device the tests that this run of pytest asks for: all take minutes, a single one seconds."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    asked = {(item.name.partition("[")[0], item.callspec.id) for item in items}

    @functools.cache
    def report_of(device):
        here = {name: fault for name, fault in FAULTS.items() if fault.device == device and not missing(fault)}
        faulty = {name: fault for name, fault in here.items() if ("test_suites_detect_faults", id_of(name)) in asked}
        selected = {full_name(fault, f"Test_{name}") for name, fault in faulty.items()}
        if ("test_suites_pass_without_faults", device) in asked:
            selected |= {full_name(fault, fault.cls) for fault in here.values()}
        folder = tmp_path_factory.mktemp(device)
        write(folder, here)
        return run(folder, device, sorted(selected))

    return report_of


def id_of(name):
    """The tests of a device are named so that they run in one process: see ``parallel.scope``."""
    return f"{FAULTS[name].device}/{name}"


def run(folder, device, selected):
    command = [str(CHECKOUT / "run_test.py"), "--root", str(folder), "--device", device, "-v", "-i", *selected]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_EXT_", "PYTEST_"))}
    try:
        output = subprocess.run(
            [sys.executable, *command],
            env={**kept, "PYTHONPATH": str(CHECKOUT)}, cwd=folder, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return Report(f"{error}\n{(error.stdout or b'').decode(errors='replace')}", {})
    return Report(output, endings(Run(0, output, "", 0.0)))


ANYTHING = r"(.|\n)*"
# The first fault of each folder.
DEFAULT = {(fault.device, fault.module.partition(".")[0]): name for name, fault in reversed(FAULTS.items())}.values()


@pytest.mark.costly
@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, id=id_of(each), marks=() if each in DEFAULT else pytest.mark.long) for each in FAULTS],
)
def test_suites_detect_faults(report_of, name):
    fault = FAULTS[name]
    if why := missing(fault):
        pytest.skip(f"this torch words it in another way: {why}")
    test, report = full_name(fault, f"Test_{name}"), report_of(fault.device)
    status, text = report.endings.get(test, ("never ran", ""))
    assert status == "failed", f"{fault.edit}\n{report.output[-4000:]}"
    # A report shows the drawn example before or after the difference.
    backwards = ANYTHING.join(reversed(fault.says.split(ANYTHING)))
    assert re.search(fault.says, text) or re.search(backwards, text), text


@pytest.mark.long  # `.ci/run` runs the suites as they are
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_suites_pass_without_faults(report_of, device):
    sound = {full_name(fault, fault.cls) for fault in FAULTS.values() if fault.device == device and not missing(fault)}
    report = report_of(device)
    passed = {test for test, (status, _) in report.endings.items() if status == "passed"}
    assert sound - passed == set(), report.output[-4000:]


def test_every_fault_is_valid_python_and_applies_to_its_torch():
    import torch

    if torch.__version__.startswith("2.13."):
        assert [why for fault in FAULTS.values() if (why := missing(fault))] == []
    for fault in FAULTS.values():
        if not missing(fault):
            ast.parse(fault.edit.source())
