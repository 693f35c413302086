"""The command: a tier, its known differences, what is kept between runs, the reports and the page."""

import json
import os
import re
from xml.etree import ElementTree

import pytest

from test.torch_ext.interpreter import python
from torch_ext.conformance import page
from torch_ext.conformance.command import parse
from torch_ext.conformance.forks import Finding, Status
from torch_ext.conformance.kept import Kept
from torch_ext.results import Status as Result
from torch_ext.results import TestName, TestResult


@pytest.fixture
def conformance(tmp_path):
    """Run the command with a cache of its own for what it keeps."""

    def run(*arguments, **variables):
        cache = tmp_path / "cache"
        ran = python("-m", "torch_ext", "conformance", *arguments, XDG_CACHE_HOME=str(cache), **variables)
        return ran.returncode, ran.stdout + ran.stderr

    return run


OPS = ("--tier", "ops", "--samples", "1", "-n", "1")


@pytest.mark.long
def test_the_host_agrees_with_itself(conformance):
    code, text = conformance("--device", "cpu", *OPS, "-k", "a[bd]*")
    assert code == 0 and re.search(
        r"^ops on cpu: 100\.00 % agree \(\d{3,} cases, .* 0 differ, 0 crashed", text, re.M
    ), text


@pytest.mark.costly
def test_a_device_that_does_not_exist_is_a_usage_error(conformance):
    code, text = conformance("--device", "nodevice")
    assert code == 2 and "got the device nodevice" in text
    code, text = conformance("--device", "cpu", "-k", "no_such_operator")
    assert code == 2 and "no group fits -k 'no_such_operator'" in text


@pytest.mark.costly
def test_reports_have_every_case_and_a_second_run_runs_none(conformance, tmp_path):
    events, junit, written = tmp_path / "events.jsonl", tmp_path / "junit.xml", tmp_path / "page.md"
    reports = ("--json", str(events), "--junit", str(junit), "--page", str(written))
    code, text = conformance("--device", "cpu", *OPS, "-k", "neg", *reports)
    assert code == 0, text
    cases = re.search(r"(\d+) cases", text)[1]
    results = [event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "result"]
    assert len(results) == int(cases) == len(list(ElementTree.parse(junit).iter("testcase")))
    assert f"| ops | {cases} | {cases} | 100.00 % |" in written.read_text()
    (kept,) = (tmp_path / "cache").rglob("ops-cpu-*.jsonl")
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join([lines[0].replace('"agrees"', '"crashed"'), *lines[1:-1], lines[-1][:9]]))
    code, text = conformance("--device", "cpu", *OPS, "-k", "none", "-k", "neg")  # the last line was cut, as by a kill
    assert code == 1 and "1 crashed" in text and len(kept.read_text().splitlines()) == len(lines) + 1 - 1
    kept.write_text(kept.read_text().replace('["neg"', '["other"') + lines[0].replace('"agrees"', '"crashed"') + "\n")
    assert conformance("--device", "cpu", *OPS, "-k", "neg", "--fresh")[0] == 0
    groups = [json.loads(line)[0] for line in kept.read_text().splitlines()]
    assert {*groups} == {"neg", "other"} and groups.count("neg") == len(lines)


def test_findings_are_kept_for_the_last_keys_only(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXT_CACHE", str(tmp_path))
    for number in range(12):
        Kept("ops", "cpu", f"{number:02}").add(Finding("g", "c", Status.AGREES))
        for path in tmp_path.rglob(f"*-{number:02}.jsonl"):
            os.utime(path, (number, number))
    left = sorted(path.stem for path in tmp_path.rglob("ops-cpu-*.jsonl"))
    assert left == [f"ops-cpu-{number:02}" for number in range(4, 12)] and list(Kept("ops", "cpu", "11"))


@pytest.mark.costly
def test_a_known_difference_that_agrees_is_an_error(conformance, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps([{"test": "ops::neg::forward float32", "reason": "it rounds"}]))
    code, text = conformance("--device", "cpu", *OPS, "-k", "neg", "--differences", str(mine))
    assert code == 1 and "The known difference 'ops::neg::forward float32' no longer fails: remove its entry." in text


def found(case, status, text="", known=""):
    test = TestName("ops", "neg", case)
    result = Result.XFAIL if known else Result.FAILED if status is Status.DIFFERS else Result.PASSED
    return Finding("neg", case, status, text), TestResult(test, result, 0.0, reason=known)


def test_the_page_shows_changes_first_and_tells_crash_from_difference():
    options = parse(["--device", "cpu"])
    cases = [found("a", Status.DIFFERS, "x | y"), found("b", Status.CRASHED, "SIGSEGV"), found("c", Status.AGREES)]
    first = page.text(options, {"ops": [*cases, found("d", Status.DIFFERS, known="so")]})
    assert "Changes" not in first and "| ops | 4 | 1 | 25.00 % | 1 | 1 | 1 | 0 |" in first
    assert "| `ops::neg::b` | crashed | SIGSEGV |" in first and r"| `ops::neg::a` | differs | x \| y |" in first
    now = {"ops": [found("a", Status.AGREES), found("b", Status.CRASHED, "SIGSEGV"), found("c", Status.DIFFERS, "z")]}
    second = page.text(options, now, first)
    changes = second.partition("## Changes")[2].partition("##")[0]
    assert "- `ops::neg::a`: differs, now agrees" in changes and "- `ops::neg::c`: agreed, now differs" in changes
    assert "- `ops::neg::d`: is no longer a case" in changes and "neg::b" not in changes
    assert second.index("Changes") < second.index("Numbers")


def test_tests_of_a_file_that_the_last_page_does_not_have_did_not_agree_before():
    options = parse(["--device", "cpu", "--tier", "c10d"])
    old, case = found("a", Status.AGREES), Finding("test_n.py", "T::b", Status.DIFFERS, known="so")
    new = case, TestResult(TestName("c10d", "test_n.py", "T::b"), Result.XFAIL, 0.0, reason="so")
    before = page.text(options, {"c10d": [old]})
    first = page.text(options, {"c10d": [old, new]}, before)
    assert "- new files: `test_n.py`\n" in first and "agreed" not in first
    assert "None." in page.text(options, {"c10d": [old, new]}, first)
    refused = Finding("test_n.py", "T::b", Status.REFUSED, "fails on the host, too"), new[1]
    assert "- `c10d::test_n.py::T::b`: known, now not counted" in page.text(options, {"c10d": [old, refused]}, first)


def test_a_tier_that_did_not_run_stays_on_the_page_with_its_date():
    options = parse(["--device", "cpu"])
    ops = page.text(options, {"ops": [found("a", Status.DIFFERS, "x")]})
    today = re.search(r"device `cpu`, ([\d-]+)\.", ops)[1]
    ops = ops.replace(today, "2001-02-03")
    both = page.text(options, {"c10d": [found("b", Status.AGREES)]}, ops)
    assert f"device `cpu`, {today}; ops: 2001-02-03." in both and "None." in both.partition("## Numbers")[0]
    assert both.index("| ops | 1 | 0 |") < both.index("| c10d | 1 | 1 |")
    assert "| `ops::neg::a` | differs | x |" in both
    again = page.text(options, {"c10d": [found("b", Status.AGREES)]}, both)
    assert again == both
    assert "ops" not in page.text(parse(["--device", "meta"]), {"c10d": []}, both).partition("## Numbers")[2]
