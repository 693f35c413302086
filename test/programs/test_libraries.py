"""Libraries for training that know nothing of the simulated accelerator: each trains on it, and to the same loss as on
plain cpu. ``.ci/programs`` makes an environment that has them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from test.torch_ext.program.commands import launched, run

_SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class _Library:
    """A library, and the program that uses it."""

    name: str
    program: str

    def require(self) -> None:
        """Skip the test where the library is not installed."""
        pinned = (Path(__file__).parent / "requirements.txt").read_text(encoding="utf-8").split()
        (wanted,) = [line.partition("==")[2] for line in pinned if line.startswith(f"{self.name}==")]
        if importlib.util.find_spec(self.name) is None:
            pytest.skip(f"{self.name} {wanted} is not installed: .ci/programs makes an environment that has it")
        found = importlib.metadata.version(self.name)
        assert found == wanted, f"tested with {wanted}: .ci/programs installs that"

    @property
    def text(self) -> str:
        return (_SCRIPTS / self.program).read_text(encoding="utf-8")


_ACCELERATE = _Library("accelerate", "accelerate_loop.py")
_TRANSFORMERS = _Library("transformers", "transformers_trainer.py")
_LIGHTNING = _Library("lightning", "lightning_fit.py")
_TORCHAO = _Library("torchao", "torchao_float8.py")
_TORCHTITAN = _Library("torchtitan", "torchtitan_llama.py")
# What two of four ranks do besides FSDP2, and who does the same on plain cpu, which has no attention in parallel.
_ON_HOST_AS = {"fsdp": "fsdp", "tp": "tp", "cp": "tp", "pp": "pp"}


def _result(ended: subprocess.CompletedProcess[str]) -> tuple[str, str, str]:
    """Return the loss, the device and the class of the model or the strategy that a program has printed."""
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("result ")]
    _, loss, device, made = line.split()
    return loss, device, made


@functools.cache
def _on_host(library: _Library, folder: Path) -> str:
    ended = run(
        "-n 2 --device cpu --output rank0", library.text, "ddp", "cpu", folder=folder, ACCELERATE_USE_CPU="true"
    )
    loss, device, _ = _result(ended)
    assert device == "cpu"
    return loss


@pytest.fixture(scope="module")
def of_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.mark.parametrize(
    ("library", "kind", "made"),
    [
        (_ACCELERATE, "ddp", "DistributedDataParallel"),
        (_ACCELERATE, "fsdp1", "FullyShardedDataParallel"),
        (_ACCELERATE, "fsdp2", "FSDPSequential"),
        (_TRANSFORMERS, "ddp", "DistributedDataParallel"),
        (_TRANSFORMERS, "fsdp", "FSDPLlamaForCausalLM"),
        (_LIGHTNING, "ddp", "DDPStrategy"),
        (_LIGHTNING, "fsdp", "FSDPStrategy"),
        (_TORCHAO, "ddp", "FSDPFloat8Linear"),
    ],
    ids=lambda value: value.name if isinstance(value, _Library) else str(value),
)
def test_it_trains_to_the_loss_of_plain_cpu(
    library: _Library, kind: str, made: str, tmp_path: Path, of_host: Path
) -> None:
    library.require()
    ended = run("-n 2 --strict --output rank0 --cuda-as-sim", library.text, kind, folder=tmp_path)
    assert _result(ended) == (_on_host(library, of_host), "cuda", made)


def test_accelerate_launch_runs_on_sim(tmp_path: Path, of_host: Path) -> None:
    _ACCELERATE.require()
    (tmp_path / "program.py").write_text(_ACCELERATE.text)
    words = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --multi_gpu program.py ddp"
    asked = {"TORCH_EXT_SIM": "cuda", "TORCH_EXT_SIM_STRICT": "1"}
    ended = launched("accelerate.commands.launch", *words.split(), folder=tmp_path, **asked)
    assert _result(ended) == (_on_host(_ACCELERATE, of_host), "cuda", "DistributedDataParallel")


@functools.cache
def _torchtitan_on_host(kind: str, folder: Path) -> float:
    (folder / kind).mkdir()
    ended = run("-n 4 --device cpu --output rank0", _TORCHTITAN.text, kind, "cpu", folder=folder / kind)
    loss, device, _ = _result(ended)
    assert device == "cpu"
    return float(loss)


@pytest.mark.parametrize("kind", _ON_HOST_AS)
def test_torchtitan_trains_its_debug_model_to_the_loss_of_plain_cpu(kind: str, tmp_path: Path, of_host: Path) -> None:
    _TORCHTITAN.require()
    ended = run("-n 4 --strict --output rank0 --cuda-as-sim", _TORCHTITAN.text, kind, folder=tmp_path)
    loss, device, made = _result(ended)
    assert (device, made) == ("cuda", "FSDPTransformer")
    # The loss of attention in parallel is that of the whole, but for rounding.
    assert float(loss) == pytest.approx(
        _torchtitan_on_host(_ON_HOST_AS[kind], of_host), rel=1e-6 if kind == "cp" else 0
    )


def test_torchrun_runs_torchtitan_on_sim(tmp_path: Path, of_host: Path) -> None:
    _TORCHTITAN.require()
    (tmp_path / "program.py").write_text(_TORCHTITAN.text)
    asked = {"TORCH_EXT_SIM": "cuda", "TORCH_EXT_SIM_STRICT": "1"}
    ended = launched("torch.distributed.run", *["--nproc-per-node", "4", "program.py", "tp"], folder=tmp_path, **asked)
    loss, device, _ = _result(ended)
    assert (float(loss), device) == (_torchtitan_on_host("tp", of_host), "cuda")
