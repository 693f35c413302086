"""The tiers that run test files: each feature of a backend, and each test of a checkout, by how it ended."""

import argparse
import json
import re

import pytest

from test.torch_ext.interpreter import python
from torch_ext import accelerator
from torch_ext.conformance import c10d, distributed
from torch_ext.conformance.forks import DONE, Finding, Status
from torch_ext.conformance.suites import finding
from torch_ext.results import SetupError


def conformance(tmp_path, *arguments):
    cache = str(tmp_path / "cache")
    ran = python("-m", "torch_ext", "conformance", "--page", tmp_path / "page.md", *arguments, XDG_CACHE_HOME=cache)
    return ran.returncode, ran.stdout + ran.stderr, (tmp_path / "page.md")


@pytest.mark.costly
def test_each_feature_of_a_backend_is_a_case_and_what_it_lacks_counts_as_known(tmp_path):
    (tests := tmp_path / "checkout" / "test" / "distributed").mkdir(parents=True)  # for ranks that are processes
    (tests / "c10d_backend_common.py").write_text(COMMON)
    (tests / "test_c10d_small.py").write_text(CONTRACT)
    how = ("--device", "cpu", "--tier", "c10d", "--backend", "threaded", "--checkout", str(tmp_path / "checkout"))
    code, text, page = conformance(tmp_path, *how)
    assert code == 0 and re.search(r"\(28 cases, 17 agree, 11 known, 0 differ, 0 crashed", text), text
    assert "| `c10d::threaded::send and recv` | known | there are no transfers |" in page.read_text()


def test_a_device_without_a_backend_is_told_how_to_name_one(monkeypatch):
    def backend():
        raise ValueError("no backend registered")

    monkeypatch.setattr(c10d.accelerator, "backend", backend)
    with pytest.raises(SetupError, match=r"no backend for npu \(no backend registered\); name yours with --backend"):
        c10d.groups(argparse.Namespace(device="npu", backend="", checkout=""))


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
    @unittest.skip("Skipped!")
    def test_of_an_operator(self): pass
    @unittest.skip("too hot today")
    def test_skipped(self): pass

if __name__ == "__main__":
    run_tests()
"""


@pytest.mark.costly
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
    assert "| `deep/test_x.py` | 1 | 1 | 1 | 1 | 2 |" in lines and "needs a Triton kernel (1)" in lines
    assert "not asked of the device (1)" in lines
    assert "needs another release of torch (1)" in lines and "test_old.py::" not in lines
    assert "3 not comparable" in text and "test_fine`" not in lines and "test_kernel`" not in lines
    numbers = re.search(r"distributed on cpu: .*", text)[0]
    assert numbers in conformance(tmp_path, *how)[1]  # kept; another run would take another time
    (tmp_path / "checkout" / "version.txt").write_text("1.9.0\n")
    entries = [{"test": f"distributed::deep/test_x.py::TestX::{test}", "when": {"checkout": "1.9"}, "do": "discount",
                "reason": "of no device: old"} for test in ("test_fails", "test_skipped")]  # fmt: skip
    (mine := tmp_path / "mine.json").write_text(json.dumps(entries))
    code, text, page = conformance(tmp_path, *how, "-k", "deep/*", "-k", "test_*", "--differences", mine)
    assert "-k 'deep/*' -k 'test_*' --checkout PATH`" in page.read_text()
    assert "Files of PyTorch 1.9.0, `--timeout 120`." in page.read_text()
    assert "5 not comparable" in text and "of no device (2)" in page.read_text(), text
    for test, was in ("test_fails", "differs"), ("test_skipped", "known"):
        assert f"- `distributed::deep/test_x.py::TestX::{test}`: {was}, now not counted" in page.read_text()
        assert f"::{test}` | not counted | of no device: old |" in page.read_text()


def test_a_test_that_the_host_lacks_stays_a_difference(monkeypatch):
    def run(names, how, options):
        raise SetupError("nothing selected")
        yield

    monkeypatch.setattr(distributed, "_run", run)
    found = Finding("a.py", "T::t", Status.DIFFERS, "no")
    assert [*distributed._beside_the_host({("a.py", "T::t"): found}, None)] == [found]


def test_a_test_that_hangs_beside_others_runs_again_alone_with_five_times_the_limit(tmp_path, monkeypatch):
    ends = {"T::slow": [Status.HUNG, Status.AGREES], "T::late": [Status.HUNG, Status.DIFFERS],
            "T::stuck": [Status.HUNG] * 2, "T::fine": [Status.AGREES]}  # fmt: skip
    runs = []

    def run(names, how, options):
        chosen = how[how.index("-k") + 1].replace(".", "::") if "-k" in how else ""
        runs.append((chosen, options.timeout, options.slots, "--clock" in how))
        for case in [chosen] if chosen else ends:
            yield Finding("a.py", case, ends[case].pop(0), "as it ended")

    folder = tmp_path / "test" / "distributed"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("begin.elapsed_time(end)")
    monkeypatch.setattr(distributed, "_run", run)
    monkeypatch.setattr(accelerator, "is_simulated", lambda: True)
    monkeypatch.setattr(distributed, "_beside_the_host", lambda differ, options: iter(differ.values()))
    options = argparse.Namespace(device="simulated", checkout=str(tmp_path), timeout=100.0, slots=2)
    found = {each.case: each.status for each in distributed.findings({"a.py": ["whole"]}, options)}
    assert found == {
        "T::fine": Status.AGREES, "T::slow": Status.AGREES, "T::stuck": Status.HUNG, "T::late": Status.DIFFERS,
        DONE: Status.AGREES,
    }  # fmt: skip
    assert runs == [("", 100.0, 2, True), *((f"T::{name}", 500.0, 1, True) for name in ("slow", "late", "stuck"))]


def test_files_that_read_the_devices_time_run_by_the_simulated_clock(tmp_path, monkeypatch):
    ran = {}

    def run(names, how, options):
        ran.update(dict.fromkeys(names, how))
        yield from ()

    folder = tmp_path / "test" / "distributed"
    folder.mkdir(parents=True)
    texts = {"a.py": "begin.elapsed_time(end)", "b.py": "begin.record()"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(distributed, "_run", run)
    for simulated, by_clock in (True, [True, False]), (False, [False, False]):
        monkeypatch.setattr(accelerator, "is_simulated", lambda simulated=simulated: simulated)
        options = argparse.Namespace(device="simulated", checkout=str(tmp_path))
        assert len(list(distributed.findings({name: ["whole"] for name in texts}, options))) == len(texts)
        assert ["unit" in ran[name] for name in texts] == by_clock


@pytest.mark.costly
def test_a_tier_without_its_checkout_is_a_usage_error(tmp_path):
    code, text, _ = conformance(tmp_path, "--device", "cpu", "--tier", "distributed", "--checkout", str(tmp_path))
    assert code == 2 and "no test/distributed there" in text
    code, text, _ = conformance(tmp_path, "--device", "cpu", "--tier", "distributed")
    assert code == 2 and "no test/distributed there" in text


@pytest.mark.parametrize(
    ("ranks", "kind", "stacks", "status"),
    [
        (["failed", "passed"], "ranks", "", Status.DIFFERS),
        (["failed", "killed"], "ranks", "", Status.CRASHED),
        (["hung", "hung"], "ranks", "", Status.HUNG),
        (["stopped", "timed out"], "ranks", "", Status.HUNG),
        (["exited early"], "ranks", "", Status.CRASHED),
        ([], "died", "", Status.CRASHED),
        ([], "died", "Current thread", Status.HUNG),
        ([], "raised", "", Status.DIFFERS),
    ],
)
def test_a_death_of_a_rank_is_no_failed_assertion(ranks, kind, stacks, status):
    problem = {"kind": kind, "summary": "so", "ranks": [{"ending": ending} for ending in ranks], "stacks": stacks}
    result = {"file": "f.py", "class": "C", "method": "m", "status": "failed", "counts_as": "failed", "reason": "",
              "duration_s": 1.0, "problems": [problem]}  # fmt: skip
    assert (finding(result).status, finding(result).text) == (status, "so")


COMMON = """
from dataclasses import dataclass
from torch.testing._internal.common_distributed import MultiProcessTestCase

@dataclass(frozen=True)
class BackendConfig:
    name: str
    device_type: str
    supports_coalescing: bool = False
    of_file: bool = False

C10D_BACKENDS = (BackendConfig("gloo", "cpu", of_file=True), BackendConfig("nccl2", "cuda"))

class C10dBackendTest:
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()

def instantiate_backend_tests(namespace, suite_name, base_class, backends):
    for backend in backends:
        name = f"{backend.name.title()}{suite_name}Test"
        members = {"__module__": namespace["__name__"], "config": backend}
        namespace[name] = type(name, (base_class, MultiProcessTestCase), members)
"""
CONTRACT = """
import unittest
import torch.distributed as dist
from c10d_backend_common import C10D_BACKENDS, C10dBackendTest, instantiate_backend_tests

class AbstractSmallTest(C10dBackendTest):
    def test_own(self): self.assertTrue(self.config.of_file)
    def test_coalescing(self): self.assertTrue(self.config.supports_coalescing)
    def test_skipped(self): self.skipTest("does not support it")
    def test_of_a_later_release(self): dist.no_such_name()

instantiate_backend_tests(globals(), "Small", AbstractSmallTest, C10D_BACKENDS)

class OfNoBackendTest(unittest.TestCase):
    def test_alone(self): pass
"""
MADE = """
from torch.testing._internal.common_distributed import MultiProcessTestCase
from c10d_backend_common import C10dBackendTest

class AbstractMadeTest(C10dBackendTest):
    def test_names(self): self.assertEqual((self.backend_name, self.device_type), BACKEND)

def _make_made_test_class(backend_name, device_type):
    class MadeTest(AbstractMadeTest, MultiProcessTestCase):
        pass
    MadeTest.backend_name, MadeTest.device_type = backend_name, device_type
    MadeTest.__name__ = MadeTest.__qualname__ = f"{backend_name.capitalize()}MadeTest"
    return MadeTest
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("backend", "name", "own", "coalesces"),
    [("", "Gloo", "agrees", "differs"), ("fake", "Fake", "differs", "agrees")],
)
def test_contract_files_of_a_checkout_run_unmodified_for_a_backend(tmp_path, backend, name, own, coalesces):
    tests = tmp_path / "checkout" / "test" / "distributed"
    tests.mkdir(parents=True)
    (tmp_path / "checkout" / "version.txt").write_text("9.9.0a0\n")
    (tests / "c10d_backend_common.py").write_text(COMMON)
    (tests / "test_c10d_small.py").write_text(CONTRACT)
    (tests / "test_c10d_made.py").write_text(MADE.replace("BACKEND)", f"({backend or 'gloo'!r}, 'cpu'))"))
    (tests / "test_c10d_common.py").write_text("raise AssertionError('no contract file')\n")
    how = ("--device", "cpu", "--tier", "c10d", "-k", "test_c10d_*", "--checkout", str(tmp_path / "checkout"))
    code, text, page = conformance(tmp_path, *how, "--backend", backend, "--json", tmp_path / "found.jsonl")
    assert code == 1 and "(5 cases, 3 agree, 1 known, 1 differ, 0 crashed, 1 not comparable" in text, text
    lines = page.read_text()
    differs = "test_own" if own == "differs" else "test_coalescing"
    assert f"| `c10d::test_c10d_small.py::{name}SmallTest::{differs}` | differs" in lines, lines
    assert f"| `c10d::test_c10d_small.py::{name}SmallTest::test_skipped` | known | does not support it |" in lines
    assert r"needs torch \>= 9.9" in lines and f"{name}MadeTest" not in lines
    assert (own, coalesces).count("differs") == 1 and "| `test_c10d_small.py` | 2 | 1 | 0 | 1 | 1 |" in lines
