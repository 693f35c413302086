"""The build finds, makes and shares libraries, and no failure or killed process blocks the next one.

Stand-in compilers keep these tests fast; the real compiler made the library that every other test here runs on.
"""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from test.torch_ext.interpreter import python
from torch_ext.sim import build


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _compiler(folder, body):
    """A stand-in compiler: a script that answers ``--version`` and otherwise runs ``body`` with the output in $out."""
    path = folder / "compiler"
    path.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo stand-in; exit 0; fi\n'
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done\n' + textwrap.dedent(body)
    )
    path.chmod(0o755)
    return path


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("asked", ["0", "cuda"])
def test_build_command_names_a_missing_compiler_in_one_line(cache, asked):
    finished = python("-m", "torch_ext", "build", CXX="no-such-compiler", TORCH_EXT_SIM=asked)
    assert finished.returncode == 1 and not finished.stdout
    (message,) = finished.stderr.splitlines()
    assert message.startswith("error: ") and "apt install g++" in message and "python -m torch_ext build" in message


@pytest.mark.costly
def test_failed_build_command_shows_the_compilers_output_and_leaves_nothing(cache, tmp_path):
    finished = python("-m", "torch_ext", "build", CXX=str(_compiler(tmp_path, "echo 'error: no such thing'; exit 1")))
    assert finished.returncode == 1 and not finished.stdout
    assert "\nerror: Building the simulated accelerator failed" in finished.stderr
    assert "error: no such thing" in finished.stderr and "Traceback" not in finished.stderr
    assert {path.name for path in cache.glob("sim/*/*")} == {".lock"}


@pytest.mark.long
@pytest.mark.parametrize("asked", ["0", "cuda"])
def test_build_command_shows_the_path_of_the_one_build(asked):
    finished = python("-m", "torch_ext", "build", TORCH_EXT_SIM=asked)
    assert finished.returncode == 0 and finished.stdout == f"{build.ensure_built()}\n"


def test_build_command_refuses_arguments():
    finished = python("-m", "torch_ext", "build", "-v")
    assert finished.returncode == 2 and "torch_ext build: error: unrecognized arguments: -v" in finished.stderr


@pytest.mark.drawn(1)
@pytest.mark.parametrize("argv", [["-m"], ["-m", "x"], ["program"]])
def test_importing_the_package_registers_whatever_the_program(argv):
    code = f"import sys; sys.argv[:] = {argv!r}; import torch, torch_ext.sim; print(torch.sim.device_count() > 0)"
    finished = python("-c", code)
    assert finished.stdout == "True\n", finished.stderr


def test_finished_build_is_used_again_even_without_a_compiler(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(_compiler(tmp_path, f'echo x >> {tmp_path}/calls; echo made > "$out"')))
    library = build.ensure_built()
    calls = (tmp_path / "calls").read_text()
    assert library.read_text() == "made\n" and sorted(path.name for path in library.parent.iterdir()) == ["_native.so"]
    assert build.ensure_built() == library and (tmp_path / "calls").read_text() == calls
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.ensure_built() == library


def test_every_source_is_compiled_once(cache, tmp_path, monkeypatch):
    seen = f'unit=${{out#*-}}; case "$unit" in *.o) cat "${{unit%.o}}.cpp" >> {tmp_path}/compiled;; esac'
    monkeypatch.setenv("CXX", str(_compiler(tmp_path, f'{seen}; echo made > "$out"')))
    build.ensure_built()
    sources = (Path(build.__file__).parent / "csrc").rglob("*.cpp")
    compiled = (tmp_path / "compiled").read_text().splitlines()
    assert sorted(compiled) == sorted(f'#include "{path}"' for path in sources)


def test_interrupted_build_keeps_its_units(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", str(_compiler(tmp_path, f'echo "$out" >> {tmp_path}/calls; echo made > "$out"')))
    monkeypatch.setattr(build, "available_bytes", lambda: 1)
    run = build._run

    def interrupted(folder, compiler, arguments, output):
        if output == "_native.so":
            raise KeyboardInterrupt
        run(folder, compiler, arguments, output)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(build, "_run", interrupted)
        build.ensure_built()
    assert build.ensure_built(verbose=True).read_text() == "made\n"
    calls = [line.partition("-")[2] for line in (tmp_path / "calls").read_text().splitlines()]
    assert sorted(calls) == ["_native.so", "narrow.o", "wide.o"]
    said = capsys.readouterr().err
    assert "compiling 2 units, 1 at a time" in said and "[2/3] compiled" in said and "built in" in said


def test_sources_of_the_wide_unit_exist():
    # A source whose name is no longer listed joins the other unit, which then reads all of ATen too.
    assert {source for source in build._WIDE if not (build._SOURCES / f"{source}.cpp").exists()} == set()


def test_changed_source_grouping_or_compiler_is_another_build(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(_compiler(tmp_path, 'echo made > "$out"')))
    first = build.ensure_built()
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "only.cpp").write_text("")
    monkeypatch.setattr(build, "_SOURCES", sources)
    second = build.ensure_built()
    monkeypatch.setattr(build, "_WIDE", frozenset({"only"}))
    third = build.ensure_built()
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("CXX", str(_compiler(other, 'echo made > "$out"')))
    assert len({first, second, third, build.ensure_built()}) == 4


def test_killed_build_does_not_stop_the_next_one(cache, tmp_path, monkeypatch):
    started, go = tmp_path / "started", tmp_path / "go"
    wait = f'touch {started}; while [ -d {tmp_path} ] && [ ! -e {go} ]; do sleep 0.1; done; echo made > "$out"'
    slow = _compiler(tmp_path, wait)
    monkeypatch.setenv("CXX", str(slow))
    code = f"import sys; sys.path.insert(0, {str(Path(build.__file__).parent)!r}); import build; build.ensure_built()"
    victim = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 120
    while not started.exists():  # once a compiler of the victim runs, the victim holds the lock
        assert victim.poll() is None and time.monotonic() < deadline, "the build to be killed has not begun"
        time.sleep(0.05)
    family = next(cache.glob("sim/*"))
    with open(family / ".lock") as handle, pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.killpg(victim.pid, signal.SIGKILL)  # the session is the victim's own
    victim.wait()
    assert list(family.glob(".building-*"))
    go.touch()
    library = build.ensure_built()
    assert library.read_text() == "made\n" and not list(family.glob(".building-*"))
