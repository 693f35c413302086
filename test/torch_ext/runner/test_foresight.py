"""What is imported ahead of ranks: what their file looks as if it needed, and what ranks before them have needed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from test.torch_ext.world.suites import CHECKOUT, Suite
from torch_ext.runner.foresight import _LIBRARIES, modules_ahead

# A module of its own, since the text of the suites must not name what this looks for.
NOTING = """
import sys

def note(test):
    with open(f"{test._testMethodName}.noted", "a") as file:
        file.write(f"{'torch._dynamo' in sys.modules} ")
"""


def suite_in(folder: Path, source: str) -> Suite:
    (folder / "noting.py").write_text(NOTING)
    return Suite(folder, "from noting import note\n" + textwrap.dedent(source))


def noted(suite: Suite) -> dict[str, str]:
    return {path.stem: path.read_text().strip() for path in suite.folder.glob("*.noted")}


def test_tests_of_collectives_alone_import_no_more(tmp_path: Path) -> None:
    suite = suite_in(
        tmp_path,
        """
        class TestPlain(Case):
            def test_a(self):
                self.check()
                note(self)
        """,
    )
    assert suite.run().status == {"test_a": "passed"}
    assert noted(suite) == {"test_a": "False False"}


def test_a_file_that_names_optimizers_has_it_in_the_first_rank(tmp_path: Path) -> None:
    suite = suite_in(
        tmp_path,
        """
        class TestSteps(Case):
            def test_a(self):
                note(self)
                torch.optim.SGD([torch.ones(1, requires_grad=True)])
        """,
    )
    assert suite.run().status == {"test_a": "passed"}
    assert noted(suite) == {"test_a": "True True"}


@pytest.mark.parametrize("slots", ["1", "8"])
def test_later_ranks_have_what_earlier_ones_imported(tmp_path: Path, slots: str) -> None:
    suite = suite_in(
        tmp_path,
        """
        from steps import step

        class TestSteps(Case):
            def test_a(self):
                note(self)
                step()

            def test_b(self):  # its ranks may have been forked before those of the first were over
                note(self)

            def test_c(self):
                note(self)

        class TestOthers(Case):
            def test_d(self):
                self.check()
        """,
    )
    (tmp_path / "steps.py").write_text(
        "import torch\ndef step():\n    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()\n"
    )
    assert set(suite.run("--slots", slots).status.values()) == {"passed"}
    found = noted(suite)
    assert (found["test_a"], found["test_c"]) == ("False False", "True True")


def test_what_cannot_be_read_asks_for_nothing(tmp_path: Path) -> None:
    assert modules_ahead(tmp_path / "test_gone.py") == ()
    binary = tmp_path / "test_binary.py"
    binary.write_bytes(b"\xff\xfe optimizer")
    assert modules_ahead(binary) == ("torch._dynamo",)


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("import torch", ()),
        ("self.assertEqual(one, other)", ("torch.distributed.tensor",)),
        ("model = FullyShardedDataParallel(model)", ("torch._dynamo",)),
        ("from torch.testing._internal.common_utils import run_tests", _LIBRARIES),
    ],
)
def test_what_a_line_asks_for(tmp_path: Path, line: str, modules: tuple[str, ...]) -> None:
    (tmp_path / "test_line.py").write_text(line)
    assert modules_ahead(tmp_path / "test_line.py") == modules


def test_importing_a_harness_class_leaves_upstreams_file_alone() -> None:
    program = (
        "import sys\n"
        "from torch_ext.testing._internal.common_distributed import MultiProcessTestCase\n"
        "from torch_ext.testing._internal.common_utils import run_tests\n"
        "found = {'torch._dynamo', 'torch.testing._internal.common_distributed'} & set(sys.modules)\n"
        "raise SystemExit(', '.join(found) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
