"""A test file gives the same results under our runner, by itself, under unittest in two spellings, and under pytest,
and an empty rank of it imports nothing; ``coverage`` counts the lines that run in its ranks and in the parent half.
"""

import json
import re
import subprocess

import pytest

from test.torch_ext.interpreter import CHECKOUT, RUN_TEST, python
from test.torch_ext.world.suites import suite_of
from torch_ext import cache

SOURCE = """
import pickle

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu


# What a forked rank finds at its start.
LOADED = set()
os.register_at_fork(after_in_child=lambda: LOADED.update(sys.modules))


def double(x):
    return 2 * x  # line of ranks


class TestRanks(Ranks):
    def setUp(self):
        super().setUp()
        self.started = True  # line of the parent half

    def test_functions_travel(self):
        self.join_group()
        found = [None, None]
        dist.all_gather_object(found, (double, os.getpid()))
        self.assertEqual([function(3) for function, _ in found], [6, 6])
        self.assertEqual(len({pid for _, pid in found}), 2)
        self.assertIs(pickle.loads(pickle.dumps(double)), double)
        note(f"seen{self.rank}", f"{double.__module__} {type(self).__module__}")

    def test_one_rank_fails(self):
        if self.rank == 1:
            raise ValueError("this is rank 1")  # line of one rank

    @skip_if_lt_x_gpu(8)
    def test_wants_devices(self):
        pass

    def test_empty(self):
        tell = lambda: note(f"imported{self.rank}", sorted(set(sys.modules) - LOADED))
        multiprocessing.util.Finalize(None, tell, exitpriority=-100)


class TestThreads(Threads):
    def test_one_thread_fails(self):
        if self.rank == 1:
            raise ValueError("this is rank 1")


if __name__ == "__main__":
    run_tests()
"""
WAYS = {
    "run_test.py": (RUN_TEST, "--root", ".", "-v"),
    "python file.py": ("test_suite.py", "-v", "--device", "sim"),
    "unittest module": ("-m", "unittest", "-v", "test_suite"),
    "unittest path": ("-m", "unittest", "-v", "./test_suite.py"),
    "pytest": ("-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "test_suite.py"),
}
# Many projects set these: coverage then saves data in processes that end through multiprocessing's bootstrap.
OTHERS = "[run]\nparallel = true\nconcurrency = multiprocessing\n"
LINES = {
    "run_test.py": (CHECKOUT / "pyproject.toml", ("line of ranks", "line of one rank", "line of the parent half")),
    "python file.py": (None, ("line of ranks", "line of one rank")),
}
_LINE = re.compile(
    r"^(?:test_suite\.py::\w+::)?(test_\w+)(?: \(\S+\) \.\.\.)?  ?"
    r"(passed|failed|skipped|ok|ERROR|PASSED|FAILED|SKIPPED)",
    re.MULTILINE,
)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_tests_pass_fail_and_skip(tmp_path, way):
    settings, lines = LINES.get(way, (None, ()))
    if settings is None:
        settings = tmp_path / "settings"
        settings.write_text(OTHERS)
    measured = ("-m", "coverage", "run", f"--rcfile={settings}") if lines else ()
    with suite_of(tmp_path, SOURCE) as suite:
        device = "" if "--device" in WAYS[way] else "sim"
        extra = {"TORCH_EXT_DEVICE": device, "TORCH_EXT_SIM_DEVICES": "4", "TORCH_EXT_CACHE": str(cache.folder())}
        run = suite.finish(suite.start([*measured, *WAYS[way]], extra, stderr=subprocess.STDOUT))
    words = {"ok": "passed", "ERROR": "failed"}
    ended = {name: words.get(word, word.lower()) for name, word in _LINE.findall(run.out)}
    failed = {"test_one_rank_fails": "failed", "test_one_thread_fails": "failed"}
    expected = {**failed, "test_empty": "passed", "test_functions_travel": "passed", "test_wants_devices": "skipped"}
    assert (ended, run.code) == (expected, 1), run
    assert len(re.findall(r"rank 1 raised ValueError at test_suite.py:\d+: this is rank 1", run.out)) >= 2
    if way == "pytest":
        shown = run.out.split("_ TestRanks.test_one_rank_fails _")[1].split("short test summary")[0]
        frames = [line for line in shown.splitlines() if line.strip() and not line.startswith(("E  ", "_"))]
        assert len(frames) <= 14 and not re.search("testPartExecutor|raise_verdict", shown), (
            "pytest shows frames of ours"
        )
    assert "rank 0 passed" in run.out and "Needs 8 accelerator devices." in run.out
    # Otherwise functions that are pickled or sent in an RPC by reference would not resolve.
    module = "__main__" if way == "python file.py" else "test_suite"
    assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == [f"{module} {module}"] * 2
    assert [(tmp_path / f"imported{rank}").read_text() for rank in (0, 1)] == ["[]"] * 2
    assert "fresh interpreter" not in run.out, "the tests would pass, seconds later"
    if lines:
        pytest.importorskip("coverage")
        for step in (["combine", "-q"], ["json", "-q", "--include=test_suite.py", "-o", "covered.json"]):
            done = python("-m", "coverage", step[0], f"--rcfile={settings}", *step[1:], folder=tmp_path)
            assert done.returncode == 0, done
        (file,) = json.loads((tmp_path / "covered.json").read_text())["files"].values()
        text = suite.file.read_text().splitlines()
        assert {text.index(line) + 1 for line in text if line.endswith(lines)} <= set(file["executed_lines"])
