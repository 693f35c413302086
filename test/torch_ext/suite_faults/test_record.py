"""A test counts as passed without running only if it passed here, and nothing that it depends on has changed since."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from test.torch_ext.suite_faults.record import Record, fingerprint


class Memory(dict[str, Any]):
    """A store in this process."""

    def set(self, key: str, value: object) -> None:
        self[key] = value


@pytest.fixture
def store() -> Memory:
    return Memory()


def test_what_passed_is_known_in_the_same_state_alone(store: Memory) -> None:
    Record(store, "cpu", "state").add({"a": "passed", "b": "failed", "c": "passed"}, ["a", "b", "never ran"])
    assert Record(store, "cpu", "state").passed() == {"a"}
    assert Record(store, "cpu", "another state").passed() == set()
    assert Record(store, "sim", "state").passed() == set()


def test_results_of_one_state_add_up_and_those_of_another_are_forgotten(store: Memory) -> None:
    Record(store, "cpu", "state").add({"a": "passed"}, ["a"])
    Record(store, "cpu", "state").add({"b": "passed"}, ["b"])
    assert Record(store, "cpu", "state").passed() == {"a", "b"}
    Record(store, "cpu", "another state").add({"b": "passed"}, ["b"])
    assert Record(store, "cpu", "another state").passed() == {"b"}
    assert Record(store, "cpu", "state").passed() == set()


@pytest.mark.parametrize("kept", [[], "passed", {}, {"passed": ["a"]}, None])
def test_a_record_that_is_none_is_empty(store: Memory, kept: object) -> None:
    store.set("torch_ext/sound/cpu", kept)
    assert Record(store, "cpu", "state").passed() == set()


def test_without_a_store_nothing_is_known() -> None:
    record = Record(None, "cpu", "state")
    record.add({"a": "passed"}, ["a"])
    assert record.passed() == set()


class Machine:
    """A tree of ours, an installed package and an environment."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.installed = folder / "ours", folder / "installed"
        for each in (self.ours / "below", self.installed / "below"):
            each.mkdir(parents=True)
            (each / "module.py").write_text("value = 1\n")
        self.environment = {"OMP_NUM_THREADS": "1", "HOME": "/home/you"}

    def state(self) -> str:
        return fingerprint([self.ours], [self.installed], self.environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def rewrite_and_set_the_clock_back(path: Path) -> None:
    about = path.stat()
    path.write_text("value = 2\n")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


CHANGES = {
    "a byte of ours": lambda machine: rewrite_and_set_the_clock_back(machine.ours / "below" / "module.py"),
    "a new file of ours": lambda machine: (machine.ours / "conftest.py").write_text(""),
    "a file of ours less": lambda machine: (machine.ours / "below" / "module.py").unlink(),
    "an edit of torch": lambda machine: (machine.installed / "below" / "module.py").write_text("value = 2\n"),
    "a file of torch less": lambda machine: (machine.installed / "below" / "module.py").unlink(),
    "a variable": lambda machine: machine.environment.update(OMP_NUM_THREADS="2"),
    "a new variable": lambda machine: machine.environment.update(TORCH_LOGS="all"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_state(machine: Machine, change: str) -> None:
    before = machine.state()
    CHANGES[change](machine)
    assert machine.state() != before


def test_another_package_is_another_state(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = machine.state()
    (tmp_path / "path" / "added-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "path" / "added-1.0.dist-info" / "METADATA").write_text("Name: added\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    assert machine.state() != before


def test_what_changes_no_result_is_the_same_state(machine: Machine) -> None:
    before = machine.state()
    (machine.ours / "__pycache__").mkdir()
    (machine.ours / "__pycache__" / "module.pyc").write_text("")
    machine.environment["HOME"] = "/home/me"
    assert machine.state() == before
