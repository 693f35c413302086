"""The suites inside the torch wheel, under the harness they were written for and under ours.

    python benchmarks/upstream_suites.py [--tests 8] [--suites distributed rpc ...]

Each suite is one file, laid out as in a PyTorch checkout, with its tests taken from the installed torch. Both harnesses
run the same tests of it on ``cpu``, one after the other, in one run on one machine, with full isolation: a fresh set of
processes for every test. Harness time is the wall time of the whole command less the time that the test methods took in
rank 0. The last rows are what a file costs to load: ours less torch's own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_LOG_VARIABLE = "TORCH_EXT_BENCHMARK_BODIES"

# The head of each suite's file, which imports its tests; all files end alike.
_HEADS = {
    "distributed": """
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class Suite(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
""",
    "rpc": """
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import SpawnHelper

class Suite(RpcTest, TensorPipeRpcAgentTestFixture, SpawnHelper):
    pass
""",
    "dist_autograd": """
from torch.testing._internal.distributed.rpc.dist_autograd_test import DistAutogradTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import SpawnHelper

class Suite(DistAutogradTest, TensorPipeRpcAgentTestFixture, SpawnHelper):
    pass
""",
    "ddp_under_dist_autograd": """
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import DdpUnderDistAutogradTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import SpawnHelper

class Suite(DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, SpawnHelper):
    pass
""",
}
# Tests that run on a host without a GPU, in the order in which --tests takes them.
_TESTS = {
    "distributed": (
        "test_all_reduce_sum", "test_broadcast", "test_barrier", "test_all_gather", "test_reduce_max", "test_scatter",
        "test_gather", "test_send_recv", "test_all_reduce_product", "test_get_rank", "test_isend", "test_irecv",
    ),
    "rpc": (
        "test_worker_id", "test_add", "test_builtin_remote_ret", "test_py_built_in", "test_remote_with_exception",
        "test_scalar_add", "test_nonzero", "test_multi_rpc", "test_py_class_method", "test_self_add",
    ),
    "dist_autograd": (
        "test_autograd_context", "test_nested_context", "test_backward_simple", "test_worker_ids_recorded",
        "test_backward_no_grad_on_tensor", "test_context_cleanup_tensor_with_grad",
    ),
    "ddp_under_dist_autograd": ("test_backward_ddp_inside", "test_backward_ddp_outside", "test_backward_no_ddp"),
}  # fmt: skip
_TAIL = f"""

def timed(test):
    @functools.wraps(test)
    def wrapper(self, *args, **kwargs):
        start = time.monotonic()
        try:
            return test(self, *args, **kwargs)
        finally:
            if self.rank == 0:
                with open(os.environ[{_LOG_VARIABLE!r}], "a") as log:
                    log.write(f"{{time.monotonic() - start}}\\n")
    return wrapper

for name in dir(Suite):
    if name.startswith("test"):
        setattr(Suite, name, timed(getattr(Suite, name)))

if __name__ == "__main__":
    run_tests()
"""
_START = """import functools
import os
import time

from torch.testing._internal.common_utils import run_tests
"""


def run(command: list[str], log: Path, python_path: str) -> tuple[float, float, int]:
    """Run one side; return its wall time and the time of the bodies in rank 0, in seconds, and the number of bodies.

    Raises:
        SystemExit: a test failed.
    """
    environment = {
        **os.environ, "BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": str(log.parent), _LOG_VARIABLE: str(log),
        "PYTHONPATH": python_path,
    }  # fmt: skip
    log.write_text("")
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    wall_s = time.monotonic() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    bodies = [float(line) for line in log.read_text().splitlines()]
    return wall_s, sum(bodies), len(bodies)


def compare(suite: str, number: int, folder: Path) -> None:
    tests = _TESTS[suite][:number]
    file = folder / f"test_{suite}_suite.py"
    file.write_text(_START + _HEADS[suite] + _TAIL)
    log = folder / f"{suite}.log"
    names = [f"Suite.{test}" for test in tests]
    released = run([sys.executable, str(file), *names], log, "")
    command = [
        sys.executable,
        str(REPOSITORY / "run_test.py"),
        "--upstream",
        str(file),
        "--device",
        "cpu",
        "-i",
        *names,
    ]
    ours = run(command, log, str(REPOSITORY))
    if released[2] != len(tests) or ours[2] != len(tests):
        raise SystemExit(f"{suite}: asked for {len(tests)} tests; bodies ran {released[2]} and {ours[2]} times")
    for side, (wall_s, bodies_s, _) in (("released", released), ("ours", ours)):
        harness_s = wall_s - bodies_s
        print(
            f"{suite:24} {side:9} {len(tests):3} tests  wall {wall_s:6.1f} s  bodies {bodies_s:6.2f} s  "
            f"harness {harness_s:6.1f} s"
        )
    print(f"{suite:24} {'ratio':9} {(released[0] - released[1]) / max(ours[0] - ours[1], 1e-9):9.1f}", flush=True)


def load_times() -> None:
    """Print the time that our bridge adds to the import of torch's helpers, in the process that loads a file."""
    heavy = "import torch.testing._internal.distributed.distributed_test"
    ahead = "import torch_ext.testing._internal._distributed.preload, torch_ext.upstream.bridge"
    program = "import time\n{}\nstart = time.monotonic()\n{}\nprint(time.monotonic() - start)"
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_EXT_DEVICE": "cpu", "BACKEND": "gloo", "WORLD_SIZE": "2",
        "TEMP_DIR": tempfile.gettempdir(),
    }  # fmt: skip
    taken = {}
    for name, before in (("torch's", "import torch"), ("ours", ahead)):
        command = [sys.executable, "-c", program.format(before, heavy)]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        taken[name] = float(out.split()[-1])
    for name, seconds in taken.items():
        print(f"import of distributed_test after {name} preparation: {seconds:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=8, help="tests of each suite (default: 8)")
    parser.add_argument("--suites", nargs="+", choices=_HEADS, default=list(_HEADS), help="which (default: all)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for suite in given.suites:
            compare(suite, given.tests, Path(folder))
    load_times()


if __name__ == "__main__":
    main()
