"""What a run of upstream's files makes of results: known differences, and names that the installed torch lacks.

Made by the supervisor, which has no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from torch_ext.runner.results import SetupError, Status, TestName, TestResult
from torch_ext.upstream.differences import BUILT_IN, Differences, read
from torch_ext.upstream.reasons import ASKS_BY_NAME, WITH_THE_OPTION, advised, told
from torch_ext.upstream.releases import Releases

__all__ = ["Judge"]


class Judge:
    """Judges the results of one run; see :class:`~torch_ext.runner.executor.Judge`.

    Args:
        paths: the files of the run.
        lists: files of known differences besides our own.
        surroundings: what conditions of known differences ask for, torch apart.

    Attributes:
        told: a sentence to begin the run with; may be empty.

    Raises:
        SetupError: a list cannot be read, or is none.
    """

    def __init__(self, paths: Iterable[Path], lists: Sequence[str], surroundings: Mapping[str, str]) -> None:
        self._paths = tuple(paths)
        self._cuda_as_sim = surroundings.get("cuda_as_sim") == "true"
        self._releases = Releases(self._paths, cuda_as_sim=self._cuda_as_sim)
        self.told = self._releases.told
        try:
            entries = [entry for path in (BUILT_IN, *map(Path, lists)) for entry in read(path)]
        except (OSError, ValueError) as error:
            raise SetupError(f"the known differences cannot be read: {error}") from error
        here = {"torch": metadata.version("torch"), **surroundings}
        self._differences = Differences(entries, here)
        self._with_the_option = Differences(entries, {**here, "device": "sim", "cuda_as_sim": "true"})

    def skipped(self, test: TestName) -> str:
        """Return why ``test`` must not run; empty if it may."""
        return self._differences.skipped(test)

    def judged(self, result: TestResult) -> TestResult:
        """Return what counts in the place of ``result``."""
        judged = self._releases.judged(self._differences.judged(result))
        known = self._with_the_option.known(result.test)
        if judged.reason == WITH_THE_OPTION and known:
            return replace(judged, reason=f"{ASKS_BY_NAME}, and with --cuda-as-sim it is a {known}")
        if judged.status is not Status.SKIPPED:
            return judged
        reason = told(judged.reason)
        if not self._cuda_as_sim and not known:
            reason = advised(reason, self._source_of(result.test))
        return replace(judged, reason=reason)

    def _source_of(self, test: TestName) -> str:
        path = next((path for path in self._paths if path.as_posix().endswith(f"/{test.file}")), None)
        try:
            return path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
        except OSError:
            return ""

    def out_of_date(self, planned: Sequence[TestName], *, whole: bool) -> list[TestResult]:
        """Return a failure for each known difference that no longer is one."""
        return self._differences.out_of_date(planned, whole)
