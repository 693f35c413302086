"""Recovery that torchft does, under fault plans: its managers, LocalSGD and DiLoCo train two replicas, of which one
dies and starts again, and both end with the same weights. Its own tests pass too. ``.ci/programs`` installs it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.servers import environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None,
    reason="torchft is not installed: .ci/programs makes an environment that has it",
)

_SCRIPT = Path(__file__).parent / "scripts" / "torchft_train.py"
_PLANS = [
    "rank 1: kill at step #3",
    "rank 0: kill at forward of 2 #2",
    "rank 0: raise at call of torchft.manager.Manager.should_commit #2",
    "rank 1: exit 3 at backward of 0 #1",
    "rank 1: stop 2s at step #3",
]
# How many of torchft's tests pass. Tests that upscale have a race: if two replicas finish before the third asks for a
# quorum, the third waits for ended peers until TORCHFT_TIMEOUT_SEC, ten seconds by default. Others need GPUs or
# torchcomms. The wheel lacks what diloco_regression_test reads.
_OWN = {"manager_test": 29, "manager_integ_test": 7, "local_sgd_test": 8, "local_sgd_integ_test": 16}
_LIMIT_S = 300.0  # far above the duration of any


def _train(how: str, *options: str) -> tuple[int, list[str], str]:
    """Train two replicas; return the exit code, what each has printed of its weights, and all output."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=200, quorum_tick_ms=50, heartbeat_timeout_ms=1000
    )
    command = [sys.executable, "-m", "torch_ext", "run", "-n", "2", "--device", "cpu", *options, str(_SCRIPT), how]
    try:
        ended = subprocess.run(
            command, env=environment({"TORCHFT_LIGHTHOUSE": lighthouse.address()}), timeout=_LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    finally:
        lighthouse.shutdown()
    return ended.returncode, re.findall(r"\] weights (.*)", ended.stdout), ended.stdout


@pytest.mark.parametrize("how", ["ddp", "local_sgd", "diloco"])
@pytest.mark.parametrize("plan", _PLANS)
def test_replicas_agree_after_a_loss(how: str, plan: str) -> None:
    code, weights, output = _train(how, "--restart", "rank", "--faults", plan)
    assert f"a planted fault: {plan}" in output
    assert code == 0 and len(weights) == 2 and len(set(weights)) == 1 and weights[0].startswith("5 "), output
    restarts = 0 if "stop" in plan else 1
    assert output.count("starts again: restart") == restarts, output


def test_without_a_restart_the_loss_ends_the_run() -> None:
    code, weights, output = _train("ddp", "--timeout", "20", "--faults", _PLANS[0])
    assert code == 137 and weights == [], output


@pytest.mark.parametrize("name", sorted(_OWN))
def test_its_own_tests_pass(name: str) -> None:
    import torchft

    file = Path(torchft.__file__).parent / f"{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not upscale", str(file)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_S)
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert ended.returncode == 0 and passed and int(passed[1]) == _OWN[name], ended.stdout
