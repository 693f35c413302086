"""``TORCH_EXT_SIM=cuda``: the simulated device is CUDA's, for programs, libraries, torch and pytest alike."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test.torch_ext.interpreter import python

# The device's name comes from sources without the literal "cuda".
PROGRAM = """
import enum
import json
import pickle

import torch


class Kind(str, enum.Enum):
    GPU = "".join(["cu", "da"])


def matched(name):
    match name:
        case "cpu":
            return "host"
        case Kind.GPU:
            return "device"


config = json.loads('{"device": "cu\\\\u0064a:1"}')
x = torch.ones(4, device=config["device"], requires_grad=True)
assert x.is_cuda and x.device.type == Kind.GPU and matched(x.device.type) == "device"
assert {Kind.GPU.value: 1}[x.device.type] and json.dumps(str(x.device)) == '"cuda:1"'
(x * 2).sum().backward()
assert x.grad.tolist() == [2.0] * 4
assert getattr(torch, Kind.GPU.value).device_count() == 4 and torch.accelerator.current_accelerator().type == "cuda"
torch.save(x, "x.pt")
assert torch.load("x.pt").device == x.device and torch.load("x.pt", map_location="cpu").device.type == "cpu"
assert torch.amp.GradScaler(x.device.type).is_enabled() and torch.Generator(config["device"]).device == x.device
with torch.autocast(x.device.type):
    assert (torch.ones(2, 2).cuda() @ torch.ones(2, 2).cuda()).dtype is torch.float16
storage = x.detach().clone().untyped_storage()
storage.resize_(0)
assert storage.nbytes() == 0 and torch.UntypedStorage(8, device="cuda").device.type == "cuda"
assert torch.cuda.get_device_name() == "Simulated accelerator"

# No other CUDA code may take an address of the host for one of a GPU.
assert not hasattr(x.detach(), "__cuda_array_interface__")
try:
    x.detach().__dlpack__()
except BufferError:
    pass
else:
    raise AssertionError("exported")

# Attention has the form of GPUs, whose memory does not grow with the square of the sequence.
q = torch.randn(2, 4, 8, 16, device="cuda", requires_grad=True)
attention = torch.nn.functional.scaled_dot_product_attention
plain = q.detach().cpu().requires_grad_()
out, expected = (attention(each, each, each, is_causal=True) for each in (q, plain))
assert "Fused" in type(out.grad_fn).__name__, out.grad_fn
out.sum().backward()
expected.sum().backward()
torch.testing.assert_close(out.cpu(), expected)
torch.testing.assert_close(q.grad.cpu(), plain.grad)
scores, targets = torch.randn(5, 2, 4, device="cuda").log_softmax(2), torch.ones(2, 3, dtype=torch.long, device="cuda")
assert torch.nn.functional.ctc_loss(scores, targets, (5, 5), (3, 3)).is_cuda
print("through")
"""
COMPILED = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
plain = torch.nn.Sequential(*(type(each)(*sizes) for each, sizes in zip(model, ((8, 16), (16,), (), (16, 4)))))
plain.load_state_dict(model.state_dict())
compiled, x = torch.compile(model.cuda(1)), torch.randn(3, 8)
out = compiled(x.cuda(1)).softmax(-1)
out.pow(2).sum().backward()
plain(x).softmax(-1).pow(2).sum().backward()
assert out.device == torch.device("cuda:1")
for ours, theirs in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
print("through")
"""
TESTS = """
import torch
from torch.testing._internal.common_cuda import TEST_CUDA


def test_on_cuda():
    print("seen on", torch.ones(1).cuda().device)
    assert TEST_CUDA and torch.ones(1, device="cuda").is_cuda


def test_fails():
    assert torch.ones(1).cuda().item() == 2
"""


def test_every_spelling_of_a_device_is_cuda(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = python("program.py", folder=tmp_path, TORCH_EXT_SIM="cuda")
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


def test_inductor_generates_cpp_for_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(COMPILED)
    done = python("program.py", folder=tmp_path, TORCH_EXT_SIM="cuda")
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


@pytest.mark.parametrize("command", [("-m", "pytest"), ("-c", "import pytest; raise SystemExit(pytest.main())"), ()])
def test_pytest_shows_its_output_and_its_failures(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_cuda.py").write_text(TESTS)
    words = command or (str(Path(sys.executable).parent / "pytest"),)
    done = python(*words, folder=tmp_path, TORCH_EXT_SIM="cuda")
    assert "1 failed, 1 passed" in done.stdout and "assert 1.0 == 2" in done.stdout, done.stdout + done.stderr
