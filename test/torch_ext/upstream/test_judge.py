"""Known differences, missing names and the summary of a run: data in, data out, no processes."""

from dataclasses import replace

import pytest

from torch_ext.results import Raised, RanksFailed, SetupError, Status, TestName, TestResult
from torch_ext.upstream.judge import Difference, Differences, Judge
from torch_ext.upstream.reasons import Releases
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import RankStatus, Receipt
from torch_ext.world.verdict import WorldReport, judge

TEST = TestName("fsdp/test_a.py", "TestA", "test_b")
FAILED = TestResult(TEST, Status.FAILED, 0.1, (Raised("ValueError: no", "trace"),))
PASSED = TestResult(TEST, Status.PASSED, 0.1)
ON_SIM = {"device": "sim", "torch": "2.13.0+cpu", "cuda_as_sim": "false"}


def entry(**changes):
    return replace(Difference("fsdp/test_a.py::TestA::test_*", "the device is simulated"), **changes)


def test_known_failure_is_expected_and_gives_its_reason():
    judged = Differences([entry(link="#1")], ON_SIM).judged(FAILED)
    assert judged.status is Status.XFAIL
    assert judged.reason == "known difference: the device is simulated (#1)"


@pytest.mark.parametrize("when", [{"device": "cpu"}, {"torch": "2.14"}, {"torch": "2.1"}, {"cuda_as_sim": "true"}])
def test_an_entry_counts_only_where_its_conditions_hold(when):
    assert Differences([entry(when=tuple(when.items()))], ON_SIM).judged(FAILED) is FAILED
    assert Differences([entry(when=(("torch", "2.13"), ("device", "sim")))], ON_SIM).judged(FAILED) is not FAILED


def test_entry_whose_tests_all_pass_fails_the_run():
    known = Differences([entry()], ON_SIM)
    assert known.judged(PASSED) is PASSED
    (stale,) = known.out_of_date([TEST], whole=True)
    assert stale.status is Status.FAILED
    assert "'fsdp/test_a.py::TestA::test_*' no longer fails" in str(stale.problems[0])
    assert known.out_of_date([TEST], whole=False) == []  # the test that fails may have been left out
    known.judged(replace(FAILED, test=replace(TEST, method="test_c")))
    assert known.out_of_date([TEST], whole=True) == []


def test_a_test_that_would_hang_does_not_run():
    known = Differences([entry(do="skip")], ON_SIM)
    assert known.skipped(TEST) == "known difference: the device is simulated"
    assert known.skipped(replace(TEST, cls="TestB")) == ""
    assert known.judged(FAILED) is FAILED


def test_a_test_that_fails_on_any_device_is_no_failure_of_this_one_until_it_passes():
    known = Differences([entry(do="discount", when=(("checkout", "2.4"),))], {**ON_SIM, "checkout": "2.4.0"})
    judged = known.judged(FAILED)
    assert (judged.status, judged.reason) == (Status.SKIPPED, "the device is simulated") and not judged.problems
    known = Differences([entry(do="discount")], ON_SIM)
    assert known.judged(PASSED) is PASSED and known.out_of_date([TEST], whole=True)


def test_the_release_of_the_checkout_is_a_condition(tmp_path):
    (known := tmp_path / "known.json").write_text(
        '[{"test": "test_a.py::*", "when": {"checkout": "2.4"}, "do": "discount", "reason": "so"}]'
    )
    failed = replace(FAILED, test=TestName("test_a.py", "TestA", "test_b"))
    assert Judge([checkout(tmp_path, "2.4.1")], [str(known)], {}).judged(failed).reason == "so"
    assert Judge([], [str(known)], {}).judged(failed) is failed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "expected a list"),
        ('[{"test": "a"}]', "entry 1: expected an object with test and reason"),
        ('[{"test": "a", "reason": "b", "do": "xfail"}]', "got do='xfail'"),
        ('[{"test": "a", "reason": "b", "when": {"moon": "full"}}]', "device, torch"),
        ("nonsense", "cannot be read"),
    ],
)
def test_malformed_list_is_refused(text, message, tmp_path):
    file = tmp_path / "known.json"
    file.write_text(text)
    with pytest.raises(SetupError, match=message):
        Judge([], [str(file)], {})


def checkout(folder, version):
    (folder / "torch").mkdir()
    (folder / "version.txt").write_text(f"{version}\n")
    file = folder / "test" / "test_a.py"
    file.parent.mkdir()
    file.touch()
    return file


def failing_with(error):
    return replace(FAILED, problems=(Raised(error, "trace"),))


@pytest.mark.parametrize(
    ("error", "module"),
    [
        ("ImportError: cannot import name 'new' from 'torch.distributed' (/x/__init__.py)", "torch.distributed"),
        ("AttributeError: module 'torch.distributed' has no attribute 'new'", "torch.distributed"),
        ("ModuleNotFoundError: No module named 'torch.distributed.new'", "torch.distributed"),
        (
            "ImportError: cannot import name 'new' from 'torch_ext.testing._internal.common_fsdp' (/x)",
            "torch.testing._internal.common_fsdp",  # ours and torch's lack it
        ),
    ],
)
def test_a_name_that_the_installed_torch_lacks_is_no_failure(error, module, tmp_path):
    failed = failing_with(error)
    assert Releases([]).judged(failed) is failed
    newer = Releases([checkout(tmp_path, "9.9.0a0")])
    assert newer.notice.startswith("the checkout is of torch 9.9.0a0, and ")
    judged = newer.judged(failed)
    assert judged.status is Status.SKIPPED
    assert judged.reason.startswith("needs torch >= 9.9: ") and judged.reason.endswith(f"has no {module}.new")


@pytest.mark.parametrize(
    "error",
    [
        "ImportError: cannot import name 'new' from 'torch_ext.testing._internal.common_utils' (/x.py)",
        "AttributeError: 'TestA' object has no attribute 'new'",
        "AttributeError: module 'torch.sim' has no attribute 'new'",
        "ImportError: cannot import name 'new' from 'torch.sim.amp' (/x.py)",
        "ValueError: module 'torch.distributed' is odd",
    ],
)
def test_other_failures_stay_failures(error, tmp_path):
    file = checkout(tmp_path, "9.9.0a0")
    failed = failing_with(error)
    assert Releases([file]).judged(failed) is failed
    (file.parents[1] / "version.txt").write_text("1.0\n")
    same = failing_with("AttributeError: module 'torch.distributed' has no attribute 'new'")
    assert Releases([file]).judged(same) is same


IMPORTS = """
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_fsdp import FSDPTest
def own(): pass
"""


@pytest.mark.parametrize(
    ("error", "skipped"),
    [
        ("ImportError: cannot import name 'New' from 'torch.testing._internal.common_utils' (/x.py)", True),
        ("TypeError: helper() got an unexpected keyword argument 'new'", True),
        ("TypeError: FSDPTest.own() got an unexpected keyword argument 'new'", False),
        ("TypeError: FSDPTest._test_fsdp_parity() missing 1 required positional argument: 'new'", True),
        ("TypeError: own() missing 2 required positional arguments: 'new' and 'old'", False),
        ("AttributeError: type object 'DTensor' has no attribute 'new'", True),
        ("AttributeError: 'torch._C._distributed_c10d.Work' object has no attribute 'new'", True),
        ("AttributeError: 'TestA' object has no attribute 'new'", False),
        ("AttributeError: type object 'FSDPTest' has no attribute 'new'", False),  # one of our own classes
        ("AttributeError: type object 'Own' has no attribute 'new'", False),
    ],
)
def test_a_file_of_pytorchs_outside_of_a_checkout_may_be_of_another_release(error, skipped, tmp_path):
    upstreams, users = tmp_path / "fsdp" / "test_a.py", tmp_path / "test_b.py"
    upstreams.parent.mkdir()
    upstreams.write_text('# Copyright\n# Owner(s): ["oncall: distributed"]\nimport torch\n' + IMPORTS)
    users.write_text("import torch\n")
    judge_of = Releases([upstreams, users])
    assert judge_of.notice == ""
    judged = judge_of.judged(failing_with(error))
    assert (judged.status is Status.SKIPPED) is skipped
    assert not skipped or judged.reason.startswith("needs another release of torch: ")
    of_the_user = replace(failing_with(error), test=replace(TEST, file="test_b.py"))
    assert judge_of.judged(of_the_user) is of_the_user


NAMES_CUDA = "AssertionError: Torch not compiled with CUDA enabled"
_LACKS = "NotImplementedError: The operator '{}' is not implemented for the device sim:0"


@pytest.mark.parametrize(
    ("error", "cuda_as_sim", "reason"),
    [
        (
            "AttributeError: module 'torch._C' has no attribute '_cuda_getDevice'",
            False,
            "needs a build of torch with torch._C._cuda_getDevice, which this one does not have",
        ),
        ("AttributeError: module 'torch._C' has no attribute '_compile'", False, ""),
        (NAMES_CUDA, False, "the test asks for CUDA or NCCL by name"),
        (NAMES_CUDA, True, ""),
        (NAMES_CUDA.replace("Assertion", "Value"), False, ""),  # another cause reports these words
        ("ModuleNotFoundError: No module named 'triton'", True, "needs Triton"),
        (_LACKS.format("symm_mem::memset32_"), True, "needs symmetric memory"),
        (_LACKS.format("aten::eig"), True, ""),
    ],
)
def test_features_missing_here_are_skips_with_a_reason(error, cuda_as_sim, reason):
    failed = failing_with(error)
    judged = Releases([], cuda_as_sim=cuda_as_sim).judged(failed)
    if reason:
        assert judged.status is Status.SKIPPED and judged.reason.startswith(reason)
        assert error != NAMES_CUDA or "--cuda-as-sim" in judged.reason
    else:
        assert judged is failed


def ranks_failing_with(*errors):
    outcomes = tuple(
        Outcome(rank, Ending.FAILED, 10, receipt=Receipt(RankStatus.FAILED, 0.0, error, transport=transport))
        for rank, (error, transport) in enumerate(errors)
    )
    return replace(FAILED, problems=(RanksFailed(WorldReport(outcomes, judge(outcomes), 0.1)),))


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Distributed package doesn't have NCCL built in",
        "RuntimeError: Invalid device, must be cuda device",
    ],
)
def test_torch_error_that_names_cuda_is_reported_unchanged(error):
    # The code that connects ranks, or C++, raises both, so they look like the end of a peer.
    closed = ("RuntimeError: Connection closed by peer", True)
    for errors in ([(error, True), (error, True)], [(error, True), closed]):
        assert "--cuda-as-sim" in Releases([]).judged(ranks_failing_with(*errors)).reason
    for others in ([closed, closed], [(error, True), ("ValueError: no", False)]):
        failed = ranks_failing_with(*others)
        assert Releases([]).judged(failed) is failed
