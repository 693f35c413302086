"""``--long``: every row of this folder twenty times, on a machine at four times its load.

No state may come out otherwise there, no other rank be named, and nothing be left behind. The rows are the load: as
many files run side by side as make it up. ``--times N`` runs each row N times instead, and ``-k receipts`` the rows of
one file; a line tells of each run as it ends.

Each run of a file has what ``torch_ext serve`` keeps warm for itself, as in a run without load: see ``conftest.py``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import PATIENCE
from test.torch_ext.verdict.repeated import Repetition, repetitions

FILES = sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
# Processes able to run for each core, and how much longer a run may take that shares the cores with them.
LOAD, SLOWER = 4, 8
# Seconds for all rows of a file on a quiet machine, far above what they take.
DEADLINE_S = 300


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[Repetition]]]:
    """Returns what came of all repetitions of a file; those of all files that were chosen run at once."""
    files = [item.callspec.params["file"] for item in request.session.items if _repeats(item)]
    times: int = request.config.getoption("times")
    runs = repetitions(
        [Path(__file__).with_name(file) for file in files], times, tmp_path_factory.mktemp("load"), LOAD,
        DEADLINE_S * SLOWER, {PATIENCE: str(SLOWER)},
    )  # fmt: skip
    came: dict[str, list[Repetition]] = {file: [] for file in files}

    def all_of(file: str) -> list[Repetition]:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        while len(came[file]) < times:
            run = next(runs)
            came[run.file].append(run)
            with capture.global_and_fixture_disabled():
                print(run, flush=True)
        return came[file]

    yield all_of
    runs.close()


def _repeats(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and "file" in getattr(getattr(item, "callspec", None), "params", {})


@pytest.mark.parametrize("file", FILES)
def test_rows_end_alike_each_time(file: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("long"):
        pytest.skip("takes hours; pytest --long runs it")
    runs = request.getfixturevalue("ended")(file)
    wrong = [f"{run}\n{run.output.read_text(errors='replace')}" for run in runs if run.failed]
    assert not wrong, "\n\n".join(wrong)
    assert len({run.counts for run in runs}) == 1, "\n".join(map(str, runs))  # none was skipped in one run alone


ROWS = {
    "right": "def test_row():\n    pass",
    "wrong_once": """
        def test_row(tmp_path):
            assert "1_wrong_once" in str(tmp_path), "wrong in the second repetition"
        """,
    "leftover": """
        import subprocess, sys, tempfile, os

        def test_row(tmp_path):
            environment = {**os.environ, "TMPDIR": str(tmp_path)}
            subprocess.Popen(["sleep", "6544"], env=environment, start_new_session=True)
        """,
    "file": "def test_row(tmp_path):\n    import tempfile\n    tempfile.mkdtemp(prefix='forgotten')",
    "dies": "import os\n\ndef test_row():\n    os._exit(3)",
}


def test_what_is_wrong_in_one_run_is_told(tmp_path: Path) -> None:
    files = [tmp_path / f"test_{name}.py" for name in ROWS]
    for file, source in zip(files, ROWS.values(), strict=True):
        file.write_text(textwrap.dedent(source))
    runs = {(run.file, run.number): run for run in repetitions(files, 2, tmp_path, 1, 300)}
    failed = {
        (file.removeprefix("test_").removesuffix(".py"), number): run.failed for (file, number), run in runs.items()
    }
    assert failed["right", 1] == failed["right", 2] == failed["wrong_once", 1] == ()
    assert failed["wrong_once", 2] == ("test_row",)
    for number in (1, 2):
        assert failed["leftover", number] == ("left behind: sleep 6544 ",)
        assert failed["file", number][0].startswith("left behind: forgotten")
        assert failed["dies", number] == ("pytest ended with 3",)
    wrong = runs["test_wrong_once.py", 2]
    assert "wrong in the second repetition" in wrong.output.read_text()
    assert "1 failed" in str(wrong) and "WRONG: test_row" in str(wrong) and str(wrong.output) in str(wrong)
    assert not runs["test_right.py", 1].output.exists()


def test_run_that_does_not_end_is_told(tmp_path: Path) -> None:
    file = tmp_path / "test_endless.py"
    file.write_text("import time\n\ndef test_row():\n    time.sleep(1000)")
    assert [run.failed for run in repetitions([file], 1, tmp_path, 1, 1.0)] == [("it did not end",)]
