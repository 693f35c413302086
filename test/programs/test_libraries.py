"""Libraries for training that know nothing of the simulated accelerator: each trains on it, and to the same loss as on
plain cpu. ``.ci/programs`` makes an environment that has them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from test.torch_ext.program.commands import Ended, launched, run

_SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class _Library:
    """A library, the program that uses it, and the packages besides in which CUDA means the simulated accelerator."""

    name: str
    program: str
    packages: tuple[str, ...]

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

    @property
    def options(self) -> str:
        return " ".join(f"--cuda-in {package}" for package in self.packages)


_ACCELERATE = _Library("accelerate", "accelerate_loop.py", ("accelerate",))
_TRANSFORMERS = _Library("transformers", "transformers_trainer.py", ("accelerate", "transformers"))
_LIGHTNING = _Library("lightning", "lightning_fit.py", ("lightning", "lightning_fabric", "torchmetrics"))
_TORCHAO = _Library("torchao", "torchao_float8.py", ("torchao",))


def _result(ended: Ended) -> tuple[str, str, str]:
    """Return the loss, the device and the class of the model or the strategy that a program has printed."""
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("result ")]
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
    ended = run(f"-n 2 --strict --output rank0 {library.options}", library.text, kind, folder=tmp_path)
    assert _result(ended) == (_on_host(library, of_host), "sim", made)


def test_accelerate_launch_runs_on_sim(tmp_path: Path, of_host: Path) -> None:
    _ACCELERATE.require()
    (tmp_path / "program.py").write_text(_ACCELERATE.text)
    words = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --multi_gpu program.py ddp"
    asked = {"TORCH_EXT_SIM": "cuda", "TORCH_EXT_SIM_PACKAGES": "accelerate", "TORCH_EXT_SIM_STRICT": "1"}
    ended = launched("accelerate.commands.launch", *words.split(), folder=tmp_path, **asked)
    assert _result(ended) == (_on_host(_ACCELERATE, of_host), "sim", "DistributedDataParallel")
