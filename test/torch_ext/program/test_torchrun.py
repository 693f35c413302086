"""Unmodified torchrun, with ``TORCH_EXT_SIM`` in the environment."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from test.torch_ext.interpreter import python
from test.torch_ext.program.commands import EXAMPLE, torchrun


@pytest.mark.long
def test_two_agents_train_on_sim(tmp_path):
    """Two hosts, emulated: they find each other by torchrun's own rendezvous."""
    meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", tmp_path.name)
    with socket.socket() as held:  # stays bound and never listens, so that no other process gets the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        endpoint = ("--rdzv-endpoint", f"127.0.0.1:{held.getsockname()[1]}", str(EXAMPLE))
        sim = {"TORCH_EXT_SIM": "1", "TORCH_EXT_SIM_STRICT": "1"}
        with ThreadPoolExecutor(2) as agents:
            ended = list(agents.map(lambda _: torchrun(*meeting, *endpoint, folder=tmp_path, **sim), range(2)))
    assert [each.returncode for each in ended] == [0, 0], ended
    assert sum("step 4: loss" in each.stdout for each in ended) >= 1


@pytest.mark.costly
def test_silent_fake_is_reported(tmp_path):
    (tmp_path / "fake.py").write_text("import torch\n")
    ended = torchrun("--nproc-per-node", "2", "fake.py", folder=tmp_path, TORCH_EXT_SIM="1", TORCH_EXT_SIM_STRICT="1")
    # The first worker that fails has torchrun end the other.
    assert re.search(r"error: rank [01] made no process group", ended.stderr)
    assert re.search(r"error: rank [01] used no simulated device and", ended.stderr)
    assert ended.returncode != 0


def test_entry_point_is_inactive_by_default():
    program = "import sys; from torch_ext.program.autoload import load; load(); print(sorted(sys.modules))"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert not any(name in done.stdout for name in ("'torch'", "torch_ext.sim", "torch_ext.world", "argparse"))
