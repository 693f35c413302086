"""The tiers that run test files: each feature of a backend, and each test of a checkout, by how it ended."""

import re

import pytest

from test.torch_ext.interpreter import python
from torch_ext.conformance.forks import Status
from torch_ext.conformance.suites import finding


def conformance(tmp_path, *arguments):
    cache = str(tmp_path / "cache")
    ran = python("-m", "torch_ext", "conformance", "--page", tmp_path / "page.md", *arguments, XDG_CACHE_HOME=cache)
    return ran.returncode, ran.stdout + ran.stderr, (tmp_path / "page.md")


def test_each_feature_of_a_backend_is_a_case_and_what_it_lacks_counts_as_known(tmp_path):
    code, text, page = conformance(tmp_path, "--device", "cpu", "--tier", "c10d", "--backend", "threaded")
    assert code == 0 and re.search(r"\(28 cases, 17 agree, 11 known, 0 differ, 0 crashed", text), text
    assert "| `c10d::threaded::send and recv` | known | there are no transfers |" in page.read_text()


CHECKOUT_FILE = """
import os, unittest
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

class TestX(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_fine(self): pass
    def test_fails(self): self.assertEqual(self.rank, 0)
    def test_dies(self): os.abort()
    @unittest.skip("requires triton")
    def test_kernel(self): pass
    @unittest.skip("too hot today")
    def test_skipped(self): pass

if __name__ == "__main__":
    run_tests()
"""


def test_each_test_of_a_checkout_is_a_case_and_only_physical_features_do_not_count(tmp_path):
    folder = tmp_path / "checkout" / "test" / "distributed" / "deep"
    folder.mkdir(parents=True)
    (folder / "test_x.py").write_text(CHECKOUT_FILE)
    (folder.parent / "test_broken.py").write_text("import no_such_module\n")
    (folder.parent / "test_old.py").write_text('# Owner(s): ["o"]\nfrom torch.distributed import no_such_name\n')
    how = ("--device", "cpu", "--tier", "distributed", "--checkout", str(tmp_path / "checkout"))
    code, text, page = conformance(tmp_path, *how)
    assert code == 1, text
    lines = page.read_text()
    for case, ended in {
        "deep/test_x.py::TestX::test_fails": "differs",
        "deep/test_x.py::TestX::test_dies": "crashed",
        "deep/test_x.py::TestX::test_skipped": "known | too hot today",
        "test_broken.py::import": "differs",
    }.items():
        assert f"| `distributed::{case}` | {ended}" in lines, lines
    assert "| `deep/test_x.py` | 1 | 1 | 1 | 1 | 1 |" in lines and "needs a Triton kernel (1)" in lines
    assert "needs another release of torch (1)" in lines and "test_old.py::" not in lines
    numbers = re.search(r"distributed on cpu: .*", text)[0]
    assert numbers in conformance(tmp_path, *how)[1]  # kept; another run would take another time
    assert "2 not comparable" in text and "test_fine`" not in lines and "test_kernel`" not in lines


def test_a_tier_without_its_checkout_is_a_usage_error(tmp_path):
    code, text, _ = conformance(tmp_path, "--device", "cpu", "--tier", "distributed", "--checkout", str(tmp_path))
    assert code == 2 and "no test/distributed there" in text
    code, text, _ = conformance(tmp_path, "--device", "cpu", "--tier", "distributed")
    assert code == 2 and "no test/distributed there" in text


@pytest.mark.parametrize(
    ("ranks", "kind", "status"),
    [
        (["failed", "passed"], "ranks", Status.DIFFERS),
        (["failed", "killed"], "ranks", Status.CRASHED),
        (["hung", "hung"], "ranks", Status.HUNG),
        (["stopped", "timed out"], "ranks", Status.HUNG),
        (["exited early"], "ranks", Status.CRASHED),
        ([], "died", Status.CRASHED),
        ([], "raised", Status.DIFFERS),
    ],
)
def test_a_death_of_a_rank_is_no_failed_assertion(ranks, kind, status):
    problem = {"kind": kind, "summary": "so", "ranks": [{"ending": ending} for ending in ranks]}
    result = {"file": "f.py", "class": "C", "method": "m", "status": "failed", "counts_as": "failed", "reason": "",
              "duration_s": 1.0, "problems": [problem]}  # fmt: skip
    assert (finding(result).status, finding(result).text) == (status, "so")
