"""``torch_ext serve``: its zygote starts the same programs as the command would, for its user alone."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.program.commands import run, start
from test.torch_ext.servers import eventually, serving
from torch_ext.world import _os, warm

_LIMIT_S = 120.0

_SAYS_WHAT_IT_IS = """
    import os, sys, tempfile, time
    mask = os.umask(0)
    if os.environ["RANK"] == "1":
        time.sleep(600)
    print(os.getppid(), os.getcwd(), oct(mask), tempfile.gettempdir(), time.localtime(0).tm_hour, sys.argv[1:],
          repr(sys.stdin.read()), flush=True)
    sys.exit(7)
"""
_WAITS = """
    import os, time
    try:
        print(os.getpid(), flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("saved", flush=True)
"""


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[str]
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def zygotes(self):
        return _os.children_of(self.process.pid)

    def run(self, options, program, *arguments, folder, **more):
        options = f"-n 2 --device cpu --output rank0 {options}"
        return run(options, program, *arguments, folder=folder, **self.variables, **more)

    def start(self, program, folder):
        folder.mkdir(exist_ok=True)
        return start("-n 2 --device cpu", program, folder=folder, **self.variables)

    def folder(self):
        return Path(self.variables["XDG_RUNTIME_DIR"], "torch_ext")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # The path is longer than the name of a socket may be.
    runtime = tmp_path_factory.mktemp("r" * 100)
    variables = {"XDG_RUNTIME_DIR": str(runtime)}
    with serving("--host", **variables) as process:
        yield _Server(process, variables)
        process.terminate()
        assert process.wait(timeout=_LIMIT_S) == 0


@pytest.mark.costly
def test_ranks_run_their_own_command(server, tmp_path):
    (zygote,) = server.zygotes
    assert stat.S_IMODE(server.folder().stat().st_mode) == 0o700
    for mask, zone, hour in ((0o027, "Asia/Tokyo", 9), (0o022, "UTC", 0)):
        folder = tmp_path / f"it's {hour}"
        folder.mkdir()
        before = os.umask(mask)
        try:
            ended = server.run("", _SAYS_WHAT_IT_IS, "a b", folder=folder, TZ=zone, TMPDIR=str(tmp_path))
        finally:
            os.umask(before)
        assert ended.stdout == f"{zygote} {folder} {oct(mask)} {tmp_path} {hour} ['a b'] ''\n"
        assert "rank 0 raised SystemExit" in ended.stderr
        assert ended.returncode == 7
    assert server.zygotes == [zygote]


def test_end_of_one_command_does_not_affect_another(server, tmp_path):
    zygotes = server.zygotes
    with server.start(_WAITS, tmp_path / "one") as one, server.start(_WAITS, tmp_path / "two") as two:
        pids = {
            each: [int(each.stdout.readline().split()[-1]) for _ in range(2)]
            for each in (one, two)
            if each.stdout is not None
        }
        assert all(_os.children_of(zygotes[0]).count(pid) == 1 for pid in (*pids[one], *pids[two]))
        one.kill()
        assert eventually(lambda: not set(pids[one]) & set(_os.children_of(zygotes[0])))
        assert set(pids[two]) <= set(_os.children_of(zygotes[0]))
        two.send_signal(signal.SIGINT)
        out, err = two.communicate(timeout=_LIMIT_S)
    assert (two.returncode, sorted(out.splitlines())) == (130, ["[rank 0] saved", "[rank 1] saved"])
    assert "Traceback" not in err
    assert server.zygotes == zygotes


def test_second_server_is_refused_and_mismatched_command_warned(server, monkeypatch, capfd):
    with pytest.raises(AssertionError, match="another process already serves these runs"):
        with serving("--host", **server.variables):
            pass
    monkeypatch.setenv("XDG_RUNTIME_DIR", server.variables["XDG_RUNTIME_DIR"])
    with contextlib.ExitStack() as held:
        assert warm.connect(warm.socket_name(True, (), {}), held) is None
        assert capfd.readouterr().err == "", "the other device is another matter"
        assert warm.connect(warm.socket_name(False, (), {}), held) is None
    assert "`torch_ext serve` is not used: its interpreter, search path or environment" in capfd.readouterr().err


@pytest.mark.long
def test_changed_file_reloads_and_dead_zygote_ends_the_server(tmp_path):
    loaded = tmp_path / "loaded"
    loaded.mkdir()
    (loaded / "sitecustomize.py").write_text("VALUE = 'old'")
    variables = {"XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{loaded}"}
    program = "import os, sitecustomize\nprint(os.getppid(), sitecustomize.VALUE, flush=True)"
    with serving("--host", **variables) as process:
        server = _Server(process, variables)
        (first,) = server.zygotes
        assert server.run("", program, folder=tmp_path).stdout == f"{first} old\n"
        (loaded / "sitecustomize.py").write_text("VALUE = 'newer'")
        assert server.run("", program, folder=tmp_path).stdout.split()[1] == "newer"
        assert process.stdout.readline() == f"torch_ext: {loaded}/sitecustomize.py has changed: loading again\n"
        assert "serving runs on cpu" in process.stdout.readline()
        (second,) = server.zygotes
        assert second != first
        assert server.run("", program, folder=tmp_path).stdout == f"{second} newer\n"
        ended = server.run("", "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)", folder=tmp_path)
        lost = "error: `torch_ext serve`, which had started the ranks, has ended; the ranks ended with it\n"
        assert ended.stderr.endswith(lost)
        assert ended.returncode == 1
        assert process.wait(timeout=_LIMIT_S) == 1
        assert "error: the zygote has ended" in process.stdout.read()
        assert list(server.folder().iterdir()) == []


@pytest.mark.costly
def test_idle_server_ends(tmp_path):
    with serving("--host", "--idle", "0.1", XDG_RUNTIME_DIR=str(tmp_path)) as process:
        assert process.wait(timeout=_LIMIT_S) == 0
    assert list((tmp_path / "torch_ext").iterdir()) == []


def test_a_command_makes_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with contextlib.ExitStack() as held:
        assert warm.connect(warm.socket_name(True, (), {}), held) is None
    assert list(tmp_path.iterdir()) == []


def test_run_rejects_a_folder_open_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with warm.folder(makes=True) as place:
        assert place.samefile(tmp_path / "torch_ext")
    place = tmp_path / "torch_ext"
    place.chmod(0o755)
    with pytest.raises(PermissionError, match="is not private to you"), warm.folder():
        pass
    place.rmdir()
    (tmp_path / "of_others").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "of_others")
    with pytest.raises(PermissionError, match="is not private to you"), warm.folder():
        pass


def test_owner_of_the_peer_comes_from_the_kernel(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert warm.is_own(ours)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not warm.is_own(ours)


def test_an_editable_installation_is_the_same_in_every_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["", str(tmp_path), "__editable__.a.finder.__path_hook__"])
    found = []
    for folder in (tmp_path, CHECKOUT):
        monkeypatch.chdir(folder)
        found.append(warm.socket_name(False, warm.search_path(), {}))
    assert found[0] == found[1]
    assert found[0] != warm.socket_name(True, warm.search_path(), {})
    assert found[0] != warm.socket_name(False, warm.search_path(), {"OMP_NUM_THREADS": "1"})
