"""Classes that run side by side: private folders, and classes that may not run at once do not."""

from __future__ import annotations

import json
from pathlib import Path

from test.torch_ext.world.suites import suite_of

# `TestA` and `TestB` wait for each other, and so pass only if both run at once.
MEETING = """
import fcntl, json, tempfile


class Meets(Ranks):
    timeout = 100

    def test_meets_the_other(self):
        note(f"{type(self).__name__}.{self.rank}", json.dumps([tempfile.gettempdir(), os.path.dirname(self.file_name)]))
        for name in ("TestA", "TestB"):
            await_note(f"{name}.{self.rank}")


class TestA(Meets):
    pass


class TestB(Meets):
    pass


del Meets
"""
ALONE = """
import fcntl


class Counted(Ranks):
    alone = False

    def test_counts_who_is_there(self):
        # A lock that all classes share, and that the one that is alone must get at once.
        with open(os.path.join(HERE, "lock"), "a") as lock:
            how = fcntl.LOCK_EX if type(self).alone else fcntl.LOCK_SH
            fcntl.flock(lock, how | fcntl.LOCK_NB) if self.rank == 0 else None
            self.check()
            time.sleep(0.0 if type(self).alone else 0.5)  # the one that is alone is the last to start


class TestAlone(Counted):
    alone = True


class TestC(Counted):
    pass


class TestD(Counted):
    pass


del Counted
"""


def test_classes_run_at_once_share_no_folder_and_leave_one_alone_that_asks_for_it(tmp_path: Path) -> None:
    with suite_of(tmp_path, MEETING) as suite:
        suite.add("test_alone.py", ALONE)
        run = suite.run("--slots", "16")
        assert run.code == 0 and run.out.splitlines()[-1] == "5 passed, 0 failed, 0 skipped", run
        places = [
            [json.loads((tmp_path / f"{name}.{rank}").read_text()) for rank in (0, 1)] for name in ("TestA", "TestB")
        ]
        assert places[0][0] == places[0][1] and places[1][0] == places[1][1]
        assert not set(places[0][0]) & set(places[1][0])


FAILS_FAST = """
class TestA(Ranks):
    def test_waits(self):
        time.sleep(300)


class TestB(Ranks):
    def test_fails(self):
        raise ValueError("enough")
"""


def test_the_first_failure_stops_the_neighbours(tmp_path: Path) -> None:
    with suite_of(tmp_path, FAILS_FAST) as suite:
        run = suite.run("-f", "--slots", "8")
        assert run.code == 1 and run.status == {"test_fails": "failed"} and "Not run: 1 test" in run.out, run
