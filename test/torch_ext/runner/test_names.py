"""Cached test names are used only while they are valid, and never get in the way.

A failure here means either that a run imports everything again, or, far worse, that it misses tests in silence.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from test.torch_ext.runner.fakes import FakeCollector, write_suite
from torch_ext.results import Needs, TestName
from torch_ext.runner.discovery import TestFile, find_test_files
from torch_ext.runner.names import Collected, NameCache, collect_names, surroundings

LAYOUT = {"a/test_a.py": ["TestA.test_1", "TestA.test_2"], "test_b.py": []}
AROUND = {"torch": "2.13.0", "device": "cpu"}


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    path = tmp_path / "helper.py"
    path.write_text("# imported by every test file\n", encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path, helper: Path) -> tuple[TestFile, ...]:
    files = find_test_files(write_suite(tmp_path / "root", LAYOUT))
    for path in (helper, *(file.path for file in files)):
        age(path)
    return files


@pytest.fixture
def collector(helper: Path) -> FakeCollector:
    return FakeCollector(LAYOUT, imported=[str(helper)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "deep"


def age(path: Path) -> None:
    """Backdate ``path`` by a minute, like a file that nobody is editing."""
    then = time.time() - 60
    os.utime(path, (then, then))


def names(
    files: tuple[TestFile, ...], folder: Path | None, collector: FakeCollector, around: dict[str, str] | None = AROUND
) -> list[list[str]]:
    """Return each file's ids as one run would, asking the collector where nothing is remembered."""
    collector.asked.clear()
    answers = collect_names(files, NameCache(folder, around), collector.collect)
    return [answer.error.splitlines() or [test.id for test in answer.tests] for answer in answers]


EXPECTED = [["a/test_a.py::TestA::test_1", "a/test_a.py::TestA::test_2"], []]


def test_a_second_run_imports_nothing(files: tuple[TestFile, ...], folder: Path, collector: FakeCollector) -> None:
    assert names(files, folder, collector) == EXPECTED
    assert sorted(collector.asked) == sorted(LAYOUT)
    assert names(files, folder, collector) == EXPECTED
    assert collector.asked == []


def test_a_changed_test_file_is_imported_again_alone(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    names(files, folder, collector)
    files[0].path.write_text("# changed\n", encoding="utf-8")
    age(files[0].path)
    collector.layout = {**LAYOUT, "a/test_a.py": ["TestA.test_3"]}
    assert names(files, folder, collector) == [["a/test_a.py::TestA::test_3"], []]
    assert collector.asked == ["a/test_a.py"]


@pytest.mark.parametrize("change", [lambda path: path.write_text("# new\n"), Path.unlink], ids=["edited", "deleted"])
def test_a_changed_helper_makes_every_importer_stale(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector, helper: Path, change: Callable[[Path], object]
) -> None:
    names(files, folder, collector)
    change(helper)
    assert names(files, folder, collector) == EXPECTED
    assert sorted(collector.asked) == sorted(LAYOUT)


def test_touching_a_file_without_changing_it_keeps_its_names(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    names(files, folder, collector)
    os.utime(files[0].path)
    names(files, folder, collector)
    assert collector.asked == []


@pytest.mark.parametrize("other", [{"torch": "2.14.0"}, {"device": "sim"}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_other_surroundings_make_names_stale(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector, other: dict[str, str]
) -> None:
    names(files, folder, collector)
    names(files, folder, collector, {**AROUND, **other})
    assert sorted(collector.asked) == sorted(LAYOUT)


def test_two_devices_do_not_displace_each_other(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    for _ in range(2):
        for device in ("cpu", "sim"):
            names(files, folder, collector, {**AROUND, "device": device})
    assert collector.asked == []


def test_a_file_that_fails_to_import_is_never_remembered(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    collector.errors = {"a/test_a.py": "ImportError: gone"}
    assert names(files, folder, collector) == [["ImportError: gone"], []]
    collector.errors = {}
    assert names(files, folder, collector) == EXPECTED
    assert collector.asked == ["a/test_a.py"]


def test_a_file_without_an_answer_is_an_error(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    collector.layout = {"test_b.py": []}
    first, second = names(files, folder, collector)
    assert "ended without naming" in first[0]
    assert second == []


def test_a_file_that_changes_while_it_is_imported_is_not_remembered(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    collector.on_collect = lambda: files[0].path.write_text("# saved by an editor just now\n", encoding="utf-8")
    names(files, folder, collector)
    collector.on_collect = lambda: None
    names(files, folder, collector)
    assert collector.asked == ["a/test_a.py"]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def damage(**changes: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


@pytest.mark.parametrize(
    "broken",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"\xff\xfe\x00",
        lambda content: b"[]",
        lambda content: b"null",
        lambda content: b"[" * 100_000,
        damage(digests=[]),
        damage(digests={}),
        damage(tests=None),
        damage(tests=[["TestA"]]),
        damage(tests=[["TestA", 3]]),
        damage(tests=["ab"] * 2 + [[]]),
        damage(surroundings=None),
    ],
)
def test_a_damaged_entry_is_no_entry(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector, broken: Callable[[bytes], bytes]
) -> None:
    names(files, folder, collector)
    assert len(entries(folder)) == len(files)
    for path in entries(folder):
        path.write_bytes(broken(path.read_bytes()))
    assert names(files, folder, collector) == EXPECTED
    assert sorted(collector.asked) == sorted(LAYOUT)
    names(files, folder, collector)
    assert collector.asked == []


def test_a_folder_that_cannot_be_written_is_no_error(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be", encoding="utf-8")
    for _ in range(2):
        assert names(files, folder, collector) == EXPECTED
        assert sorted(collector.asked) == sorted(LAYOUT)


def test_a_failed_write_leaves_nothing_behind(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*paths: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    assert names(files, folder, collector) == EXPECTED
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("anywhere", "around"), [(False, AROUND), (True, None)])
def test_without_a_folder_or_a_known_torch_nothing_is_remembered(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector, anywhere: bool, around: dict[str, str] | None
) -> None:
    for _ in range(2):
        assert names(files, folder if anywhere else None, collector, around) == EXPECTED
        assert sorted(collector.asked) == sorted(LAYOUT)
    assert not folder.exists()


def test_surroundings_tell_the_installed_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    import torch_ext

    found = surroundings("cpu")
    assert found is not None
    assert found["torch"] == metadata.version("torch")
    assert found["torch_ext"] == torch_ext.__version__
    assert found["device"] == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert surroundings("cpu") != found

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert surroundings("cpu") is None


def test_a_name_belongs_to_the_root_it_was_found_below(tmp_path: Path, folder: Path) -> None:
    suite = write_suite(tmp_path / "root", LAYOUT)
    for path in suite.rglob("*.py"):
        age(path)
    names(find_test_files(suite), folder, FakeCollector(LAYOUT))
    below = find_test_files(suite / "a")
    collector = FakeCollector({"test_a.py": ["TestA.test_1"]})
    assert names(below, folder, collector) == [[TestName("test_a.py", "TestA", "test_1").id]]


# --- whose cache it is ------------------------------------------------------------------------------------------------


def test_a_cache_that_others_may_write_is_neither_read_nor_written(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    names(files, folder, collector)
    folder.chmod(0o777)
    before = [path.stat().st_mtime_ns for path in entries(folder)]
    assert names(files, folder, collector) == EXPECTED and sorted(collector.asked) == sorted(LAYOUT)
    assert [path.stat().st_mtime_ns for path in entries(folder)] == before
    refused = NameCache(folder, AROUND).refused
    assert str(folder) in refused and "chmod go-w" in refused


def test_an_entry_that_others_may_write_is_no_entry(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    names(files, folder, collector)
    entries(folder)[0].chmod(0o622)
    names(files, folder, collector)
    assert len(collector.asked) == 1


def test_a_cache_that_is_made_is_the_users_alone(
    files: tuple[TestFile, ...], folder: Path, collector: FakeCollector
) -> None:
    names(files, folder, collector)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, folder / "names", *entries(folder)))


ASKED = (Needs(4, 4, 2), Needs(2, 1, 0, alone=True))


def test_needs_and_imports_are_remembered(files: tuple[TestFile, ...], folder: Path, helper: Path) -> None:
    tests = tuple(TestName(files[0].name, "TestA", method) for method in ("test_1", "test_2"))
    NameCache(folder, AROUND).store(Collected(files[0], tests, (str(helper),), needs=ASKED), time.time_ns())
    remembered = NameCache(folder, AROUND).load(files[0])
    assert remembered is not None and remembered.needs == ASKED
    assert set(remembered.imported) == {str(files[0].path), str(helper)}


def test_needs_of_another_shape_are_no_answer(files: tuple[TestFile, ...], folder: Path) -> None:
    NameCache(folder, AROUND).store(Collected(files[0], needs=ASKED), time.time_ns())
    (entry,) = (folder / "names").glob("*.json")
    entry.write_text(entry.read_text().replace("[4, 4, 2, 0, 1]", '["4", 4, 2, 0, 1]'))
    assert NameCache(folder, AROUND).load(files[0]) is None
