"""How pytest-xdist spreads the tests below this folder: which of them stay in one process, and what starts first."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

__all__ = ["ALONE", "BY_PARAMETER", "place_in_queue", "scope"]

# The files that take longest, the longest first: started late, one of them would run on when all others are through.
_LONGEST = (
    "test_suites_catch_faults.py",
    "test_hypothesis_utils.py",
    "test_kills.py",
    "test_hazards.py",
    "test_classes.py",
    "test_extension_contract.py",
    "test_endurance.py",
    "test_faults.py",
    "test_four_ways.py",
    "test_neighbours.py",
    "test_pytest_plugin.py",
)

# Tests that need nothing of their file's others, by how their names begin. Each may run in any process.
ALONE = {
    "test_bridge.py": ("test_",),
    "test_endurance.py": ("test_",),
    "test_extension_contract.py": ("test_example_on_the_page_runs",),
    "test_hypothesis_utils.py": ("test_a_lost_zygote",),
    "test_neighbours.py": ("test_",),
    "test_pytest_plugin.py": ("test_",),
    "test_kills.py": ("test_",),
}

# Files whose tests share something for each parameter, or what stands before a slash in it.
BY_PARAMETER = ("test_four_ways.py", "test_suites_catch_faults.py")


def scope(node: str) -> str:
    """Name what must run in one process with test ``node``: its file, which shares fixtures and zygotes, or less.

    >>> scope("test/torch_ext/world/test_watch.py::test_first_receipt_counts")
    'test/torch_ext/world/test_watch.py'
    >>> scope("test/torch_ext/test_suites_catch_faults.py::test_the_suites_notice[cpu/_div_if_needed_1]")
    'test/torch_ext/test_suites_catch_faults.py[cpu]'
    >>> scope("test/torch_ext/world/test_endurance.py::test_worlds_in_a_row_leave_nothing[]")
    'test/torch_ext/world/test_endurance.py::test_worlds_in_a_row_leave_nothing[]'
    """
    path, _, test = node.partition("::")
    name = PurePosixPath(path).name
    if test.startswith(ALONE.get(name, ())):
        return node
    if name in BY_PARAMETER and (parameter := re.search(r"\[([^/]*)(/.*)?\]$", test)):
        return f"{path}[{parameter[1]}]"
    return path


def place_in_queue(file: str) -> int:
    """Return where tests of ``file`` stand among those of others: the fewer, the longer they take."""
    return _LONGEST.index(file) if file in _LONGEST else len(_LONGEST)
