"""Add up the result lines of our runner and of pytest in a log, print the sum, and exit with 1 if a test failed.

Usage: sum_results.py LOG BROKEN_STEPS
"""

import re
import sys
from collections import Counter
from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# A result line of ours, or of pytest.
LINE = re.compile(r"^(?:\d+ passed, \d+ failed, \d+ skipped(?:, \d+ flaky)?|=* ?(?:\d+ \w+,? ?)+ in [\d.]+s.*)$")


def count(log: str) -> Counter[str]:
    """Return the number of tests by the word after it, such as passed, in the singular."""
    found = Counter[str]()
    for line in filter(LINE.match, map(str.strip, ANSI.sub("", log).splitlines())):
        for number, word in re.findall(r"(\d+) (\w+)", line):
            found[word.rstrip("s")] += int(number)
    return found


def main(log: str, broken: int) -> int:
    found = count(Path(log).read_text(errors="replace"))
    failed = found["failed"] + found["error"]
    if broken:
        print(f"{broken} step{'s' if broken > 1 else ''} failed")
    print(f"{found['passed']} passed, {max(failed, broken)} failed, {found['skipped']} skipped")
    return int(bool(broken or failed or not found["passed"]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
