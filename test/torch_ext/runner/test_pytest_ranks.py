"""``@pytest.mark.ranks`` and ``--forked-warm``: plain pytest is the oracle for tests that do not look at their rank."""

import json
import random
import re

import pytest

from test.torch_ext.interpreter import CHECKOUT

pytestmark = pytest.mark.processes
pytest_plugins = ("pytester",)
PLUGIN = ("-p", "torch_ext.runner.pytest_plugin", "-p", "no:cacheprovider")
WAYS = {"one process": ("-p", "no:xdist"), "two workers": ("-n", "2", "--dist", "loadfile")}

# Writes each report of pytest's own process: id, phase, outcome, and the first line of a failure.
CONFTEST = """
import json, pathlib

def pytest_runtest_logreport(report):
    if hasattr(report, "node") or not WORKER:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr or "").strip()
        said = "" if report.passed else text.partition("\\n")[0]
        entry = [report.nodeid.rpartition("/")[2], report.when, report.outcome, hasattr(report, "wasxfail"), said]
        with open(pathlib.Path(__file__).parent / "reports", "a") as file:
            file.write(json.dumps([entry, report.longreprtext, report.sections, report.user_properties]) + "\\n")

def pytest_configure(config):
    global WORKER
    WORKER = hasattr(config, "workerinput")
"""

_FIXTURE = """
@pytest.fixture(scope={scope!r})
def {name}({uses}):
    made[{name!r}] = made.get({name!r}, 0) + 1
    {before}
    yield made[{name!r}]
    {after}
"""
_SCOPES = ("function", "class", "module", "session")
_BEFORE = {
    "well": "pass", "fails": "assert [1] == [2]", "raises": "raise ValueError('in a fixture')",
    "skips": "pytest.skip('in a fixture')", "xfails": "pytest.xfail('in a fixture')",
}  # fmt: skip
_AFTER = {"ends": "pass", "breaks": "raise KeyError('at the end')"}
_MARKS = (
    "", "", "", "skip(reason='r')", "skipif(True, reason='r')", "skipif(False, reason='r')", "xfail",
    "xfail(strict=True)", "xfail(raises=ValueError)", "xfail(raises=KeyError, strict=True)", "xfail(run=False)",
    "xfail(False, reason='r')", "usefixtures('function_well_ends')", "parametrize('x', [1, 2])",
    "filterwarnings('error')",
)  # fmt: skip
_BODIES = (
    "pass", "assert 1 == 2, 'no'", "assert [1, 2] == [1, 3]", "raise ValueError('body')", "pytest.skip('body')",
    "pytest.xfail('body')", "pytest.fail('body', pytrace=False)", "raise SystemExit(3)",
    "unittest.TestCase().fail('u')",
    "warnings.warn('w')", "print('out'); assert False", "pytest.importorskip('no_such_module')",
    "with pytest.raises(ValueError):\n        int('x')", "raise unittest.SkipTest('s')",
    "get('capsys'); print('a'); assert get('capsys').readouterr().out == 'a\\n'",
    "get('capfd'); os.write(1, b'a'); assert get('capfd').readouterr().out == 'a'",
    "logging.warning('x'); assert get('caplog').messages == ['x']",
    "get('monkeypatch').setenv('HOME', 'h'); assert os.environ['HOME'] == 'h'",
    "assert get('tmp_path').is_dir()", "get('module_fails_ends')",
    "assert get('session_well_ends') == 1", "request.addfinalizer(lambda: 1 / 0)",
    "get('record_property')('k', 'v')", "assert request.node.get_closest_marker('skip') is None",
    "get('no_such_fixture')",
)  # fmt: skip


def program(seed, tests):
    """Return the source of a file of ``tests`` random tests; ``MARK`` stands for the mark under test."""
    drawn = random.Random(seed)
    names = [f"{scope}_{how}_{end}" for scope in _SCOPES for how in _BEFORE for end in _AFTER]
    lines = ["import logging, os, unittest, warnings, pytest", "made = {}"]
    for name in names:
        scope, how, end = name.split("_")
        wider = _SCOPES[_SCOPES.index(scope) :]
        uses = drawn.choice(["", f"{drawn.choice(wider[1:])}_well_ends"] if wider[1:] else [""])
        lines.append(_FIXTURE.format(scope=scope, name=name, uses=uses, before=_BEFORE[how], after=_AFTER[end]))
    well = [name for name in names if "_well_" in name]
    for number in range(tests):
        if number % 12 == 0:
            lines.append(f"class TestGroup{number}:")
        marks = [f"@pytest.mark.{mark}" for mark in {drawn.choice(_MARKS), drawn.choice(_MARKS)} if mark]
        used = drawn.sample(well, drawn.randrange(3)) + drawn.sample(names, drawn.random() < 0.2)
        arguments = ", ".join(
            ["self", "request", *dict.fromkeys(used), *(["x"] if "parametrize" in str(marks) else [])]
        )
        body = drawn.choice(_BODIES).replace("\n", "\n    ")
        lines += [
            f"    {line}"
            for line in (
                *marks,
                "MARK",
                f"def test_{number}({arguments}):",
                "    get = request.getfixturevalue",
                f"    {body}",
            )
        ]
    return "\n".join(lines) + "\n"


def reports_of(pytester, sources, *arguments):
    """Run files with ``sources`` in a new folder; return the reports by id and phase, and the result of the run."""
    folder = pytester.mkdir(f"run{len(list(pytester.path.iterdir()))}")
    (folder / "conftest.py").write_text(CONFTEST)
    for number, source in enumerate(sources):
        (folder / f"test_{number}.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    run = pytester.runpytest_subprocess(*PLUGIN, *arguments, f"--rootdir={folder}", folder)
    lines = [json.loads(line) for line in (folder / "reports").read_text().splitlines()]
    return {(entry[0], entry[1]): (entry, *more) for entry, *more in lines}, run


@pytest.fixture
def _environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("TORCH_EXT_DEVICE", "cpu")
    monkeypatch.setenv("TORCH_EXT_HANG_AFTER", "2")
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)


def differences(found, expected):
    """Return the entries of reports that are not the same, with both sides."""
    one, other = ({key: _entry(*entry) for key, (entry, *_) in each.items()} for each in (found, expected))
    return {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}


def _entry(name, when, outcome, is_expected, text):
    # Two teardowns that fail are one group of errors under plain pytest; here each of two processes reports its own.
    return outcome, is_expected, "" if when == "teardown" else re.sub(r"/run\d+/", "/run/", text)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mark", "option"), [("@pytest.mark.ranks(2)", ""), ("", "--forked-warm")])
@pytest.mark.usefixtures("_environment")
def test_tests_that_ignore_their_rank_end_as_under_plain_pytest(pytester, request, way, mark, option):
    tests = 200 if request.config.getoption("long") else 20
    sources = [program(seed, tests) for seed in (1, 2)]
    expected, plain = reports_of(pytester, [each.replace("MARK", "") for each in sources], *WAYS[way])
    marked = [each.replace("MARK", mark) for each in sources]
    found, run = reports_of(pytester, marked, *WAYS[way], *filter(None, [option]))
    found = differences(found, expected)
    assert not found, "\n".join(map(str, found.items()))
    outcomes = plain.parseoutcomes()
    assert run.parseoutcomes() == outcomes and len(outcomes) >= 6, outcomes
