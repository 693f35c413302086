"""``FSDPExtensionContract`` passes a correct subclass, and names the fault and the remedy for each broken one.

The subclasses are in ``broken_extensions.py``, which runs once, in a separate folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.fsdp.broken_extensions import BROKEN

CHECKOUT = Path(__file__).resolve().parents[3]
PAGE = CHECKOUT / "EXTENSIONS.md"


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter in ``folder``, with torch_ext on the path but not the checkout's tests."""
    environment = {"TORCH_EXT_DEVICE": "cpu"} | os.environ | {"PYTHONPATH": str(CHECKOUT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True, timeout=500,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("broken")
    shutil.copy(Path(__file__).with_name("broken_extensions.py"), folder / "test_broken.py")
    chosen = ["TestSound", *(f"{case}.{test}" for case, test, _ in BROKEN)]
    return python(folder, "-m", "torch_ext", "--root", ".", "-v", "-i", *chosen).stdout


def endings(report: str) -> dict[str, str]:
    return dict(re.findall(r"^test_broken\.py::(\S+)  (passed|failed|skipped)", report, re.MULTILINE))


def test_sound_subclass_passes_every_test(report: str) -> None:
    found = {name: ending for name, ending in endings(report).items() if name.startswith("TestSound::")}
    assert set(found.values()) == {"passed"}, report
    assert {name.partition("::")[2] for name in found} == {
        "test_hooks", "test_training_parity", "test_uneven_shards", "test_mixed_precision", "test_hsdp_mesh",
        "test_meta_device_flow", "test_save_and_load",
    }  # fmt: skip


@pytest.mark.parametrize(("case", "test", "message"), BROKEN, ids=[case for case, _, _ in BROKEN])
def test_broken_subclass_gets_the_expected_error(report: str, case: str, test: str, message: str) -> None:
    assert endings(report)[f"{case}::{test}"] == "failed"
    block = report.partition(f"\nFAILED test_broken.py::{case}::{test}")[2].partition("\nrerun: ")[0]
    assert re.search(message, block), block


def test_no_broken_subclass_costs_a_time_limit(report: str) -> None:
    """Ranks do not wait for a failed rank."""
    assert "timed out" not in report


@pytest.fixture(scope="module")
def example() -> str:
    """Return the test file on the page."""
    shown = re.search(r"<!-- test_my_tensor\.py -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    return shown[1]


@pytest.fixture(scope="module")
def subclass() -> str:
    """Return the tensor subclass on the page."""
    shown = re.search(r"<!-- my_tensor\.py -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    return shown[1]


def test_example_on_the_page_has_the_stated_length(example: str) -> None:
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


# Commands that run the tests, and how many tests each runs: all of them once, otherwise the fastest.
WAYS = {
    "python file.py": (("test_my_tensor.py", "TestMyTensor.test_hooks"), 1),
    "pytest": (("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_tensor.py", "-k", "hooks or meta"), 2),
    "torch_ext --root": (("-m", "torch_ext", "--root", "."), 7),
}


@pytest.mark.parametrize("way", WAYS)
def test_example_on_the_page_runs_in_a_folder_of_its_own(tmp_path: Path, example: str, subclass: str, way: str) -> None:
    (tmp_path / "my_tensor.py").write_text(subclass, encoding="utf-8")
    (tmp_path / "test_my_tensor.py").write_text(example, encoding="utf-8")
    command, count = WAYS[way]
    done = python(tmp_path, *command)
    assert done.returncode == 0, done.stdout
    assert re.search(rf"\b{count} passed", done.stdout), done.stdout
