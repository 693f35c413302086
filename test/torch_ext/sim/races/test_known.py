"""Known races of torch fail no test: the summary names them, and entries that no test meets any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test.torch_ext.sim.races.stage import Stage
from torch_ext.sim import races
from torch_ext.sim.races._known import KnownRace, Side, known_races

HERE = "races/test_known.py"
KNOWN = KnownRace("it races", "a link", ("test_a.py::TestA::test_*",), earlier=Side((f"{HERE}:_written",), "stream"))


class Raced:
    """A tensor, and a stream that no other stream waits for."""

    def __init__(self) -> None:
        self._on = Stage()
        self.tensor = self._on.tensor()

    def write(self) -> None:
        with self._on.on(self._on.side):
            self.tensor.fill_(2)


def _written(on: Raced) -> None:
    on.write()


def _written_elsewhere(on: Raced) -> None:
    on.write()


@pytest.fixture
def on() -> Raced:
    return Raced()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv(races.VARIABLE, raising=False)  # tests are checked by default
    monkeypatch.setattr(races, "known_races", lambda: (KNOWN,))
    return []


def test_it_is_told_once_and_fails_nothing(on: Raced, told: list[str]) -> None:
    with races.check_body("x.test_a.TestA.test_b", told.append):
        _written(on)
        for _ in range(3):
            on.tensor.mul(3)
            on.tensor.add(3)
    assert len(told) == 1 and told[0].endswith(": it races (a link)")


def test_another_race_beside_it_fails_alone(on: Raced, told: list[str]) -> None:
    other = Raced()
    with pytest.raises(races.RaceError) as caught, races.check_body("", told.append):
        _written(on)
        on.tensor.mul(3)
        _written_elsewhere(other)
        other.tensor.mul(3)
    assert [race.earlier.stack[1].function for race in caught.value.races] == ["_written_elsewhere"]
    assert len(told) == 1


def test_one_that_is_no_longer_met_is_told_by_its_test_alone(on: Raced, told: list[str]) -> None:
    with races.check_body("x.test_b.TestA.test_b", told.append):
        on.tensor.mul(3)
    assert told == []
    with races.check_body("x.test_a.TestA.test_b", told.append):
        on.tensor.mul(3)
    assert [text for text in told if "no longer met by x.test_a.TestA.test_b: it races" in text] == told != []


def test_a_test_that_fails_says_nothing_about_what_it_has_not_met(told: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), races.check_body("x.test_a.TestA.test_b", told.append):
        _ = 1 // 0
    assert told == []


def test_programs_fail_for_known_races_too(on: Raced, told: list[str]) -> None:
    with pytest.raises(races.RaceError), races.check():
        _written(on)
        on.tensor.mul(3)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([], "entry 1: expected told, link, torch and tests"),
        ({"told": "", "link": "", "torch": [], "tests": [], "stream": 1, "earlier": {}}, "entry 1: expected told"),
        ({"told": "", "link": "", "torch": [], "tests": []}, "entry 1: it would describe every race"),
        ({"told": "", "link": "", "torch": [], "tests": [], "later": {"lane": "host"}}, "would describe every race"),
    ],
)
def test_a_list_that_is_none_is_refused(tmp_path: Path, entry: object, words: str) -> None:
    path = tmp_path / "known.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match=words):
        known_races(path)


def test_an_entry_is_of_its_releases(tmp_path: Path) -> None:
    entry = {"told": "", "link": "", "torch": ["2.1"], "tests": [], "later": {"frames": ["a.py:f"]}}
    path = tmp_path / "known.json"
    path.write_text(json.dumps([entry]))
    assert [len(known_races(path, release)) for release in ("2.1.0+cpu", "2.11.0", "3.2.1")] == [1, 0, 0]
