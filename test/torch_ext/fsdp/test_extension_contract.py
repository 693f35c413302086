"""``FSDPExtensionContract`` passes a correct subclass, and names the fault and the remedy for each broken one.

The subclasses are in ``broken_extensions.py``, which runs once, in a separate folder.
"""

import re
import shutil
from pathlib import Path

import pytest

from test.torch_ext.fsdp.broken_extensions import BROKEN
from test.torch_ext.interpreter import CHECKOUT, python

pytestmark = pytest.mark.costly

PAGE = CHECKOUT / "EXTENSIONS.md"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    shutil.copy(Path(__file__).with_name("broken_extensions.py"), folder / "test_broken.py")
    chosen = ["TestSound", *(f"{case}.{test}" for case, test, _ in BROKEN)]
    return python("-m", "torch_ext", "--root", ".", "-v", "-i", *chosen, folder=folder, COLUMNS="200").stdout


def endings(report):
    return dict(re.findall(r"^test_broken\.py::(\S+)  (passed|failed|skipped)", report, re.MULTILINE))


def test_sound_subclass_passes_every_test(report):
    found = {name: ending for name, ending in endings(report).items() if name.startswith("TestSound::")}
    assert set(found.values()) == {"passed"}, report
    assert {name.partition("::")[2] for name in found} == {
        "test_hooks", "test_training_parity", "test_uneven_shards", "test_mixed_precision", "test_hsdp_mesh",
        "test_meta_device_flow", "test_save_and_load",
    }  # fmt: skip


@pytest.mark.parametrize(("case", "test", "message"), BROKEN, ids=[case for case, _, _ in BROKEN])
def test_broken_subclass_gets_the_expected_error(report, case, test, message):
    assert endings(report)[f"{case}::{test}"] == "failed"
    block = report.partition(f"\nFAILED test_broken.py::{case}::{test}")[2].partition("\nrerun: ")[0]
    assert re.search(message, block), block


def test_no_broken_subclass_costs_a_time_limit(report):
    """Ranks do not wait for a failed rank."""
    assert "timed out" not in report


def shown(name):
    """Return the file ``name`` on the page."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return found[1]


def test_example_on_the_page_has_the_stated_length():
    assert len([line for line in shown("test_my_tensor.py").splitlines() if line.strip()]) <= 10


# Commands that run the tests, and how many tests each runs: all of them once, otherwise the fastest.
WAYS = {
    "python file.py": (("test_my_tensor.py", "TestMyTensor.test_hooks"), 1),
    "pytest": (("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_tensor.py", "-k", "hooks or meta"), 2),
    "torch_ext --root": (("-m", "torch_ext", "--root", "."), 7),
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_example_on_the_page_runs_in_a_folder_of_its_own(tmp_path, way):
    for name in ("my_tensor.py", "test_my_tensor.py"):
        (tmp_path / name).write_text(shown(name), encoding="utf-8")
    command, count = WAYS[way]
    done = python(*command, folder=tmp_path)
    assert done.returncode == 0, done
    assert re.search(rf"\b{count} passed", done.stdout), done
