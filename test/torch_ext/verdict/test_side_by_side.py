"""What a class does to its zygote, and what it leaves behind, costs no class that runs beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import SLOWER, programs

# The first class hurts its zygote while the second one runs, which needs its own again for its second test.
HURTS = """
def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class TestHurts(Ranks):
    def test_hurts_its_zygote(self):
        if self.rank == 1:
            await_note("beside")
            note("zygote", os.getppid())
            os.kill(os.getppid(), getattr(signal, os.environ["HOW"]))
        forever()

    def test_next(self):
        self.check()


class TestBeside(Ranks):
    def test_1_beside(self):
        self.join_group()
        if self.rank == 0:
            note("beside")
            hurt = await_note("zygote")
            while state_of(hurt) not in ("", "T", "X", "Z"):
                time.sleep(0.01)
        self.assertEqual(torch.ones(2), torch.ones(2))
        dist.barrier()

    def test_2_beside(self):
        self.check()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_zygote_that_a_rank_kills_or_stops_costs_that_test_alone(tmp_path: Path, how: str) -> None:
    with programs(tmp_path, HURTS) as suite:
        run = suite.run("--timeout", str(round(4 * SLOWER)), extra={"HOW": how})
        assert run.status.pop("test_hurts_its_zygote") == "failed", run
        assert run.status == dict.fromkeys(["test_next", "test_1_beside", "test_2_beside"], "passed"), run
        assert "zygote" in run.text["test_hurts_its_zygote"], run
        suite.assert_nothing_left()


# Neither its process group nor its environment tells whose process this is.
LEAVES = """
def start_daemon():
    program = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-I", "-S", "-c", program]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_EXT_")}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    started.wait()
    return int(started.stdout.readline())


class TestOwns(Ranks):
    def test_owns(self):
        if self.rank == 0:
            daemon = start_daemon()
            note("owns")
            await_note("ended")
            time.sleep(0.5)
            os.kill(daemon, signal.SIGKILL)


class TestEnds(Ranks):
    def test_1_ends(self):
        await_note("owns")

    def test_2_ends(self):
        note("ended")
"""


def test_the_end_of_a_world_ends_no_process_of_a_class_beside_it(tmp_path: Path) -> None:
    with programs(tmp_path, LEAVES) as suite:
        run = suite.run("--timeout", "20")
        assert run.status == dict.fromkeys(["test_owns", "test_1_ends", "test_2_ends"], "passed"), run
        assert "left" not in run.out, run
        suite.assert_nothing_left()


UNFORKABLE = """
import threading

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


class TestOne(Ranks):
    def test_one(self):
        self.check()


class TestTwo(Ranks):
    def test_two(self):
        self.check()
"""


def test_classes_of_a_file_that_cannot_be_forked_run_side_by_side(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("long"):
        pytest.skip("takes a minute, since every process is a fresh interpreter; pytest --long runs it")
    with programs(tmp_path, UNFORKABLE) as suite:
        run = suite.run("--timeout", "50", "--device", "cpu")
        assert run.status == {"test_one": "passed", "test_two": "passed"}, run
        suite.assert_nothing_left()
