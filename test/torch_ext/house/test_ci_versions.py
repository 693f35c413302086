"""``.ci/versions.py`` runs what it is told on each release and leaves nothing behind; the releases and the tree are
stand-ins.
"""

from __future__ import annotations

import importlib
import os
import select
import shutil
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

COUNT = "python -c 'import torch; print(torch.tests, \"passed, 0 failed, 0 skipped\")'"


class Place:
    """A tree with the script in it, an index with releases 2.1.0 and 2.2.0 of a torch, and a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.index, self.temporary = (folder / name for name in ("tree", "index", "temporary"))
        for each in (self.tree / "torch_ext", self.index, self.temporary):
            each.mkdir(parents=True)
        shutil.copytree(REPOSITORY / ".ci", self.tree / ".ci")
        building = "import os; print('built in', os.environ['TORCH_EXT_CACHE'])\n"
        (self.tree / "torch_ext" / "__main__.py").write_text(building)
        (self.tree / "requirements.txt").write_text("torch==2.2.0\n")
        (self.tree / "requirements-dev.txt").write_text("-r requirements.txt\nmypy==2.4.1\n")
        for version, tests in {"2.1.0": 3, "2.2.0": 4}.items():
            self._release(version, tests)

    def _release(self, version: str, tests: int) -> None:
        with zipfile.ZipFile(self.index / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            about = f"torch-{version}.dist-info"
            wheel.writestr("torch.py", f"tests = {tests}\n")
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment |= {"TMPDIR": str(self.temporary), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index)}
        return subprocess.Popen(
            ["python3", str(self.tree / ".ci" / "versions.py"), *arguments],
            env=environment | {"PIP_CONFIG_FILE": os.devnull},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output.splitlines()

    def left(self) -> list[str]:
        return [path.name for path in self.temporary.iterdir()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_each_release_has_an_environment_and_a_build_of_its_own(place: Place) -> None:
    status, lines = place.run("2.1.0", "2.2.0", "--", COUNT, COUNT)
    assert status == 0, lines
    assert [line.split()[:4] for line in lines[-2:]] == [["2.1.0", "6", "0", "0"], ["2.2.0", "8", "0", "0"]]
    assert all(line.endswith("   ok") for line in lines[-2:])
    built = [line for line in lines if line.startswith("built in ")]
    assert len(set(built)) == 2 and all(str(place.temporary) in line for line in built)
    assert place.left() == []


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        ({"passed": 2}, ""),
        ({"passed": 2, "skipped": 1}, ""),
        ({"passed": 2, "failed": 1}, "FAILED"),
        ({"passed": 2, "broken": ["a command"]}, "FAILED: a command"),
        ({"skipped": 2}, "no test ran"),
    ],
)
def test_a_release_is_good_if_all_steps_are_and_tests_ran(
    result: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / ".ci"))
    outcome = importlib.import_module("versions")._Outcome("2.1.0", **result)
    assert outcome.fault() == fault
    assert outcome.row().endswith(f"   {fault or 'ok'}")


def test_a_red_release_does_not_stop_the_next_and_what_was_asked_to_stay_stays(place: Place) -> None:
    status, lines = place.run("--keep", "2.0.0", "2.1.0", "--", COUNT, "exit 3")
    assert status == 1, lines
    assert "FAILED: " in lines[-2] and "torch==2.0.0" in lines[-2]
    assert lines[-1].split()[1] == "3" and lines[-1].endswith("   FAILED: exit 3")
    kept = sorted(place.temporary.iterdir())
    assert [line for line in lines if line.startswith("kept: ")] == [f"kept: {each}" for each in kept]
    assert (kept[1] / "env" / "bin" / "python").exists()


def test_nothing_is_left_when_it_is_interrupted(place: Place, tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    process = place.start("2.1.0", "--", f"echo $$ > {started}; exec sleep 600", "echo never started")
    with os.fdopen(os.open(started, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        assert select.select([reader], [], [], 120)[0], "the command was never started"
        sleeper = int(reader.read())
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "never started" not in output
    assert place.left() == []
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper, 0)
