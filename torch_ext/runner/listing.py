"""What ``--list`` and ``--history`` print."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

from torch_ext.runner.history import Record
from torch_ext.runner.results import Needs, OutputError, TestName
from torch_ext.world.phrases import printable

__all__ = ["list_as_json", "list_ids", "show_history", "write_out"]


def list_ids(tests: Sequence[TestName]) -> None:
    """Print the ids of ``tests`` on stdout.

    Raises:
        OutputError: stdout takes no more.
    """
    write_out("".join(f"{printable(test.id)}\n" for test in tests))


def list_as_json(tests: Sequence[TestName], needs: Mapping[TestName, Needs], path: str) -> None:
    """Write ``tests`` and what they ask for to ``path``, one JSON object a line.

    Raises:
        SetupError: the file cannot be opened.
        OutputError: it takes no more.
    """
    from torch_ext.runner.reporters.jsonlines import describe_test
    from torch_ext.runner.reporters.report_file import ReportFile

    file = ReportFile(path, "the list")
    file.write("".join(json.dumps(describe_test(test, needs.get(test))) + "\n" for test in tests))
    file.close()


def show_history(test: TestName, records: Sequence[Record]) -> None:
    """Print the records of one test, and what they add up to."""
    lines = [test.id]
    for record in records:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time_s))
        attempts = f" in attempt {record.attempts}" if record.attempts > 1 else ""
        said = f"  {record.said}" if record.said else ""
        device = record.device or "best"
        lines.append(f"  {when}  {device:<5} {record.duration_s:8.2f} s  {record.status}{attempts}{said}")
    number: dict[str, int] = {}
    for record in records:
        number[record.status] = number.get(record.status, 0) + 1
    total = ", ".join(f"{count} {status}" for status, count in number.items())
    lines.append(f"  {total}" if records else "  no record")
    write_out("".join(f"{printable(line)}\n" for line in lines), "the history")


def write_out(text: str, what: str = "the list") -> None:
    """Write ``text``, of which ``what`` says what it is, to stdout, and have the system know it at once.

    Raises:
        OutputError: stdout takes no more.
        BrokenPipeError: stdout's reader has left.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"{what} cannot be written: {error}") from error
