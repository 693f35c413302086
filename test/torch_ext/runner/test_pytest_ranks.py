"""``@pytest.mark.ranks`` and ``--forked-warm``: plain pytest is the oracle for tests that do not look at their rank."""

import json
import random
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from test.torch_ext.interpreter import CHECKOUT
from torch_ext import cache

COSTLY = pytest.mark.costly  # one mark: these tests share a run
pytestmark = pytest.mark.processes
pytest_plugins = ("pytester",)
BUILT = str(cache.folder())  # before pytester has a home of its own, where nothing is built
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


def prepare(patched):
    """Let the runs find torch_ext, on plain cpu, without what this run has set."""
    patched.setenv("PYTHONPATH", str(CHECKOUT))
    patched.setenv("TORCH_EXT_DEVICE", "cpu")
    patched.setenv("TORCH_EXT_HANG_AFTER", "2")
    patched.setenv("TORCH_EXT_CACHE", BUILT)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        patched.delenv(name, raising=False)


def differences(found, expected):
    """Return the entries of reports that are not the same, with both sides."""
    one, other = ({key: _entry(*entry) for key, (entry, *_) in each.items()} for each in (found, expected))
    return {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}


def _entry(name, when, outcome, is_expected, text):
    # Two teardowns that fail are one group of errors under plain pytest; here each of two processes reports its own.
    return outcome, is_expected, "" if when == "teardown" else re.sub(r"/run\d+/", "/run/", text)


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("mark", "option", "way"),
    [
        ("@pytest.mark.ranks(2)", "", "one process"),
        ("", "--forked-warm", "one process"),
        pytest.param("@pytest.mark.ranks(2)", "", "two workers", marks=pytest.mark.long),
        pytest.param("", "--forked-warm", "two workers", marks=pytest.mark.long),
    ],
)
def test_tests_that_ignore_their_rank_end_as_under_plain_pytest(pytester, monkeypatch, request, mark, option, way):
    prepare(monkeypatch)
    tests = 200 if request.config.getoption("long") else 20
    sources = [program(seed, tests) for seed in (1, 2)]
    expected, plain = reports_of(pytester, [each.replace("MARK", "") for each in sources], *WAYS[way])
    marked = [each.replace("MARK", mark) for each in sources]
    found, run = reports_of(pytester, marked, *WAYS[way], *filter(None, [option]))
    found = differences(found, expected)
    assert not found, "\n".join(map(str, found.items()))
    outcomes = plain.parseoutcomes()
    assert run.parseoutcomes() == outcomes and len(outcomes) >= 6, outcomes


HEAD = """
import ctypes, logging, os, pytest, signal, subprocess, sys, threading, time, unittest, warnings
import torch, torch.distributed as dist

ranks, ranks2 = pytest.mark.ranks(3), pytest.mark.ranks(2)
only_one = pytest.mark.forked_warm
HERE = os.getpid()

def sums(rank, group=None):
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    os.environ["SHARED"] = "set"
    folder = tmp_path_factory.mktemp("shared")
    yield {"pid": os.getpid(), "folder": folder, "asked": []}
    (folder / "gone").touch()
    del os.environ["SHARED"]

@pytest.fixture(scope="session", params=["a", "b"])
def letter(request):
    return request.param

@pytest.fixture
def mine(rank, tmp_path):
    (tmp_path / f"made{rank}").touch()
    yield rank
    (tmp_path / f"ended{rank}").touch()

@pytest.fixture
def fails_on_one(rank):
    assert rank != 1, "one is bad"

@pytest.fixture
def skips_on_one(rank):
    if rank == 1:
        pytest.skip("one skips")

@pytest.fixture
def ends_badly_on_one(rank):
    yield
    assert rank != 1, "bad end"

@pytest.fixture
def dies_on_one(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)

@pytest.fixture(scope="module")
def with_thread():
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="server")
    thread.start()
    yield thread
    event.set()
    thread.join()

@pytest.fixture(scope="module")
def with_lasting_thread():
    threading.Thread(target=time.sleep, args=(1000,), name="lasting", daemon=True).start()

@pytest.fixture(scope="module")
def with_process():
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()

@pytest.fixture(scope="module")
def dead_module():
    os._exit(7)

@pytest.fixture(scope="module")
def of_rank(rank):
    pass

@pytest.fixture(autouse=True)
def everywhere(request):
    request.node.everywhere = os.getpid()
"""
# name: code, outcomes of setup, call and teardown (f: failed, s: skipped, x: failed as expected, .: passed, -: none),
# and a pattern for the text of what failed.
CASES = {
    "numbers": ("@ranks\ndef T(rank, world_size):\n    assert world_size == 3 and rank in (0, 1, 2)", "...", ""),
    "fresh": ("@ranks\ndef T(rank, request):\n    assert os.getpid() not in (HERE, os.getppid())\n"
              "    assert request.node.everywhere == os.getpid()", "...", ""),
    "mesh": ("@ranks\ndef T(rank, mesh, device):\n    assert mesh.size() == 3 and sums(rank) == 3\n"
             "    assert mesh.device_type == device.type == 'cpu'", "...", ""),
    "env": ("@ranks\ndef T(rank):\n    dist.init_process_group('gloo')\n    assert sums(rank) == 3", "...", ""),
    "own_group": ("@ranks\ndef T(rank, tmp_path):\n    dist.init_process_group('gloo', rank=rank, world_size=3,\n"
                  "        init_method=f'file://{tmp_path}/f')\n    assert sums(rank) == 3\n"
                  "    dist.destroy_process_group()", "...", ""),
    "tmp_path": ("@ranks\ndef T(rank, mesh, tmp_path):\n    (tmp_path / str(rank)).touch()\n    dist.barrier()\n"
                 "    assert len(os.listdir(tmp_path)) == 3", "...", ""),
    "function_fixture": ("@ranks\ndef T(mine, rank, mesh, tmp_path):\n    dist.barrier()\n"
                         "    assert mine == rank and len(os.listdir(tmp_path)) == 3\n    dist.barrier()", "...", ""),
    "module_fixture": ("@ranks\ndef T(shared, mesh, rank):\n    assert shared['pid'] == os.getppid()\n"
                       "    (shared['folder'] / str(rank)).touch()\n    shared['asked'].append(1)", "...", ""),
    "module_fixture_again": ("@ranks\ndef T(shared, rank):\n"
                             "    assert {*os.listdir(shared['folder'])} == {'0', '1', '2'}\n"
                             "    assert not shared['asked'] and os.environ['SHARED'] == 'set'", "...", ""),
    "dynamic": ("@ranks\ndef T(request, rank):\n    assert request.getfixturevalue('mine') == rank", "...", ""),
    "monkeypatch": ("@ranks\ndef T(rank, monkeypatch):\n    monkeypatch.setenv('A_NAME', str(rank))\n"
                    "    assert os.environ['A_NAME'] == str(rank)", "...", ""),
    "monkeypatch_is_gone": ("@ranks\ndef T(rank):\n    assert 'A_NAME' not in os.environ", "...", ""),
    "capfd": ("@ranks\ndef T(rank, capfd):\n    os.system(f'echo {rank}')\n"
              "    assert capfd.readouterr().out == f'{rank}\\n'", "...", ""),
    "capsys": ("@ranks\ndef T(rank, capsys):\n    print(rank)\n    assert capsys.readouterr().out == f'{rank}\\n'",
               "...", ""),
    "caplog": ("@ranks\ndef T(rank, caplog):\n    logging.warning('of %s', rank)\n"
               "    assert caplog.messages == [f'of {rank}']", "...", ""),
    "recwarn": ("@ranks\ndef T(rank, recwarn):\n    warnings.warn('w')\n    assert len(recwarn) == 1", "...", ""),
    "warning": ("@ranks\ndef T(rank):\n    warnings.warn(f'told of {rank}')", "...", ""),
    "param": ("@ranks\n@pytest.mark.parametrize('n', [5])\ndef T(rank, n):\n    assert n == 5", "...", ""),
    "param_fixture": ("@ranks\ndef T(rank, letter):\n    assert letter in 'ab'", "...", ""),
    "param_device": ("@ranks\n@pytest.mark.parametrize('device', ['x'])\ndef T(rank, device):\n"
                     "    assert device == 'x'", "...", ""),
    "own_names": ("class T:\n    @pytest.fixture\n    def rank(self):\n        return 'mine'\n    @ranks\n"
                  "    def test_it(self, rank):\n        assert rank == 'mine'", "...", ""),
    "whole_class": ("@ranks\nclass T:\n    @pytest.fixture(scope='class', autouse=True)\n    def once(self):\n"
                    "        type(self).at = os.getpid()\n    def test_it(self, rank, world_size):\n"
                    "        assert world_size == 3 and self.at == os.getppid()", "...", ""),
    "xunit": ("@ranks\nclass T:\n    def setup_class(cls):\n        cls.at = os.getpid()\n    def setup_method(self):\n"
              "        self.own = os.getpid()\n    def test_it(self, rank):\n"
              "        assert self.at == os.getppid() and self.own == os.getpid()", "...", ""),
    "case": ("@ranks\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.own = os.getpid()\n"
             "    def test_it(self):\n        self.assertEqual(self.own, os.getpid())\n"
             "        self.assertEqual(os.environ['WORLD_SIZE'], '3')", "...", ""),
    "async": ("@ranks\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_it(self):\n"
              "        self.assertEqual(os.environ['WORLD_SIZE'], '3')", "...", ""),
    "skip": ("@ranks\ndef T(rank):\n    pytest.skip('all')", ".s.", "all"),
    "skip_mark": ("@ranks\n@pytest.mark.skip(reason='never')\ndef T(rank):\n    assert False", "s-.", "never"),
    "skip_alone": ("@ranks\ndef T(rank):\n    if rank == 1:\n        pytest.skip('alone')", ".f.",
                   "rank 1 skipped .*alone.*make the condition the same"),
    "skip_two": ("@ranks\ndef T(rank):\n    if rank != 1:\n        pytest.skip('two')", ".f.", "rank 1 did not skip"),
    "skip_in_fixture_alone": ("@ranks\ndef T(skips_on_one):\n    pass", "f-.", "rank 1 skipped .*one skips"),
    "xfail": ("@ranks\n@pytest.mark.xfail\ndef T(rank):\n    assert False", ".x.", ""),
    "xfail_on_one": ("@ranks\n@pytest.mark.xfail(strict=True)\ndef T(rank):\n    assert rank != 1", ".x.", ""),
    "xfail_waits": ("@ranks\n@pytest.mark.xfail\ndef T(rank, mesh):\n    assert rank != 1\n    dist.barrier()",
                    ".x.", ""),
    "xfail_and_slow_peers": ("@ranks\n@pytest.mark.xfail\ndef T(rank):\n    assert rank != 1\n    time.sleep(2)",
                             ".x.", ""),
    "xfail_passes": ("@ranks\n@pytest.mark.xfail(strict=True)\ndef T(rank):\n    pass", ".f.", "XPASS"),
    "xfail_other_error": ("@ranks\n@pytest.mark.xfail(raises=KeyError)\ndef T(rank):\n    assert rank != 1", ".f.",
                          "rank 1 raised AssertionError"),
    "xfail_dies": ("@ranks\n@pytest.mark.xfail\ndef T(rank):\n    os._exit(3)", ".f-", "exited with code 3"),
    "xfail_not_run": ("@ranks\n@pytest.mark.xfail(run=False)\ndef T(rank):\n    os._exit(3)", "x-.", ""),
    "xfail_marked_late": ("@ranks\ndef T(rank, request):\n    request.node.add_marker(pytest.mark.xfail)\n    assert 0",
                          ".x.", ""),
    "fails_on_one": ("@ranks\ndef T(rank):\n    value = [1, rank]\n    if rank == 1:\n"
                     "        assert value == [1, 2]", ".f.",
                     r"assert \[1, 1\] == \[1, 2\][\s\S]*rank 1 raised AssertionError at test_0.py:\d+[\s\S]*<- first"),
    "fails_and_waits": ("@ranks\ndef T(rank, mesh):\n    if rank == 2:\n        raise ValueError('no')\n"
                        "    dist.barrier()", ".f.",
                        r"ValueError: no[\s\S]*rank 2 raised ValueError[\s\S]*because of that"),
    "two_ways": ("@ranks\ndef T(rank):\n    if rank == 0:\n        raise KeyError('a')\n    if rank == 1:\n"
                 "        time.sleep(0.3)\n        raise IndexError('b')", ".f.", "failed in another way"),
    "fails_then_teardown_waits": ("@ranks\ndef T(rank, mesh, request):\n    request.addfinalizer(dist.barrier)\n"
                                  "    assert rank != 1\n    sums(rank)", ".f.", "rank 1 raised AssertionError"),
    "setup_on_one": ("@ranks\ndef T(fails_on_one, mesh):\n    dist.barrier()", "f-.",
                     r"def fails_on_one\(rank\)[\s\S]*one is bad[\s\S]*rank 1 raised AssertionError"),
    "teardown_on_one": ("@ranks\ndef T(ends_badly_on_one):\n    pass", "..f", r"bad end[\s\S]*rank 1 raised"),
    "setup_dies": ("@ranks\ndef T(dies_on_one):\n    pass", "f--", "rank 1 was killed by SIGSEGV"),
    "dies": ("@ranks\ndef T(rank):\n    print('last words')\n    rank == 1 and ctypes.string_at(0)", ".f-",
             r"rank 1 was killed by SIGSEGV at test_0.py[\s\S]*last words"),
    "exits": ("@ranks\ndef T(rank):\n    rank == 1 and os._exit(0)", ".f-", "rank 1 exited with code 0"),
    "sys_exit": ("@ranks\ndef T(rank):\n    sys.exit(0)", ".f.", "SystemExit: 0"),
    "hangs": ("@ranks\ndef T(rank, mesh):\n    if rank != 1:\n        dist.barrier()", ".f-",
              "rank 1 (passed|never called|ended)|ranks 0, 2 called barrier"),
    "mismatch": ("@ranks\ndef T(rank, mesh):\n    dist.barrier() if rank == 1 else sums(rank)", ".f-",
                 "rank 1 called barrier"),
    "timeout": ("@pytest.mark.ranks(2, timeout=1)\ndef T(rank):\n    while rank:\n        pass", ".f-", "timed out"),
    "thread": ("@ranks\ndef T(rank):\n    threading.Thread(target=lambda: 1 / (rank - 1)).start()", ".f.",
               "rank 1 [\\s\\S]*ZeroDivisionError"),
    "leaves_process": ("@ranks\ndef T(rank):\n    subprocess.Popen(['sleep', '100'])", "...", ""),
    "fixture_thread": ("@ranks\ndef T(with_thread):\n    pass", "f-.",
                       "module fixture 'with_thread' cannot be shared by forks: .*'server'.*function scope"),
    "after_thread": ("@ranks\ndef T(shared):\n    pass", "...", ""),
    "fixture_lasting_thread": ("@ranks\ndef T(with_lasting_thread):\n    pass", "f-.", "'lasting'.*function scope"),
    "after_lasting_thread": ("@ranks\ndef T(shared):\n    pass", "...", ""),
    "fixture_process": ("@ranks\ndef T(with_process, rank):\n    os.kill(with_process.pid, 0)", "...", ""),
    "fixture_process_lives": ("@ranks\ndef T(with_process, rank):\n    os.kill(with_process.pid, 0)", "...", ""),
    "fixture_exits": ("@ranks\ndef T(dead_module):\n    pass", "f-.", "ended during this test, by such a fixture"),
    "after_exit": ("@ranks\ndef T(shared, mesh, rank):\n    assert sums(rank) == 3", "...", ""),
    "wide_rank": ("@ranks\ndef T(of_rank):\n    pass", "f-.", "ScopeMismatch"),
    "no_number": ("@pytest.mark.ranks\ndef T():\n    pass", "f-.", r"got pytest.mark.ranks\(\), expected a number"),
    "no_ranks": ("@pytest.mark.ranks(0)\ndef T():\n    pass", "f-.", r"got pytest.mark.ranks\(0\), expected a number"),
    "plain": ("def T(shared):\n    assert shared['pid'] == os.getpid() == HERE", "...", ""),
    "plain_rank": ("def T(rank):\n    pass", "f-.", "'rank' of torch_ext is for tests with @pytest.mark.ranks"),
    "warm": ("@only_one\ndef T(tmp_path):\n    assert os.getpid() != HERE and 'RANK' not in os.environ", "...", ""),
    "warm_dies": ("@only_one\ndef T():\n    os.abort()", ".f-", "SIGABRT"),
    "warm_fails": ("@only_one\ndef T():\n    print('said')\n    assert [1] == [2]", ".f.", r"assert \[1\] == \[2\]"),
    "warm_isolates": ("@only_one\ndef T():\n    assert 'x' not in vars(pytest)\n    pytest.x = 1", "...", ""),
    "warm_isolates_again": ("@only_one\ndef T():\n    assert 'x' not in vars(pytest)", "...", ""),
}  # fmt: skip
_LETTERS = {"passed": ".", "failed": "f", "skipped": "s"}


@pytest.fixture(scope="module", params=["one process", pytest.param("two workers", marks=pytest.mark.long)])
def table(request, tmp_path_factory):
    """Run all cases; return for each test the letters of its phases and the text of what failed, and the run."""
    patched = pytest.MonkeyPatch()
    request.addfinalizer(patched.undo)
    prepare(patched)
    folder = tmp_path_factory.mktemp("table")
    named = [
        code.replace("def T(", f"def test_{name}(").replace("class T", f"class Test_{name}")
        for name, (code, *_) in CASES.items()
    ]
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_0.py").write_text("\n\n".join([HEAD, *named]) + "\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = x\naddopts = --strict-markers -rw\n")
    command = [sys.executable, "-m", "pytest", *PLUGIN, *WAYS[request.param], f"--rootdir={folder}", "--junitxml=x.xml"]
    run = subprocess.run([*command, "test_0.py"], cwd=folder, capture_output=True, text=True, check=False)
    found = {}
    for line in (folder / "reports").read_text().splitlines():
        (name, when, outcome, expected, _), text, *_ = json.loads(line)
        letter = "x" if expected and outcome == "skipped" else _LETTERS[outcome]
        case = re.search(r"[tT]est_(?!0\.py|it\b)(\w+)", name)[1]
        found.setdefault(case, []).append((when, letter, text))
    return found, run, folder


@COSTLY
@pytest.mark.parametrize("name", CASES)
def test_a_case_ends_as_expected(table, name):
    found, run, _ = table
    _, expected, pattern = CASES[name]
    assert name in found, run.stdout
    phases = {when: letter for when, letter, _ in found[name]}
    shown = "".join(phases.get(when, "-") for when in ("setup", "call", "teardown"))
    text = "\n".join(text for _, _, text in found[name])
    assert shown == expected[:2] + expected[2].replace("-", "."), text
    assert re.search(pattern, text), text


@COSTLY
def test_the_summary_has_the_warnings_of_one_rank_and_the_xml_has_all_cases(table):
    found, run, folder = table
    assert "UserWarning: told of 0" in run.stdout and "told of 1" not in run.stdout
    named = [case.get("name") for case in ElementTree.parse(folder / "x.xml").iter("testcase")]
    assert len(set(named) - {"test_it"}) >= len(CASES) - 5 and len(found) == len(CASES)


@pytest.mark.long
def test_a_fixture_of_a_plugin_that_was_loaded_before_ours_wins(pytester, monkeypatch):
    prepare(monkeypatch)
    pytester.makepyfile(early="import pytest\n@pytest.fixture\ndef device():\n    return 'early'\n")
    monkeypatch.syspath_prepend(pytester.path)
    test = "import pytest\n@pytest.mark.ranks(2)\ndef test_it(device):\n    assert device == 'early'\n"
    pytester.makepyfile(test)
    run = pytester.runpytest_subprocess("-p", "early", *PLUGIN)
    assert run.parseoutcomes() == {"passed": 1}


RACES = """
import pytest, torch

def double_on_the_side(device, waits):
    tensor, side = torch.full((5,), 1.0, device=device), torch.Stream(device)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor * 2
    torch.accelerator.synchronize()

@pytest.mark.ranks(2)
@pytest.mark.parametrize("waits", [True, False])
def test_race(device, mesh, rank, waits):
    assert (mesh.device_type, device.index) == ("sim", rank)
    double_on_the_side(device, waits)

@pytest.mark.ranks(2)
def test_skip(device):
    double_on_the_side(device, False)
    pytest.skip("a race does not hide behind a skip")
"""


@pytest.mark.costly
def test_bodies_on_the_simulated_device_are_checked_for_races(pytester, monkeypatch):
    prepare(monkeypatch)
    monkeypatch.setenv("TORCH_EXT_DEVICE", "sim")
    found, run = reports_of(pytester, [RACES], *WAYS["one process"])
    calls = {name.partition("::")[2]: entry[2] for (name, when), (entry, *_) in found.items() if when == "call"}
    assert calls == {"test_race[True]": "passed", "test_race[False]": "failed", "test_skip": "failed"}, run.stdout.str()
    text = found["test_0.py::test_race[False]", "call"][1]
    assert re.search(r"1 race on rank \d: stream \d of sim:\d must wait for the default stream", text), text
    assert "in double_on_the_side" in text and "_pytest" not in text, text
