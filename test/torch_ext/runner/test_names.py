"""Which files are test files; and cached test names are used only while they are valid, and never cause a failure.

A failure here means either that a run imports everything again, or, far worse, that it misses tests in silence.
"""

import json
import os
import time
from pathlib import Path

import pytest

from test.torch_ext.runner.fakes import FakeCollector, write_suite
from torch_ext.results import Needs, TestName
from torch_ext.runner.names import Collected, NameCache, collect_names, environment_key, find_test_files

LAYOUT = {"a/test_a.py": ["TestA.test_1", "TestA.test_2"], "test_b.py": []}
ALL, FIRST = sorted(LAYOUT), ["a/test_a.py"]
EXPECTED = [["a/test_a.py::TestA::test_1", "a/test_a.py::TestA::test_2"], []]
AROUND = {"torch": "2.13.0", "device": "cpu"}


def age(path):
    """Backdate ``path`` by a minute, as if no editor had it open."""
    then = time.time() - 60
    os.utime(path, (then, then))


class Runs:
    """Two test files that import one helper, and runs that ask for their names."""

    def __init__(self, folder):
        self.helper = folder / "helper.py"
        self.helper.write_text("# imported by every test file\n", encoding="utf-8")
        self.files = find_test_files(write_suite(folder / "root", LAYOUT))
        for path in (self.helper, *(file.path for file in self.files)):
            age(path)
        self.collector = FakeCollector(LAYOUT, imported=[str(self.helper)])
        self.folder: Path | None = folder / "cache" / "deep"

    def __call__(self, around=AROUND):
        """Return each file's ids as one run would, and the files that it imported."""
        self.collector.asked.clear()
        cache = NameCache(self.folder, dict(around) if around is not None else None)
        answers = collect_names(self.files, cache, self.collector.collect)
        found = [answer.error.splitlines() or [test.id for test in answer.tests] for answer in answers]
        return found, sorted(self.collector.asked)

    @property
    def entries(self):
        return sorted(self.folder.rglob("*.json"))


@pytest.fixture
def run(tmp_path):
    return Runs(tmp_path)


def damage(**changes):
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


def edit(run):
    run.files[0].path.write_text("# changed\n", encoding="utf-8")
    age(run.files[0].path)


# Changes between two runs, and which files the second one imports.
BETWEEN = [
    (lambda run: None, []),
    (lambda run: os.utime(run.files[0].path), []),
    (edit, FIRST),
    (lambda run: run.helper.write_text("# new\n"), ALL),
    (lambda run: run.helper.unlink(), ALL),
    (lambda run: [path.chmod(0o622) for path in run.entries], ALL),
    *(
        (lambda run, broken=broken: [path.write_bytes(broken(path.read_bytes())) for path in run.entries], ALL)
        for broken in (
            lambda content: b"",
            lambda content: b"null",
            lambda content: b"[" * 100_000,
            damage(digests=[]),
            damage(digests={}),
            damage(tests=None),
            damage(tests=[["TestA"]]),
            damage(tests=["ab"] * 2 + [[]]),
            damage(environment_key=None),
        )
    ),
]


@pytest.mark.parametrize(("between", "asked"), BETWEEN)
def test_second_run_imports_changed_and_untrusted_files(run, between, asked):
    assert run() == (EXPECTED, ALL)
    assert len(run.entries) == len(run.files)
    between(run)
    assert run() == (EXPECTED, asked)


def test_changed_environment_makes_names_stale_and_devices_have_separate_entries(run):
    for other in ({}, {"device": "sim"}):
        assert run({**AROUND, **other})[1] == ALL
    assert run()[1] == run({**AROUND, "device": "sim"})[1] == []
    for other in ({"torch": "2.14.0"}, {"CUDA_VISIBLE_DEVICES": "0"}):
        assert run({**AROUND, **other})[1] == ALL


def test_a_file_that_fails_to_import_is_never_remembered(run):
    run.collector.errors = {"a/test_a.py": "ImportError: gone"}
    assert run()[0] == [["ImportError: gone"], []]
    run.collector.errors = {}
    assert run() == (EXPECTED, FIRST)


def test_a_file_that_changes_while_it_is_imported_is_not_remembered(run):
    run.collector.on_collect = lambda: run.files[0].path.write_text("# saved by an editor just now\n", "utf-8")
    run()
    run.collector.on_collect = lambda: None
    assert run()[1] == FIRST


@pytest.mark.parametrize("why", ["a file in its place", "disk full", "no folder", "no torch", "others may write it"])
def test_a_cache_that_cannot_be_used_is_no_error(run, monkeypatch, why):
    def fail(*paths):
        raise OSError("disk full")

    folder = run.folder
    before = []
    if why == "a file in its place":
        folder.parent.mkdir()
        folder.write_text("a file where the folder should be", encoding="utf-8")
    elif why == "disk full":
        monkeypatch.setattr(os, "replace", fail)
    elif why == "no folder":
        run.folder = None
    elif why == "others may write it":
        run()
        folder.chmod(0o777)
        before = run.entries
        refused = NameCache(folder, AROUND).refused
        assert str(folder) in refused and "chmod go-w" in refused
    for _ in range(2):
        assert run(None if why == "no torch" else AROUND) == (EXPECTED, ALL)
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before


def test_environment_key_differs_by_installed_versions(monkeypatch):
    from importlib import metadata

    import torch_ext

    found = environment_key("cpu")
    assert found["torch"] == metadata.version("torch")
    assert found["torch_ext"] == torch_ext.__version__
    assert found["device"] == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert environment_key("cpu") != found

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert environment_key("cpu") is None


def test_a_name_belongs_to_the_root_it_was_found_below(run, tmp_path):
    run()
    run.files, run.collector = find_test_files(tmp_path / "root/a"), FakeCollector({"test_a.py": ["TestA.test_1"]})
    assert run()[0] == [[TestName("test_a.py", "TestA", "test_1").id]]


def test_a_cache_that_is_made_is_the_users_alone(run):
    run()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (run.folder, run.folder / "names", *run.entries))


ASKED = (Needs(4, 4, 2), Needs(2, 1, 0, alone=True))


def test_needs_and_imports_are_remembered(run):
    tests = tuple(TestName(run.files[0].name, "TestA", method) for method in ("test_1", "test_2"))
    collected = Collected(run.files[0], tests, (str(run.helper),), needs=ASKED)
    NameCache(run.folder, AROUND).store(collected, time.time_ns())
    remembered = NameCache(run.folder, AROUND).load(run.files[0])
    assert remembered.needs == ASKED
    assert set(remembered.imported) == {str(run.files[0].path), str(run.helper)}


def test_only_test_files_are_found_in_order(tmp_path):
    names = ["b/test_b.py", "test_z.py", "a/test_a.py", "a/test_a2.py"]
    strangers = [
        "a/api_test.py",
        "a/contest.py",
        "a/common.py",
        "a/test_a.txt",
        "a/__init__.py",
        ".git/test_hook.py",
        "a/__pycache__/test_a.py",
    ]
    write_suite(tmp_path, dict.fromkeys([*names, *strangers], ()))
    assert [file.name for file in find_test_files(tmp_path)] == sorted(names)
    found = [file.name for file in find_test_files(tmp_path, like=("test_*.py", "*_test.py"))]
    assert found == sorted([*names, "a/api_test.py"])


def test_module_name_starts_below_the_last_folder_that_is_no_package(tmp_path):
    write_suite(tmp_path, dict.fromkeys(["root/__init__.py", "root/pkg/__init__.py"], ()))
    write_suite(tmp_path, dict.fromkeys(["root/pkg/test_a.py", "root/plain/test_b.py", "root/pkg/plain/test_c.py"], ()))
    found = {file.name: (file.module, file.import_root) for file in find_test_files(tmp_path / "root")}
    assert found == {
        "pkg/test_a.py": ("root.pkg.test_a", tmp_path),
        "pkg/plain/test_c.py": ("test_c", tmp_path / "root/pkg/plain"),
        "plain/test_b.py": ("test_b", tmp_path / "root/plain"),
    }
