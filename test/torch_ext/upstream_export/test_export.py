"""Work of this tree as patches: each applies to a repository laid out like PyTorch, and runs there alone."""

import email
import time
from pathlib import Path

import pytest

from test.torch_ext.upstream_export.checkouts import PERSON, git, like_upstream
from torch_ext.upstream.export import check
from torch_ext.upstream.export.command import export, main
from torch_ext.world import _os

ANATOMY = "test/distributed/fsdp/test_fsdp_anatomy.py"
FSDP = "torch/testing/_internal/common_fsdp.py"

# One suite of each kind that runs under torch's own harness in a minute or two, and its device.
RUN_THERE = [
    (ANATOMY, "sim", ()),
    ("test/distributed/fsdp/test_fsdp_properties.py", "sim", ("TestTrainingProperties",)),
    ("test/distributed/rpc/test_share_memory.py", "cpu", ()),
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return like_upstream(tmp_path_factory.mktemp("pytorch"))


@pytest.fixture(scope="module")
def anatomy(checkout):
    result = export([ANATOMY], checkout)
    assert result.problems == []
    return result


def imported(copy, result):
    names = [str(copy / path) if path.startswith("test/") else path[:-3].replace("/", ".") for path in result.files]
    return check.import_in_copy(copy, names)


def test_a_suite_goes_with_the_helpers_that_upstream_lacks(anatomy, checkout):
    assert sorted(anatomy.files) == [ANATOMY, FSDP]
    suite, helpers = anatomy.files[ANATOMY], anatomy.files[FSDP]
    assert suite.startswith('# Owner(s): ["oncall: distributed"]\n')
    assert "class CollectiveLog(TorchDispatchMode):" in helpers and "class StepLog(CollectiveLog):" in helpers
    # As few lines as the change needs: upstream's own stay, except for imports that gain a name.
    before = (checkout / FSDP).read_text(encoding="utf-8").splitlines()
    lost = [line for line in before if line not in helpers.splitlines()]
    assert [line for line in lost if not line.startswith("from ")] == []
    assert len(lost) < 5


@pytest.mark.costly
def test_mail_applies_and_names_author_and_tests(anatomy, checkout, tmp_path):
    mail = email.message_from_string(anatomy.mail)
    assert mail["From"] == f"{PERSON[0]} <{PERSON[1]}>"
    assert mail["Subject"] == "[PATCH] Add test_fsdp_anatomy"
    body = str(mail.get_payload())
    assert "test_fsdp_anatomy: TestSteps.test_hybrid_shard" in body
    assert "Not run on the tree that it applies to." in body
    copy = check.apply_to_copy(checkout, anatomy.mail, tmp_path)
    assert (copy / ANATOMY).read_text(encoding="utf-8") == anatomy.files[ANATOMY]
    assert imported(copy, anatomy) == ""


def test_run_past_its_time_limit_is_killed_with_its_children(checkout, tmp_path):
    program = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\nsys.stdin.read()\n"
    program += "import time\ntime.sleep(600)\n"
    (tmp_path / "test_a.py").write_text(program, encoding="utf-8")
    run = check.run_in_copy(tmp_path, "test_a.py", "cpu", timeout_s=5)
    assert (run.passed, run.failed) == (0, 1)
    assert "timed out after 5 s" in run.output
    sleeper = int(run.output.split()[0])
    # The signal has been sent; the process ends when the kernel delivers it.
    end = time.monotonic() + 60
    while (state := _os.field_of(sleeper, 0)) not in ("", "Z") and time.monotonic() < end:
        time.sleep(0.05)
    assert state in ("", "Z")


@pytest.mark.long  # starts two ranks as torch's own harness does
def test_a_rank_under_torchs_own_harness_uses_its_own_device(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import torch\n"
        "from torch.testing._internal.common_fsdp import FSDPTest\n"
        "from torch.testing._internal.common_utils import run_tests\n\n\n"
        "class TestDevice(FSDPTest):\n"
        "    world_size = 2\n\n"
        "    def test_device(self):\n"
        "        self.assertEqual(torch.accelerator.current_device_index(), self.rank)\n\n\n"
        'if __name__ == "__main__":\n'
        "    run_tests()\n"
    )
    run = check.run_in_copy(tmp_path, "test_a.py", "sim")
    assert (run.passed, run.failed) == (1, 0), run.output


def test_nothing_is_written_to_the_checkout(checkout, tmp_path):
    def state():
        commands = [["status", "--porcelain"], ["count-objects", "-v"], ["for-each-ref"]]
        return [git(checkout, *each) for each in commands]

    before, file = state(), tmp_path / "change.patch"
    arguments = ["testing/_internal/_fsdp/step_log.py", "--onto", str(checkout)]
    assert main([*arguments, "--output", str(file)]) == 0
    assert state() == before
    subject = "Subject: [PATCH] Add CollectiveLog, Collective, ThreeUnits and 2 more\n"
    assert subject in file.read_text(encoding="utf-8")


@pytest.mark.long  # half a minute for the whole tree
def test_every_suite_and_helper_goes_applies_and_imports(checkout, tmp_path):
    result = export(["test/distributed", "testing/_internal"], checkout)
    assert result.problems == []
    assert len(result.files) > 40
    copy = check.apply_to_copy(checkout, result.mail, tmp_path)
    assert imported(copy, result) == ""


@pytest.mark.long  # minutes under torch's own harness
@pytest.mark.parametrize(("file", "device", "tests"), RUN_THERE, ids=[Path(file).stem for file, *_ in RUN_THERE])
def test_suites_pass_under_torchs_own_harness(checkout, tmp_path, file, device, tests):
    result = export([file], checkout)
    assert result.problems == []
    copy = check.apply_to_copy(checkout, result.mail, tmp_path)
    run = check.run_in_copy(copy, file, device, tests)
    assert run.good, run.output
    assert run.passed, run.output
