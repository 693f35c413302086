"""The source checks behind the rules: which code they report, and which they accept."""

import ast

import pytest

from test.torch_ext.house.source import Import, below, device_literals, imports, private_torch_names

PRIVATE = [
    "import torch._dynamo",
    "from torch.distributed import _functional_collectives",
    "from torch.distributed.fsdp._fully_shard import FSDPModule",
    "import torch\ntorch._C._get_tracing_state()",
    "import torch.distributed as dist\ndist.distributed_c10d._world",
    "def f():\n    import torch.nn as nn\n    return nn._x",
    "from torch.testing._internal.common_utils import _TestParametrizer",
    "import sys\ntorch = sys.modules['torch']\ntorch._C.dump",
]
PUBLIC = [
    "import torch\ntorch.__version__",
    "from torch.testing._internal.common_utils import TestCase",
    "from torch.testing._internal import common_utils as upstream\nupstream.PRINT = 1",
    "from torch_ext.world import _os\n_os._libc()",
    "from torch_ext.compat.c10d import _get_default_group",
    "import numpy\nnumpy._core",
    "self._torch = 1",
]


@pytest.mark.parametrize("statement", PRIVATE + PUBLIC)
def test_private_torch_names_are_recognized(statement):
    assert bool(private_torch_names(ast.parse(statement))) == (statement in PRIVATE)


CHOICES = [
    "device.type == 'cuda'",
    "kind in ('cuda', 'xpu')",
    "'cuda' not in str(device)",
    "str(device).startswith('cuda:')",
    "kind.startswith(('sim', 'hpu'))",
    "backend = {'cuda': 'nccl'}[kind]",
    "match kind:\n    case 'cuda': pass",
    "str(device) == 'cuda:0'",
]
NO_CHOICES = [
    "torch.device('cpu')",
    "name == 'gloo'",
    "'meta' in kinds",
    "{'a': 'cuda'}",
]


@pytest.mark.parametrize("statement", CHOICES + NO_CHOICES)
def test_literal_device_choices_are_recognized(statement):
    assert bool(device_literals(ast.parse(statement))) == (statement in CHOICES)


def test_imports_are_absolute_and_marked_if_deferred():
    tree = ast.parse("import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    import i")
    assert imports(tree, "p.q") == [
        Import("a.b", 1, False),
        Import("c.d", 2, False),
        Import("p.q.e", 3, False),
        Import("p.f.g", 4, False),
        Import("i", 6, True),
    ]


def test_below_matches_whole_names():
    assert below("torch_ext.world", ["torch_ext.world"])
    assert below("torch_ext.world.tree", ["torch_ext.world"])
    assert not below("torch_ext.worlds", ["torch_ext.world"])
