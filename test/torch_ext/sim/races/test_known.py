"""Known races of torch fail no test: the summary names them, and entries that no test meets any more."""

import json

import pytest

from test.torch_ext.sim.races.stage import Stage
from torch_ext.sim import races
from torch_ext.sim.races._known import KnownRace, Side, known_races

HERE = "races/test_known.py"
KNOWN = KnownRace("it races", "a link", ("test_a.py::TestA::test_*",), earlier=Side((f"{HERE}:_written",), "stream"))


class Raced:
    """A tensor, and a stream that no other stream waits for."""

    def __init__(self):
        self._on = Stage()
        self.tensor = self._on.tensor()

    def write(self):
        with self._on.on(self._on.side):
            self.tensor.fill_(2)


def _written(on):
    on.write()


def _written_elsewhere(on):
    on.write()


@pytest.fixture
def on():
    return Raced()


@pytest.fixture
def messages(monkeypatch):
    monkeypatch.delenv(races.VARIABLE, raising=False)  # tests are checked by default
    monkeypatch.setattr(races, "known_races", lambda: (KNOWN,))
    return []


def test_known_race_is_reported_once_and_fails_nothing(on, messages):
    with races.check_body("x.test_a.TestA.test_b", messages.append):
        _written(on)
        for _ in range(3):
            on.tensor.mul(3)
            on.tensor.add(3)
    assert len(messages) == 1 and messages[0].endswith(": it races (a link)")


def test_unknown_race_beside_a_known_one_fails_alone(on, messages):
    other = Raced()
    with pytest.raises(races.RaceError) as caught, races.check_body("", messages.append):
        _written(on)
        on.tensor.mul(3)
        _written_elsewhere(other)
        other.tensor.mul(3)
    assert [race.earlier.stack[1].function for race in caught.value.races] == ["_written_elsewhere"]
    assert len(messages) == 1


def test_known_race_no_longer_met_is_reported_by_its_test_alone_once_it_passes(on, messages):
    with pytest.raises(ZeroDivisionError), races.check_body("x.test_a.TestA.test_b", messages.append):
        _ = 1 // 0
    with races.check_body("x.test_b.TestA.test_b", messages.append):
        on.tensor.mul(3)
    assert messages == []
    with races.check_body("x.test_a.TestA.test_b", messages.append):
        on.tensor.mul(3)
    assert ["x.test_a.TestA.test_b no longer meets a known race: it races" in text for text in messages] == [True]


def test_programs_fail_for_known_races_too(on, messages):
    with pytest.raises(races.RaceError), races.check():
        _written(on)
        on.tensor.mul(3)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([], "entry 1: expected summary, link, torch, tests"),
        ({"summary": "", "link": "", "torch": [], "tests": [], "stream": 1, "earlier": {}}, "expected summary"),
        ({"summary": "", "link": "", "torch": [], "tests": []}, "entry 1 matches every race"),
        ({"summary": "", "link": "", "torch": [], "tests": [], "later": {"lane": "host"}}, "matches every race"),
    ],
)
def test_malformed_list_is_refused(tmp_path, entry, words):
    path = tmp_path / "known.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match=words):
        known_races(path)


def test_entry_applies_to_its_releases(tmp_path):
    entry = {"summary": "", "link": "", "torch": ["2.1"], "tests": [], "later": {"frames": ["a.py:f"]}}
    path = tmp_path / "known.json"
    path.write_text(json.dumps([entry]))
    assert [len(known_races(path, release)) for release in ("2.1.0+cpu", "2.11.0", "3.2.1")] == [1, 0, 0]
