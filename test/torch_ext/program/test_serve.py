"""``torch_ext serve``: its zygote serves runs, of its user alone, and ends by itself."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from test.torch_ext.program.commands import run, serve
from torch_ext.program import warm

_SAYS_ITS_PARENT = "import os\nprint(os.getppid(), os.environ['MARKED'], os.getcwd(), flush=True)\n"


def test_runs_share_a_zygote_until_it_is_ended(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    with serve("--host", XDG_RUNTIME_DIR=str(runtime)) as server:
        folder = runtime / "torch_ext"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        said = []
        for mark in ("one", "two"):
            options = "-n 2 --device cpu --output rank0"
            ended = run(options, _SAYS_ITS_PARENT, folder=tmp_path, XDG_RUNTIME_DIR=str(runtime), MARKED=mark)
            parent, *rest = ended.out.split()
            assert (ended.code, rest) == (0, [mark, str(tmp_path)])
            said.append(parent)
        assert said[0] == said[1], "both were started by one zygote"
        server.terminate()
        assert server.wait(timeout=120) == 0
    assert list(folder.iterdir()) == []


def test_it_ends_by_itself_when_nothing_has_run_for_a_while(tmp_path: Path) -> None:
    with serve("--host", "--idle", "0.1", XDG_RUNTIME_DIR=str(tmp_path)) as server:
        assert server.wait(timeout=120) == 0
    assert list((tmp_path / "torch_ext").iterdir()) == []


def test_a_run_does_not_trust_what_others_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = warm.address_of(False, ("a",))
    assert address != warm.address_of(False, ("b",)), "another search path finds other modules"
    address.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder of yours alone"):
        warm.address_of(False, ("a",))


def test_the_kernel_is_asked_whose_process_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert warm.is_own(ours)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not warm.is_own(ours)
