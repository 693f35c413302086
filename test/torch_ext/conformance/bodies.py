"""A program that runs cases which end in every way, and prints the findings: ``bodies.py SLOTS LIMIT CASE...``."""

import ctypes
import json
import os
import signal
import sys
import time

from torch_ext.conformance import forks


def body(group, case):
    if case == "crashes":
        ctypes.string_at(0)
    if case == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "exits":
        os._exit(3)
    if case == "hangs":
        time.sleep(60)
    if case == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "raises":
        raise LookupError("no sample")
    if case == "leaves":
        os.environ["LEFT_BEHIND"] = "1"
    if case == "gives up":
        raise SystemExit(5)
    is_left = case == "finds" and "LEFT_BEHIND" in os.environ
    return (forks.Status.DIFFERS, "left") if is_left else (forks.Status.AGREES, f"{group} {os.getpid()}")


def main():
    slots, limit_s, *cases = sys.argv[1:]
    forks._GRACE_S = 1.0
    running = forks.run({"g": cases, "h": ["fine"]}, body, slots=int(slots), limit_s=float(limit_s))
    found = {}
    for each in running:
        found[each.case] = each.status.value, each.text
    print(json.dumps(found))


if __name__ == "__main__":
    main()
