"""Every public name of ``torch.cuda`` means something under ``--cuda-as-sim``: a file imports them one by one."""

from __future__ import annotations

from test.torch_ext.interpreter import python

PROGRAM = """
import importlib
import sys
import types

import torch.cuda

import torch_ext.sim
from torch_ext.cuda_as_sim import stand_in, table

tried = 0
for part in ("", *table.SUBMODULES):
    module = importlib.import_module(f"torch.cuda.{part}".rstrip("."))
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        if not isinstance(getattr(module, name, None), types.ModuleType) and name not in stand_in._KEPT_NAMES:
            table.find(name, part)
            tried += 1
print(tried)
"""


def test_every_public_name_has_a_meaning() -> None:
    done = python("-c", PROGRAM, TORCH_EXT_SIM="cuda")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150
