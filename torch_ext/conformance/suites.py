"""Runs test files with this project's runner, and turns its results into findings."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_ext.conformance.forks import Finding, Status
from torch_ext.results import USAGE, SetupError
from torch_ext.world.outcome import Ending

# The tiers with files of a checkout.
OF_CHECKOUT = ("c10d", "distributed")
# How a rank or a process ended, in the runner's words, where that is no failed assertion.
_DEATHS = {
    **dict.fromkeys((Ending.KILLED.value, Ending.EXITED.value, Ending.SILENT.value), Status.CRASHED),
    **dict.fromkeys((Ending.TIMED_OUT.value, Ending.HUNG.value), Status.HUNG),
}
_STATUSES = {"passed": Status.AGREES, "flaky": Status.AGREES, "skipped": Status.REFUSED}


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Run the test command with ``arguments``; yield a finding for each test, the file as its group. Closing the
    iterator ends the command.
    """
    command = [sys.executable, "-m", "torch_ext", *arguments, "--json", "-"]
    with tempfile.TemporaryFile("w+") as errors:
        program = subprocess.Popen(command, env={**environment}, stdout=subprocess.PIPE, stderr=errors, text=True)
        with program:
            try:
                for line in program.stdout or ():
                    event = json.loads(line)
                    if event["event"] == "result":
                        yield finding(event)
            except BaseException:  # closed before its end, or interrupted
                program.terminate()
                raise
        if program.returncode == USAGE:
            errors.seek(0)
            raise SetupError(f"{' '.join(command)} ended with:\n{errors.read().strip()}")


def finding(result: Mapping[str, Any]) -> Finding:
    """Return the finding of a result of the runner's JSON."""
    case = "::".join(filter(None, (result["class"], result["method"]))) or "import"
    status = _STATUSES.get(result["counts_as"], Status.DIFFERS)
    problems = result["problems"]
    if status is Status.DIFFERS:
        ranks = [rank["ending"] for problem in problems for rank in problem.get("ranks", ())]
        deaths = [_DEATHS[ending] for ending in ranks if ending in _DEATHS]
        died = [one for one in problems if one["kind"] == "died"]  # with stacks if it hung
        deaths += [Status.HUNG if one["stacks"] else Status.CRASHED for one in died]
        status = deaths[0] if deaths else status
    if result["status"] == "expected failure":
        return Finding(result["file"], case, Status.DIFFERS, duration_s=result["duration_s"], known=result["reason"])
    text = result["reason"] or "; ".join(problem["summary"] for problem in problems)
    return Finding(result["file"], case, status, text, result["duration_s"])
