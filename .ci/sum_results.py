"""Add up the result lines of our runner and of pytest in a log, print the sum, and exit with 1 if a test failed.

Usage: sum_results.py LOG BROKEN_STEPS
"""

import re
import sys
from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;]*m")
OURS = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$")
PYTEST = re.compile(r"^=* ?(?:\d+ \w+,? ?)+ in [\d.]+s.*$")


def count(log: str) -> tuple[int, int, int]:
    """Return the numbers of passed, failed (including errors) and skipped tests."""
    passed = failed = skipped = 0
    for line in map(str.strip, ANSI.sub("", log).splitlines()):
        if match := OURS.match(line):
            counts = [int(number) for number in match.groups()]
        elif PYTEST.match(line):
            found = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", line)}
            counts = [found.get("passed", 0), found.get("failed", 0) + found.get("error", 0), found.get("skipped", 0)]
        else:
            continue
        passed, failed, skipped = (
            total + count for total, count in zip((passed, failed, skipped), counts, strict=True)
        )
    return passed, failed, skipped


def main(log: str, broken: int) -> int:
    passed, failed, skipped = count(Path(log).read_text(errors="replace"))
    if broken:
        print(f"{broken} step{'s' if broken > 1 else ''} failed")
    print(f"{passed} passed, {max(failed, broken)} failed, {skipped} skipped")
    return int(bool(broken or failed or not passed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
