"""A run of tests beside ``torch_ext serve``: what its zygote lends is what the run would have started by itself."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.program.commands import eventually, serving
from torch_ext.warm import lent
from torch_ext.world import _os
from torch_ext.world.protocol import LentOrder, Preparation, RootOrder

_LIMIT_S = 180.0

# Notes, by who asks: the import, the parent half, the rank.
_SAYS_WHAT_IT_IS = """
    import json, os, random, resource, signal, sys, tempfile, time
    import numpy, torch
    from torch_ext.testing._internal.common_distributed import MultiProcessTestCase
    from torch_ext.world import _os

    print("printed while it is imported")

    def note(who):
        mask = os.umask(0)
        os.umask(mask)
        found = {
            "cwd": os.getcwd(), "umask": mask, "temporary": tempfile.gettempdir(), "hour": time.localtime(0).tm_hour,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE), "cores": sorted(os.sched_getaffinity(0)),
            "hangup": signal.getsignal(signal.SIGHUP).name, "stdin": os.readlink("/proc/self/fd/0"),
            "path": sys.path, "argv": sys.argv, "variables": sorted(os.environ.items()),
            "variables at start": sorted(_os.environment_at_start().items()),
            "variables that others see": sorted(_os.environment_of(os.getpid()).items()),
        }
        drawn = [numpy.random.random(), random.random(), torch.initial_seed()]
        with open(os.path.join(os.environ["NOTES"], f"{who}.json"), "w") as stream:
            json.dump({"found": found, "drawn": drawn}, stream)

    note("import")

    class TestIt(MultiProcessTestCase):
        world_size = 1

        def setUp(self):
            super().setUp()
            note("parent half")
            self._spawn_processes()

        def test_it(self):
            note("rank")
"""
# What differs between any two runs.
_OF_THE_RUN = ("TORCH_EXT_OWNER", "TMPDIR", "NOTES", "TORCH_EXT_ADDRESS", "XDG_RUNTIME_DIR")
_WAITS = """
    import os, tempfile, time, unittest

    class TestIt(unittest.TestCase):
        def test_it(self):
            print("pid", os.getpid(), flush=True)
            time.sleep(600)
"""


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[str]
    runtime: Path

    @property
    def zygote(self) -> int:
        (found,) = _os.children_of(self.process.pid)
        return found

    def lent(self) -> list[int]:
        return _os.children_of(self.zygote)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    runtime = tmp_path_factory.mktemp("runtime")
    with serving("--host", XDG_RUNTIME_DIR=str(runtime)) as process:
        yield _Server(process, runtime)


def _suite(folder: Path, source: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(dedent(source), encoding="utf-8")
    return folder


def _start(root: Path, runtime: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    temporary = root.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_EXT_")}
    return subprocess.Popen(
        [sys.executable, str(CHECKOUT / "run_test.py"), "--device", "cpu", "--root", str(root), *arguments],
        cwd=root,
        env={
            **kept,
            "PYTHONPATH": str(CHECKOUT),
            "XDG_RUNTIME_DIR": str(runtime),
            "TORCH_EXT_CACHE": str(root.parent / "cache"),
            "TMPDIR": str(temporary),
            **more,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def _run(root: Path, runtime: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    with _start(root, runtime, *arguments, **more) as process:
        try:
            out, err = process.communicate(timeout=_LIMIT_S)
        finally:
            process.kill()
    return process.returncode, out, err


@contextlib.contextmanager
def _odd_surroundings() -> Iterator[None]:
    """Within, what this process starts has another umask, fewer files, one core, and ignores SIGHUP."""
    umask, files, cores = os.umask(0o027), resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        signal.signal(signal.SIGHUP, before)
        os.umask(umask)


def test_every_process_of_a_run_is_what_it_would_be_alone(server: _Server, tmp_path: Path) -> None:
    notes: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, runtime in (("alone", tmp_path), ("lent", server.runtime), ("lent again", server.runtime)):
        root = _suite(tmp_path / kind / "suite", _SAYS_WHAT_IT_IS)
        with _odd_surroundings():
            code, out, err = _run(root, runtime, "-v", TZ="Asia/Tokyo", NOTES=str(root), OTHER="value")
        assert code == 0, out + err
        assert err == "printed while it is imported\n"
        notes[kind] = {who: json.loads((root / f"{who}.json").read_text()) for who in ("import", "parent half", "rank")}
        for note in notes[kind].values():
            found = note["found"]
            for kept in ("variables", "variables at start", "variables that others see"):
                found[kept] = [pair for pair in found[kept] if pair[0] not in _OF_THE_RUN]
            text = json.dumps(found).replace(str(root.parent), "FOLDER")
            note["found"] = json.loads(text)
    for who in ("import", "parent half", "rank"):
        alone, once, again = (notes[kind][who] for kind in ("alone", "lent", "lent again"))
        assert alone["found"] == once["found"] == again["found"], who
        found = alone["found"]
        assert (found["umask"], found["hour"], found["hangup"]) == (0o027, 9, "SIG_IGN"), "the test asks what differs"
    drawn = zip(*(notes[kind]["import"]["drawn"] for kind in ("lent", "lent again")), strict=True)
    assert [one != other for one, other in drawn] == [True, True, True], "numpy, Python and torch"
    assert server.lent() == []
    assert list((tmp_path / "lent" / "temporary").iterdir()) == []


def test_a_run_that_is_killed_leaves_nothing_and_the_zygote_goes_on(server: _Server, tmp_path: Path) -> None:
    root = _suite(tmp_path / "suite", _WAITS)
    before = server.zygote
    with _start(root, server.runtime, "-v", "--show-output") as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "pid" in line)
        pid = int(line.split()[-1])
        assert len(server.lent()) == 1, "the run has a zygote of its own"
        assert list((tmp_path / "temporary").iterdir())
        process.kill()
    assert eventually(lambda: not server.lent() and not _os.command_line(pid))
    assert eventually(lambda: not list((tmp_path / "temporary").iterdir())), "its folder of short-lived files"
    assert server.zygote == before


def test_ctrl_c_ends_a_run_as_if_it_were_alone(server: _Server, tmp_path: Path) -> None:
    root = _suite(tmp_path / "suite", _WAITS)
    with _start(root, server.runtime, "-v", "--show-output") as process:
        assert process.stdout is not None
        assert any("pid" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert eventually(lambda: not server.lent())
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_zygote_that_ends_is_told_and_ends_the_tests_with_it(tmp_path: Path) -> None:
    root = _suite(tmp_path / "suite", _WAITS)
    with serving("--host", XDG_RUNTIME_DIR=str(tmp_path)) as server:
        with _start(root, tmp_path, "-v", "--show-output") as process:
            assert process.stdout is not None
            assert any("pid" in line for line in process.stdout)
            server.terminate()
            out, err = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 1, out + err
    assert "0 passed, 1 failed" in out
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_folder_with_a_module_of_its_own_under_a_loaded_name_is_served_by_its_own_zygote(
    server: _Server, tmp_path: Path
) -> None:
    root = _suite(
        tmp_path / "suite", "import sympy, unittest\nclass T(unittest.TestCase):\n    def test(self): sympy.OURS"
    )
    (root / "sympy.py").write_text("OURS = 1\nclass Expr: pass\n")
    _, _, err = _run(root, server.runtime)  # torch itself needs sympy
    told = f"{root}/sympy.py takes the place of a module that it has loaded"
    assert f"torch_ext: the zygote of `torch_ext serve` is not used: {told}\n" in err


def test_what_cannot_be_loaded_is_told_as_without_it(server: _Server, tmp_path: Path) -> None:
    root = _suite(tmp_path / "suite", _WAITS)
    told = {
        (code, out, err)
        for runtime in (tmp_path, server.runtime)
        for code, out, err in [_run(root, runtime, "--device", "hpu")]
    }
    ((code, _, err),) = told
    assert code != 0 and "got the device hpu" in err
    assert server.lent() == []


def _order(folder: Path, **environment: str) -> LentOrder:
    umask, limits, cores, ignored = lent.own_surroundings()
    return LentOrder(RootOrder(Preparation((str(folder),), ())), environment, umask, limits, cores, ignored)


def test_a_limit_that_cannot_be_raised_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = _order(tmp_path)
    assert lent._why_not(order) == ""

    def refuse(number: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    order.limits[resource.RLIMIT_CORE] = (1, 2)
    assert lent._why_not(order) == "its limits are lower"


def test_another_device_of_the_machine_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine:
        ACCELERATOR = "cuda"

    monkeypatch.setitem(sys.modules, "torch_ext.sim", Machine)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch_ext.warm.machine", Machine)  # type: ignore[arg-type]
    assert lent._why_not(_order(tmp_path)) == "tests would run on cuda here"
    assert lent._why_not(_order(tmp_path, TORCH_EXT_DEVICE="sim")) == ""
    Machine.ACCELERATOR = ""
    assert lent._why_not(_order(tmp_path)) == ""


def test_a_package_counts_if_it_could_be_imported(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    assert lent._shadowed(str(tmp_path)) == "", "a folder without code takes nobody's place"
    (tmp_path / "json" / "__init__.py").touch()
    assert lent._shadowed(str(tmp_path)) == f"{tmp_path}/json takes the place of a module that it has loaded"
    assert lent._shadowed(str(CHECKOUT)) == ""
    assert lent._shadowed(str(tmp_path / "missing")) == ""
