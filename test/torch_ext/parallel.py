"""How pytest-xdist spreads the tests below this folder: which tests share a process, and which files start first."""

import re
import threading
from pathlib import PurePosixPath

from torch_ext.world import _os

# The threads of pytest-xdist, in one of its processes: a fork can do without them.
THREADS = frozenset(_os.threads_of()) - {threading.get_native_id()}

# The slowest files, the slowest first, whichever tier they are slow in: if started late, such a file would still run
# after all others. `--durations 0` shows the times.
_LONGEST = (
    "suites_catch_faults", "hypothesis_utils", "hangs", "parent_half", "pytest_ranks", "kills", "conformance",
    "runner_survives", "oracle", "symmetric_memory", "hazards", "bodies_run", "laboratory", "classes", "right_rank",
    "run", "extension_contract", "endurance", "reports", "neighbours", "faults", "hostile_classes", "live_programs",
    "restart", "exit", "four_ways", "imports", "inductor", "rank_ends", "pytest_plugin", "machine_memory",
)  # fmt: skip

# Tests that share nothing with the rest of their file, by the beginning of their names. Each may run in any process.
ALONE = {
    "test_bridge.py": ("test_",),
    "test_endurance.py": ("test_",),
    "test_extension_contract.py": ("test_example_on_the_page_runs",),
    "test_hypothesis_utils.py": ("test_lost_zygote",),
    "test_neighbours.py": ("test_",),
    "test_ops.py": ("test_",),
    "test_pytest_plugin.py": ("test_",),
    "test_pytest_ranks.py": ("test_tests", "test_bodies", "test_a_fixture"),
    "test_kills.py": ("test_",),
}

# Files whose tests share state for each parameter, or for the part of it before a slash.
BY_PARAMETER = ("test_four_ways.py", "test_suites_catch_faults.py")


def scope(node):
    """Name the group of tests that share a process with test ``node``: its file, for fixtures and zygotes, or less.

    >>> scope("test/torch_ext/world/test_watch.py::test_first_receipt_counts")
    'test/torch_ext/world/test_watch.py'
    >>> scope("test/torch_ext/test_suites_catch_faults.py::test_suites_detect_faults[cpu/_div_if_needed_1]")
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


def place_in_queue(file):
    """Return the position of the tests of ``file`` in the queue: the slower, the earlier."""
    name = file.removeprefix("test_").removesuffix(".py")
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)
