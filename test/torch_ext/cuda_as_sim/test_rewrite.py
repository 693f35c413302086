"""What of a file is rewritten, and what stays: pure."""

from __future__ import annotations

import ast

import pytest

from torch_ext.cuda_as_sim.rewrite import rewrite

HEAD = "import torch_ext.cuda_as_sim.runtime as __cuda_as_sim__\n"


def rewritten(source: str) -> str:
    return ast.unparse(rewrite(ast.parse(source))).removeprefix(HEAD)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x.to('cuda:1')", "x.to('sim:1')"),
        ("f'cuda:{rank}'", "f'sim:{rank}'"),
        ("x.device.type == 'cuda'", "__cuda_as_sim__.as_sim(x.device.type) == 'sim'"),
        ("d in ('cpu', 'cuda')", "__cuda_as_sim__.as_sim(d) in ('cpu', 'sim')"),
        ("d.startswith('cuda')", "__cuda_as_sim__.as_sim(d).startswith('sim')"),
        ("zeros(1, device=args.device)", "zeros(1, device=__cuda_as_sim__.as_sim(args.device))"),
        ("dist.init_process_group(backend)", "dist.init_process_group(__cuda_as_sim__.as_sim(backend))"),
        ("dist.init_process_group('nccl')", "dist.init_process_group('simccl')"),
        ("x = dist.Backend.NCCL", "x = 'simccl'"),
        ("x.is_cuda", "__cuda_as_sim__.is_cuda(x)"),
        ("ProfilerActivity.CUDA", "ProfilerActivity.PrivateUse1"),
        ("lib.impl('op', f, 'CUDA')", "lib.impl('op', f, 'PrivateUse1')"),
        ("print('runs on cuda devices')", "print('runs on cuda devices')"),
        ("dist.is_nccl_available()", "__cuda_as_sim__.is_nccl_available()"),
        ("from torch.cuda.amp import GradScaler", "from torch_ext.cuda_as_sim.cuda.amp import GradScaler"),
        ("import torch.cuda.nvtx as nvtx", "import torch_ext.cuda_as_sim.cuda.nvtx as nvtx"),
        ("from torch import cuda", "from torch_ext.cuda_as_sim.runtime import cuda"),
        (
            "from torch.distributed import ReduceOp, is_nccl_available",
            "from torch.distributed import ReduceOp\nfrom torch_ext.cuda_as_sim.runtime import is_nccl_available",
        ),
        ("from .torch import cuda", "from .torch import cuda"),
        ("import torch.cuda\ntorch.cuda.Stream()", "import torch.cuda\n__cuda_as_sim__.cuda.Stream()"),
        ("import torch as th\nth.cuda.f(torch.cuda)", "import torch as th\n__cuda_as_sim__.cuda.f(torch.cuda)"),
        ("import torch\ntorch.is_autocast_enabled()", "import torch\ntorch.is_autocast_enabled('sim')"),
        ("import torch\ntorch.is_autocast_enabled('cpu')", "import torch\ntorch.is_autocast_enabled('cpu')"),
        ("import torch\ntorch.set_autocast_gpu_dtype(d)", "import torch\ntorch.set_autocast_dtype('sim', d)"),
        ("import torch\ntorch.version.cuda", "import torch\n__cuda_as_sim__.VERSION"),
        ("import torch\ntorch.backends.cuda.is_built()", "import torch\n__cuda_as_sim__.is_built()"),
        ("import torch\ntorch.backends.cuda.matmul", "import torch\ntorch.backends.cuda.matmul"),
        ("profile(use_cuda=args.p)", "profile(use_device='sim' if args.p else None)"),
        ("x.type() == 'torch.cuda.LongTensor'", "__cuda_as_sim__.as_sim(x.type()) == 'torch.sim.LongTensor'"),
        ("'CUDA out of memory' in str(e)", "'sim out of memory' in __cuda_as_sim__.as_sim(str(e))"),
        ("patch('torch.cuda.is_available')", "patch('torch_ext.cuda_as_sim.cuda.is_available')"),
    ],
)
def test_what_is_rewritten(source: str, expected: str) -> None:
    assert rewritten(source) == expected


def test_docstrings_and_lines_stay() -> None:
    source = '"""Runs on\n\n"cuda"."""\nfrom __future__ import annotations\n\nx = "cuda"\nraise ValueError(x)\n'
    tree = rewrite(ast.parse(source))
    assert ast.get_docstring(tree) == 'Runs on\n\n"cuda".'
    assert [node.lineno for node in tree.body] == [1, 4, 6, 6, 7]
    compile(tree, "file.py", "exec")  # the future import is still the first
