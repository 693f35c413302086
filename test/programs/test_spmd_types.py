"""``--check-replicas`` believes the types of ``spmd_types``. ``.ci/programs`` installs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from test.torch_ext.program.commands import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("spmd_types") is None,
    reason="spmd_types is not installed: .ci/programs makes an environment that has it",
)

_PROGRAM = """
import sys
import spmd_types
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("dp", "tp"))
norm = torch.nn.LayerNorm(8).to("sim")
for each in norm.parameters():
    spmd_types.assert_type(each, {mesh.get_group("tp"): spmd_types.I})
optimizer = torch.optim.SGD(norm.parameters(), 0.1)
(norm(torch.arange(8.0, device="sim")) * (dist.get_rank() + 1)).sum().backward()
if sys.argv[1] == "reduces":
    for each in norm.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group("tp"))
optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "said"), [("forgets", "replicas of ranks 0, 1 differ, first in the gradient of weight"), ("reduces", "")]
)
def test_a_forgotten_reduction_of_an_invariant_is_named(how: str, said: str, tmp_path: Path) -> None:
    ended = run("-n 4 --check-replicas", _PROGRAM, how, folder=tmp_path)
    assert (ended.returncode == 0) == (not said) and said in ended.stderr, ended.stderr
