"""Finds leftovers of faults: processes, zombies, descriptors and files. Imports the standard library only."""

import json
import os
import time

from torch_ext.world import _os

# Set in the environment of a suite's processes, to recognise anything they leave behind.
MARK = "MARK_OF_A_TEST"


def marked_processes(mark):
    """Return the pid and command line of every process that carries ``mark``. Zombies have none."""
    wanted, found = f"{MARK}={mark}".encode(), {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as environment, open(f"/proc/{entry}/cmdline", "rb") as command:
                if wanted in environment.read().split(b"\0"):
                    found[int(entry)] = command.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


class Census:
    """Counts processes (zombies of the tree included), descriptors of this process and those above it, and temporary
    files; writes a line of JSON for each test.

    Other processes reap theirs a moment later, so :meth:`note` counts again until the counts agree with the last ones
    or two seconds have passed. A change that stays is written once and is then the new state.
    """

    def __init__(self, path):
        self._path = path
        self._last: dict[str, int] | None = None

    def note(self, test):
        end = time.monotonic() + 2
        while (counts := _count()) != self._last and self._last is not None and time.monotonic() < end:
            time.sleep(0.02)
        self._last = counts
        with open(self._path, "a") as stream:
            print(json.dumps({"test": test, **counts}), file=stream)


def _count():
    tree = ancestors()
    counts = {f"descriptors {level}": len(os.listdir(f"/proc/{pid}/fd")) for level, pid in enumerate(tree)}
    counts["processes"] = len(marked_processes(os.environ[MARK]))
    counts["zombies"] = sum(_os.field_of(child, 0) == "Z" for pid in tree for child in _os.children_of(pid))
    counts["files"] = sum(len(files) + len(folders) for _, folders, files in os.walk(os.environ["TMPDIR"]))
    return counts


def ancestors():
    """Return the pids of this process and of its ancestors that carry the mark, from the bottom up."""
    marked = marked_processes(os.environ[MARK])
    found = [os.getpid()]
    while (parent := int(_os.field_of(found[-1], 1) or 0)) in marked:
        found.append(parent)
    return found
