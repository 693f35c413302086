"""Runs of tests below the zygote of ``torch_ext serve``: they are what they would be without, and leave nothing."""

import contextlib
import json
import os
import signal
from types import SimpleNamespace

import pytest

from test.torch_ext.servers import eventually, serving
from test.torch_ext.world.suites import suite_of
from torch_ext.runner import zygotes
from torch_ext.runner.options import RunOptions
from torch_ext.world import _os

SUITE = """
    import tempfile
    print("the file is imported", os.environ.get("CHOSEN"), file=sys.stderr)

    class TestThis(Ranks):
        def test_it(self):
            pid, above = os.getpid(), []
            while pid > 1:
                with open(f"/proc/{pid}/stat") as stat:
                    pid = int(stat.read().rpartition(")")[2].split()[1])
                above.append(pid)
            mask = os.umask(0)
            os.umask(mask)
            if self.rank == 0:
                said = os.getcwd(), mask, tempfile.gettempdir(), time.localtime(0).tm_hour, os.environ["CHOSEN"]
                note("says", json.dumps([above, *said]))
            self.check()

    class TestForever(Ranks):
        def test_it(self):
            note(f"rank{self.rank}", os.getpid())
            if self.rank == 0:
                forever()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    runtime = str(tmp_path_factory.mktemp("runtime"))
    with serving("--host", limit_s=None, XDG_RUNTIME_DIR=runtime) as process:
        yield SimpleNamespace(pid=process.pid, variables={"XDG_RUNTIME_DIR": runtime})


def zygote_of(server):
    (found,) = _os.children_of(server.pid)
    return found


@pytest.mark.costly
def test_run_starts_below_the_zygote_and_is_its_command_s(server, tmp_path):
    zygote, here = zygote_of(server), tmp_path / "here"
    here.mkdir()
    for mask, zone, hour in ((0o027, "Asia/Tokyo", 9), (0o022, "UTC", 0)):
        with suite_of(tmp_path / str(hour), SUITE) as suite:
            before = os.umask(mask)
            try:
                more = {**server.variables, "TZ": zone, "CHOSEN": str(hour)}
                run = suite.run("-i", "test_suite.py::TestThis", extra=more, cwd=here)
            finally:
                os.umask(before)
            assert run.code == 0 and run.status == {"test_it": "passed"}, run
            assert f"the file is imported {hour}" in run.err, "what a file prints belongs to its run"
            above, *said = json.loads((suite.folder / "says").read_text())
            assert zygote in above and server.pid in above
            assert said == [str(here), mask, str(suite.temporary), hour, str(hour)]
        assert eventually(lambda: _os.children_of(zygote) == [])
    assert zygote_of(server) == zygote


@pytest.mark.costly
@pytest.mark.parametrize("killed", ["the run", "the server's zygote"])
def test_a_killed_run_leaves_nothing(server, tmp_path, killed):
    if killed == "the run":
        with suite_of(tmp_path, SUITE) as suite:
            check_killed(suite, server, lambda process: process.kill())
        assert eventually(lambda: _os.children_of(zygote_of(server)) == [])
        return
    with serving("--host", XDG_RUNTIME_DIR=str(tmp_path)) as own, suite_of(tmp_path / "suite", SUITE) as suite:
        there = SimpleNamespace(pid=own.pid, variables={"XDG_RUNTIME_DIR": str(tmp_path)})
        run = check_killed(suite, there, lambda process: _os.end_process(zygote_of(there)))
        assert run.code == 1 and run.status["test_it"] == "failed", run
        assert "its zygote was killed" in run.out, run


def check_killed(suite, server, kill):
    process = suite.start_runner("-i", "test_suite.py::TestForever", extra=server.variables)
    pids = [int(suite.await_note(f"rank{rank}", process)) for rank in range(2)]
    kill(process)
    run = suite.finish(process)
    assert eventually(lambda: not any(map(_os.command_line, pids)))  # this process may have adopted zombies
    assert eventually(lambda: not [*suite.temporary.glob("torch_ext-*")]), "the scratch folder is left"
    return run


def test_interrupted_run_ends_its_tests_and_the_server_stays(server, tmp_path):
    zygote = zygote_of(server)
    with suite_of(tmp_path, SUITE) as suite:
        process = suite.start_runner("-i", "test_suite.py::TestForever", extra=server.variables)
        suite.await_note("rank1", process)
        process.send_signal(signal.SIGINT)
        run = suite.finish(process)
    assert run.code == 130, run
    assert eventually(lambda: _os.children_of(zygote) == [])
    assert zygote_of(server) == zygote


@pytest.mark.parametrize(
    ("options", "variables", "has_driver", "expected"),
    [
        ({}, {}, False, True),
        ({}, {}, True, None),  # a real device may be there
        ({"cuda_as_sim": True}, {}, True, True),
        ({}, {"TORCH_EXT_DEVICE": "sim"}, True, True),
        ({}, {"TORCH_EXT_DEVICE": "cpu"}, True, False),
        ({"pdb": 0}, {"TORCH_EXT_DEVICE": "cpu"}, False, None),  # its terminal is not the server's
    ],
)
def test_a_server_is_used_if_the_run_would_load_the_same(
    monkeypatch, tmp_path, options, variables, has_driver, expected
):
    asked = []
    monkeypatch.setattr(zygotes, "has_driver", lambda: has_driver)
    monkeypatch.setattr(zygotes, "socket_name", lambda simulated, *_: simulated)
    monkeypatch.setattr(zygotes, "connect", lambda name, held: asked.append(name))
    with contextlib.closing(zygotes.RunZygotes(RunOptions(tmp_path, **options), variables, "")) as found:
        assert found._find_warm() is None
    assert asked == ([] if expected is None else [expected])
