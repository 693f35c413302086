"""Tests whose ranks all do the same end as plain unittest says: drawn bodies, with every base class."""

import importlib.util
import json
import re
import sys
import warnings
from collections import Counter

import pytest

from test.torch_ext.verdict.drawn import BASES, OUTSIDE, class_fails, class_suite, ends, module_of_bodies, suite_text
from test.torch_ext.world.suites import suite_of

WAYS = ("run_test.py", "python file.py", "pytest")
SEED = 27
# pytest's words for the endings; it has none for an unexpected success.
IN_PYTEST = {"PASSED": "passed", "SKIPPED": "skipped", "XFAIL": "expected failure"}


def load(path):
    spec = importlib.util.spec_from_file_location("bodies", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found_by(suite, way, limit_s):
    """Run the suite of ``way``; return how each test ended, by class and method."""
    file, output = f"test_way{way}.py", suite.folder / f"way{way}.jsonl"
    if WAYS[way] == "pytest":
        command = ["-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider", file]
        out = suite.finish(suite.start(command, OUTSIDE), deadline_s=limit_s).out
        lines = re.findall(r"^\S+::(\w+)::(\w+) (PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)\b", out, re.MULTILINE)
        return {(cls, method): IN_PYTEST.get(word, "failed") for cls, method, word in lines}
    if WAYS[way] == "run_test.py":
        process = suite.start_runner("-i", file, "--json", str(output), extra=OUTSIDE)
    else:
        process = suite.start([file, "-q", "--json", str(output)], OUTSIDE)
    run = suite.finish(process, deadline_s=limit_s)
    assert output.exists(), run
    events = [json.loads(line) for line in output.read_text().splitlines()]
    return {(each["class"], each["method"]): each["status"] for each in events if each["event"] == "result"}


@pytest.mark.parametrize("way", range(len(WAYS)), ids=WAYS)
def test_identical_ranks_end_as_unittest_reports(tmp_path, request, way):
    number = 2000 if request.config.getoption("--long") else 60
    with suite_of(tmp_path, "", "test_empty.py") as suite, warnings.catch_warnings():
        (suite.folder / "bodies.py").write_text(module_of_bodies(number, SEED))
        suite.add(f"test_way{way}.py", suite_text(way, len(WAYS), number))
        found = found_by(suite, way, limit_s=number * 3.0)
        warnings.filterwarnings("error", category=UnicodeWarning)
        bodies = load(suite.folder / "bodies.py")
        expected = {
            (f"Test{base}", f"test_{n}"): ends(bodies, base)(f"test_{n}")
            for index, base in enumerate(BASES)
            for n in range(number)
            if (n + index) % len(WAYS) == way
        }
        sys.modules.pop("bodies", None)
        if WAYS[way] == "pytest":
            expected = {test: "failed" if end == "unexpected success" else end for test, end in expected.items()}
        assert len(set(Counter(expected.values()).keys())) >= 4, "the bodies are all alike"
        different = {test: (found.get(test), end) for test, end in expected.items() if found.get(test) != end}
        assert not different, f"found, expected: {different}"


def test_cleanups_of_class_and_module_that_ranks_register_count(tmp_path):
    """Where unittest reports an error of the class or the module, the class has an error or its test fails."""
    bodies, suite_source = class_suite()
    with suite_of(tmp_path, "", "test_empty.py") as suite:
        (suite.folder / "bodies.py").write_text(bodies)
        suite.add("test_way0.py", suite_source)
        found = found_by(suite, 0, limit_s=300)
        failed = {cls.removeprefix("Test") for (cls, _), end in found.items() if end == "failed"}
        names = [name for name in dir(load(suite.folder / "bodies.py")) if name.startswith("body_")]
        expected = {name for name in names if class_fails(load(suite.folder / "bodies.py"), name)}
        assert failed == expected and 0 < len(expected) < len(names)
