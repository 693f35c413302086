"""Known races of torch's releases, as data, and their match with the races found.

Each entry of ``known.json`` has:

``summary``   the race, in one clause
``link``      an issue, a pull request or a page of docs/findings
``torch``     the releases that are known to have the race, such as ``"2.13"``
``tests``     the tests that meet it: addresses, from the file's name on; ``*`` stands for any text
``earlier``, ``later``
              conditions on an access, each optional: ``frames``, all of which are on its stack (the end of a path, and
              a function), and ``lane``, its kind
``reused``, ``pinned``
              conditions on the memory, each optional, as in :class:`Race`

A race that an entry describes fails no test, since the test can do nothing about it; the summary names it instead. A
test that an entry names and that no longer meets the race says so: then the entry can go.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from torch_ext.sim.races._findings import Access, Race

_FILE = Path(__file__).with_name("known.json")
_REQUIRED = {"summary", "link", "torch", "tests"}
_CONDITIONS = {"earlier", "later", "reused", "pinned"}


@dataclass(frozen=True)
class Side:
    """The conditions of an entry on one access."""

    frames: tuple[str, ...] = ()
    lane: str | None = None

    def describes(self, access: Access) -> bool:
        """Whether the lane's kind matches and each frame is on the stack.

        A frame such as ``fsdp/_flat_param.py:pre_unshard`` matches by the end of the path and the function.
        """
        called = [f"/{frame.file}:{frame.function}" for frame in access.stack]
        return self.lane in (None, access.lane_kind) and all(
            any(frame.endswith(f"/{wanted}") for frame in called) for wanted in self.frames
        )


@dataclass(frozen=True)
class KnownRace:
    """One entry; see the module."""

    summary: str
    link: str
    tests: tuple[str, ...]
    earlier: Side = Side()
    later: Side = Side()
    reused: bool | None = None
    pinned: bool | None = None

    def describes(self, race: Race) -> bool:
        return (
            self.reused in (None, race.reused)
            and self.pinned in (None, race.pinned)
            and self.earlier.describes(race.earlier)
            and self.later.describes(race.later)
        )

    def is_met_by(self, test: str) -> bool:
        """Whether ``test`` should meet the race.

        Args:
            test: its unittest name. A test of the file that runs as ``__main__`` matches by its class and method.

        >>> entry = KnownRace("no", "", ("test_a.py::TestA::test_*",))
        >>> entry.is_met_by("distributed.test_a.TestA.test_b"), entry.is_met_by("__main__.TestA.test_b")
        (True, True)
        >>> entry.is_met_by("distributed.test_b.TestA.test_b"), entry.is_met_by("")
        (False, False)
        """
        module, *names = test.rsplit(".", 2)
        file = module.rpartition(".")[2]
        for wanted in self.tests:
            in_file, *rest = wanted.split("::")
            if file in ("__main__", in_file.removesuffix(".py")) and fnmatchcase(".".join(names), ".".join(rest)):
                return True
        return False


@functools.cache
def known_races(path: Path = _FILE, release: str = torch.__version__) -> tuple[KnownRace, ...]:
    """Return the known races of a release.

    Raises:
        ValueError: an entry of the file is malformed; the message names it.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        _entry(each) for number, each in enumerate(entries, 1) if _is_for(each, release, f"{path}, entry {number}")
    )


def _is_for(fields: Any, release: str, where: str) -> bool:
    if not isinstance(fields, dict) or not _REQUIRED <= set(fields) <= _REQUIRED | _CONDITIONS:
        raise ValueError(
            f"{where}: expected summary, link, torch, tests, and optionally earlier, later, reused and pinned"
        )
    if not any(fields.get(side, {}).get("frames") for side in ("earlier", "later")):
        raise ValueError(f"{where} matches every race: give frames of the earlier or the later access")
    return any(re.match(rf"{re.escape(each)}(?!\w)", release) for each in fields["torch"])


def _entry(fields: Mapping[str, Any]) -> KnownRace:
    def side(name: str) -> Side:
        values = fields.get(name, {})
        return Side(tuple(values.get("frames", ())), values.get("lane"))

    return KnownRace(
        fields["summary"], fields["link"], tuple(fields["tests"]), side("earlier"), side("later"),
        fields.get("reused"), fields.get("pinned"),
    )  # fmt: skip
