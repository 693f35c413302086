"""Every name of our helpers, compared with upstream's."""

import json

from test.torch_ext.upstream_export.checkouts import repository
from torch_ext.upstream import drift
from torch_ext.upstream.drift import Entry, compare, main
from torch_ext.upstream.export.modules import Module, Tree

_DDP = "distributed.ddp_under_dist_autograd_test"
# Internals of upstream's harness, which ours does another way.
_ENGINE = {
    "Event",
    "_event_listener",
    "_get_timedout_process_traceback",
    "_processes_spawned",
    "_start_processes",
    "_worker_loop",
    "setUpClass",
}


# Signatures that accept more than upstream's, name arguments that upstream takes as *args, or belong to the harness.
_OTHER_SIGNATURES = {
    "NonUniformReqGradNWM.__init__", "_check_return_codes", "_join_threads", "forward", "get_cycles_per_ms",
    "initialize_pg", "run_subtests", "wait_until_node_failure",
}  # fmt: skip


def trees(ours, theirs):
    mine = {f"torch_ext.testing._internal.{name}": text for name, text in ours.items()}
    upstream = {f"torch.testing._internal.{name}": text for name, text in theirs.items()}
    either = {**mine, **upstream}
    return (
        Tree(lambda name: Module(name, either[name]) if name in either else None),
        Tree(lambda name: Module(name, upstream[name]) if name in upstream else None),
    )


def statuses(ours, theirs, **more):
    mine, upstream = trees({"common": ours, **more}, {"common": theirs})
    return {entry.name: entry.status for entry in compare("common", mine, upstream)}


def test_names_of_one_side_and_of_both():
    assert statuses("def f(a): ...\ndef ours(): ...", "def f(b): ...\ndef theirs(): ...") == {
        "f": "changed",
        "ours": "new",
        "theirs": "missing",
    }
    assert statuses("def f(a: int = 1): ...", "def f(a=2): ...") == {"f": "same"}
    assert statuses("A = 1", "A = 2") == {"A": "same"}


def test_a_name_behind_a_front_door_is_found():
    front = "from torch_ext.testing._internal._rooms import *\nfrom torch_ext.testing._internal._rooms import _p as q"
    rooms = "__all__ = ['f']\ndef f(a): ...\ndef _p(): ...\ndef hidden(): ..."
    assert statuses(front, "def f(a): ...\ndef q(): ...\ndef hidden(): ...", _rooms=rooms) == {
        "f": "same",
        "q": "same",
        "hidden": "missing",
    }


def test_a_lookup_that_ends_at_upstreams_module_misses_nothing():
    lookup = "def __getattr__(name):\n    return getattr(upstream_module('common'), name)"
    assert statuses(lookup, "def f(): ...") == {"f": "through"}
    assert statuses("def __getattr__(name):\n    raise AttributeError(name)", "def f(): ...") == {"f": "missing"}


def test_members_are_compared_except_those_of_a_common_base():
    theirs = (
        "class Base:\n    def inherited(self): ...\nclass C(Base):\n    def m(self, a): ...\n    def gone(self): ..."
    )
    ours = (
        "from torch.testing._internal.common import Base\n"
        "class Mixin:\n    def more(self): ...\n"
        "class C(Mixin, Base):\n    @classmethod\n    def m(cls, a): ..."
    )
    assert statuses(ours, theirs) == {
        "Base": "same",
        "C": "same",
        "C.m": "same",
        "C.gone": "missing",
        "C.more": "new",
        "Mixin": "new",
    }


def test_an_annotation_for_type_checkers_is_no_member():
    ours = "class C:\n    if TYPE_CHECKING:\n        m: int"
    assert statuses(ours, "class C:\n    def m(self): ...") == {"C": "same", "C.m": "missing"}


def test_we_have_every_name_and_signature_of_the_installed_fsdp_distributed_and_ddp_helpers():
    """RPC looks up several names of the DDP suite."""
    entries = drift.drift()
    assert {entry.status for entry in entries} >= {"same", "changed", "through", "new"}
    assert Entry(_DDP, "RemoteNet.forward", "same") in entries
    missing = [
        f"{entry.module}: {entry.name}"
        for entry in entries
        if entry.status == "missing" and (entry.module == _DDP or not entry.module.startswith("distributed."))
    ]
    assert [each for each in missing if each.rpartition(".")[2] not in _ENGINE] == []
    changed = {entry.name for entry in entries if entry.status == "changed"}
    assert {name for name in changed if not _OTHER_SIGNATURES & {name, name.rpartition(".")[2]}} == set()


def test_command_prints_the_differences(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "common_fsdp: " in shown
    assert "  new     StepLog" in shown
    assert main(["--json"]) == 0
    entries = [Entry(**each) for each in json.loads(capsys.readouterr().out)]
    assert Entry("common_fsdp", "MLP", "same") in entries


def test_a_checkout_is_read_at_its_head(tmp_path, capsys):
    name = "torch/testing/_internal/dist_utils.py"
    repository(tmp_path, {name: "def worker_name(rank): ...\ndef brand_new(): ...\n"})
    (tmp_path / name).write_text("")  # not committed
    assert main(["--against", str(tmp_path)]) == 0
    assert "  missing brand_new" in capsys.readouterr().out
    assert main(["--against", str(tmp_path / "torch" / "nothing")]) == 2
    assert "nothing is no git checkout with a commit" in capsys.readouterr().err
