"""Judges the results of upstream's files: known differences, and names that the installed torch lacks.

Runs in the supervisor, which does not import torch.

Each entry of ``differences.json``, or of a file of the user's own, has:

``test``    the address of a test as reports give it, from the file's name on; ``*`` stands for any text
``when``    conditions that must hold, each optional: ``device``, ``cuda_as_sim``, ``torch`` (``"2.13"``: that release),
            ``clock`` (``"off"``: not in virtual time), ``checkout`` (``"2.4"``: the release that the file is of)
``do``      ``"fail"``: the test runs and is expected to fail; ``"skip"``: it does not run: it would hang or die;
            ``"discount"``: it runs and fails, as on any device of this torch, so it counts as a skip
``reason``  why, in one sentence
``link``    an issue or a page; may be empty

An entry whose tests all ran, and none failed, fails the run: the list can only shrink.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from torch_ext.results import Remark, SetupError, Status, TestName, TestResult
from torch_ext.upstream.reasons import Releases, advise, explain

BUILT_IN = Path(__file__).with_name("differences.json")

_KEYS = {"test", "when", "do", "reason", "link"}
_CONDITIONS = {"device", "cuda_as_sim", "torch", "clock", "checkout"}
_DEEDS = ("fail", "skip", "discount")


@dataclass(frozen=True)
class Difference:
    """One entry; see the module."""

    test: str
    reason: str
    link: str = ""
    do: str = "fail"
    when: tuple[tuple[str, str], ...] = ()

    @property
    def explanation(self) -> str:
        known = "known difference: " if self.do != "discount" else ""
        return f"{known}{self.reason}{f' ({self.link})' if self.link else ''}"

    def applies(self, surroundings: Mapping[str, str]) -> bool:
        """Whether all conditions of the entry hold; a release ``2.13`` also covers ``2.13.0+cpu``."""
        return all(
            re.match(rf"{re.escape(wanted)}(?![\w])", surroundings.get(name, "")) is not None
            for name, wanted in self.when
        )

    def covers(self, test: TestName) -> bool:
        """Whether the entry covers ``test``; either side may leave out folders before the file's name.

        >>> entry = Difference("fsdp/test_a.py::TestA::test_*", "no")
        >>> entry.covers(TestName("distributed/fsdp/test_a.py", "TestA", "test_b"))
        True
        >>> [entry.covers(TestName("test_a.py", cls, "test_b")) for cls in ("TestA", "TestB")]
        [True, False]
        """
        file, _, names = self.test.partition("::")
        ours, theirs = file.split("/"), test.file.split("/")
        shared = min(len(ours), len(theirs))
        pattern = "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", names))
        return ours[-shared:] == theirs[-shared:] and re.fullmatch(pattern, f"{test.cls}::{test.method}") is not None


def read(path: Path) -> tuple[Difference, ...]:
    """Return the entries of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no such list; the message names the entry and its fault.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON in UTF-8: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of entries")
    return tuple(_entry(each, f"{path}, entry {number}") for number, each in enumerate(entries, 1))


def _entry(given: object, where: str) -> Difference:
    if not isinstance(given, dict) or not {"test", "reason"} <= set(given) <= _KEYS:
        raise ValueError(f"{where}: expected an object with test and reason, and perhaps when, do and link")
    when = given.get("when", {})
    if not isinstance(when, dict) or not set(when) <= _CONDITIONS:
        raise ValueError(f"{where}: got the conditions {when!r}, expected some of {', '.join(sorted(_CONDITIONS))}")
    do = given.get("do", "fail")
    if do not in _DEEDS:
        raise ValueError(f"{where}: got do={do!r}, expected one of {', '.join(_DEEDS)}")
    conditions = tuple((name, str(value)) for name, value in when.items())
    return Difference(str(given["test"]), str(given["reason"]), str(given.get("link", "")), do, conditions)


class Differences:
    """The known differences whose conditions hold in ``surroundings``, applied to one run's results."""

    def __init__(self, entries: Iterable[Difference], surroundings: Mapping[str, str]) -> None:
        self._entries = tuple(entry for entry in entries if entry.applies(surroundings))
        self._failed: dict[Difference, bool] = {}  # whether one of its tests failed

    def skipped(self, test: TestName) -> str:
        """Return why ``test`` must not run; empty if it may."""
        return next((entry.explanation for entry in self._entries if entry.do == "skip" and entry.covers(test)), "")

    def judged(self, result: TestResult) -> TestResult:
        """Return ``result``, or an expected failure or a skip if the test is known to fail."""
        for entry in self._entries:
            if entry.do != "skip" and entry.covers(result.test) and result.status in (Status.PASSED, Status.FAILED):
                failed = result.status is Status.FAILED
                self._failed[entry] = self._failed.get(entry, False) or failed
                if failed:
                    status = Status.XFAIL if entry.do == "fail" else Status.SKIPPED
                    return replace(result, status=status, reason=entry.explanation, problems=(), output="")
        return result

    def out_of_date(self, planned: Sequence[TestName], *, whole: bool) -> list[TestResult]:
        """Return a failure for each entry whose tests, of those ``planned``, all passed. Unless the run is ``whole``,
        which leaves out no test of its files, only entries without ``*`` are judged.
        """
        stale = [entry for entry, failed in self._failed.items() if not failed and (whole or "*" not in entry.test)]
        return [
            TestResult(
                TestName(next(test.file for test in planned if entry.covers(test))),
                Status.FAILED,
                0.0,
                (Remark(f"The known difference {entry.test!r} no longer fails: remove its entry."),),
            )
            for entry in stale
        ]


class Judge(Differences):
    """Judges the results of one run; the runner's ``Judge``. ``lists`` are files of known differences in addition to
    ours, ``surroundings`` the values of the entries' conditions, except torch's release.

    Raises:
        SetupError: a list cannot be read, or is malformed.
    """

    def __init__(self, paths: Iterable[Path], lists: Sequence[str], surroundings: Mapping[str, str]) -> None:
        self._cuda_as_sim = surroundings.get("cuda_as_sim") == "true"
        self._releases = Releases(paths, cuda_as_sim=self._cuda_as_sim)
        self.warning = self._releases.notice  # a sentence at the beginning of the run; may be empty
        try:
            entries = [entry for path in (BUILT_IN, *map(Path, lists)) for entry in read(path)]
        except (OSError, ValueError) as error:
            raise SetupError(f"the known differences cannot be read: {error}") from error
        own = {"torch": metadata.version("torch"), "checkout": self._releases.checkout}
        super().__init__(entries, {**own, **surroundings})

    def judged(self, result: TestResult) -> TestResult:
        """Return the result that counts in place of ``result``."""
        judged = self._releases.judged(super().judged(result))
        if judged.status is not Status.SKIPPED:
            return judged
        reason = explain(judged.reason)
        if not self._cuda_as_sim:
            reason = advise(reason, self._source_of(result.test))
        return replace(judged, reason=reason)

    def _source_of(self, test: TestName) -> str:
        path = self._releases.path_of(test.file)
        try:
            return path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
        except OSError:
            return ""
