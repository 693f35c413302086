"""What ``--list`` prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from torch_ext.runner.results import Needs, OutputError, TestName
from torch_ext.world.phrases import printable

__all__ = ["list_tests", "write_out"]


def list_tests(tests: Sequence[TestName], needs: Mapping[TestName, Needs], path: str) -> None:
    """Print the ids of ``tests`` on stdout, or, with a ``path``, write them and what they ask for there as JSON lines.

    Raises:
        SetupError: the file cannot be opened.
        OutputError: it takes no more.
    """
    if not path:
        write_out("".join(f"{printable(test.id)}\n" for test in tests))
        return
    from torch_ext.runner.reporters.jsonlines import describe_test
    from torch_ext.runner.reporters.report_file import ReportFile

    file = ReportFile(path, "the list")
    file.write("".join(json.dumps(describe_test(test, needs.get(test))) + "\n" for test in tests))
    file.close()


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
