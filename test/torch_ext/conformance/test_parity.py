"""The tier ``parity``: programs agree with what is recorded, else with what they cite; a record is never changed."""

import json

import pytest

from test.torch_ext.conformance.test_command import conformance  # noqa: F401 (a fixture)
from test.torch_ext.interpreter import python
from torch_ext import accelerator
from torch_ext.conformance import parity
from torch_ext.conformance.forks import Status
from torch_ext.results import SetupError

PROGRAMS = """
import torch
from torch_ext.conformance.parity import program, raised

@program("the manual", {1: 2, 2: 4})
def double(gpu, number):
    return number * 2

@program("the manual", "ValueError: no: 3")
def refused(gpu):
    def call():
        raise ValueError("no: 3, give 4\\nmore")
    return raised(call)
"""
TIER = ("--device", "cpu", "--tier", "parity")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "some.py").write_text(PROGRAMS)
    return tmp_path / "programs"


def change(folder, old, new):
    path = folder / "some.py"
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.long
def test_expectations_hold_until_a_record_is_made_and_then_the_record(conformance, folder, tmp_path):  # noqa: F811
    of, page = (*TIER, "--programs", str(folder)), tmp_path / "page.md"
    code, text = conformance(*of, "--page", str(page))
    assert code == 0 and "(3 cases, 3 agree" in text and "Not recorded on a real device yet" in page.read_text()
    change(folder, "{1: 2, 2: 4}", "{1: 2, 2: 5}")
    code, text = conformance(*of)
    assert code == 1 and "parity::some.double::2  observes 4; by the manual: 5" in text
    code, text = conformance(*of, "--record", "--page", str(page))  # what a real device does, counts
    assert code == 0 and "(3 cases, 3 agree" in text, text
    assert "contradicts the cited source: `some.double::2`." in page.read_text() and "torch 2." in page.read_text()
    change(folder, "number * 2", "number * 3")  # other code: the record no longer counts
    code, text = conformance(*of, "--page", str(page))
    assert code == 1 and "observes 6; by the manual: 5" in text and "Not recorded: some.double." in page.read_text()
    change(folder, "number * 3", "number * 2")
    change(folder, "no: 3, give 4", "none")
    assert conformance(*of)[0] == 1
    record = folder / "recorded.json"
    record.write_text(record.read_text().replace('"2": 4', '"2": 6'))
    code, text = conformance(*of)
    assert code == 2 and "recorded.json is not as --record wrote it" in text


@pytest.mark.drawn(1)
@pytest.mark.parametrize("wrong", [("-k", "some*"), ("--tier", "ops"), ("--programs", "/nowhere")])
def test_a_wrong_use_of_record_is_a_usage_error(conformance, wrong):  # noqa: F811
    assert conformance(*TIER, "--record", *wrong)[0] == 2


def test_a_simulated_device_cannot_be_recorded(folder, monkeypatch):
    monkeypatch.setattr(accelerator, "is_simulated", lambda: True)
    body = parity.Body("cpu", parity.load(folder), parity.Record({}, {}))
    assert body.observe("machine", "machine") == (Status.REFUSED, "it is simulated")


@pytest.mark.parametrize("text", ["", "[]", '["digest", {}, {}]', "{}", "[1, 2, 3, 4]"])
def test_a_record_that_was_cut_is_an_error(tmp_path, text):
    (tmp_path / "recorded.json").write_text(text)
    with pytest.raises(SetupError, match="is not as --record wrote it"):
        parity.read(tmp_path)


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = parity.Record({"device": "H"}, {"a.b": {"code": "x", "observed": [1, None, "ü", 0.1]}})
    parity.write(tmp_path, record)
    assert parity.read(tmp_path) == record
    assert json.loads((tmp_path / "recorded.json").read_text())[0] == record.digest


@pytest.mark.parametrize(
    ("observed", "expected", "agree"),
    [
        ("ValueError: no, got 3", "ValueError: no.", True),
        ("ValueError: yes", "ValueError: no", False),
        ("TypeError: no", "ValueError: no", False),
        ("20 MiB and more", "20 MiB", False),
        ([1, "E", ["RuntimeError: a b"]], [1, "E", ["RuntimeError: a"]], True),
        ([1], [1, 2], False),
        (1, True, False),
        (0.5, 0.5, True),
    ],
)
def test_only_the_text_of_an_error_may_go_on(observed, expected, agree):
    assert parity.agrees(observed, expected) is agree


def test_texts_do_not_depend_on_the_device_or_the_process():
    assert parity.neutral("cuda:0 at 0x7f00 of /usr/lib/x.so, NCCL") == "DEVICE:0 at ADDRESS of PATH, BACKEND"
    assert parity.neutral("sim:0 at 0x8 of /opt/y.so, simccl") == parity.neutral("CUDA:0 at 0x9 of /a/b, nccl")
    assert parity.neutral('"addmm_cuda" and a simple and/or') == '"addmm_cuda" and a simple and/or'


def test_each_program_cites_a_source_and_has_cases():
    programs = parity.load(parity.PROGRAMS)
    assert sum(len(each.cases) for each in programs.values()) >= 200
    for name, each in programs.items():
        assert each.cases and ("/" in each.cites or "CUDA" in each.cites or "NCCL" in each.cites), name


@pytest.mark.costly
def test_the_simulated_device_differs_only_where_it_is_known_to():
    how = ("-m", "torch_ext", "conformance", "--device", "sim", "--tier", "parity")
    ran = python(*how)
    assert ran.returncode == 0 and " 0 differ, 0 crashed" in ran.stdout, ran.stdout + ran.stderr
    fault = python(*how, "-k", "allocator.allocated*", PYTORCH_ALLOC_CONF="roundup_power2_divisions:4")
    assert fault.returncode == 1 and "allocator.allocated_bytes_of_a_request::2097152 " not in fault.stdout
    assert "allocated_bytes_of_a_request::1048577  observes 1310720; by c10/cuda/CUDACaching" in fault.stdout
