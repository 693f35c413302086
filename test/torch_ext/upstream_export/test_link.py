"""Definitions that go upstream with a change, and their text there: on trees of a few lines."""

import sys
import types

import pytest

from torch_ext.compat import lazy_names
from torch_ext.upstream.export.link import Linker
from torch_ext.upstream.export.lint import problems
from torch_ext.upstream.export.modules import Module, Tree
from torch_ext.upstream.export.targets import text_of

pytestmark = pytest.mark.processes  # ruff

OURS, THEIRS = "torch_ext.testing._internal", "torch.testing._internal"
COMMON = f"{OURS}.common_fsdp"
FRONT = f"from {OURS}._fsdp.rooms import *\n"


def tree(texts):
    return Tree(lambda name: Module(name, texts[name]) if name in texts else None)


def exported(file, ours, theirs):
    """Return the texts of upstream's files after the export of module ``file``, and the names that could not go."""
    mine = tree({**theirs, **ours})
    linker = Linker(mine, tree(theirs))
    linker.add_file(file)
    targets = [each for each in linker.targets.values() if each.whole or each.pieces]
    return {target.module: text_of(target, mine) for target in targets}, linker.problems


def suite(body, names="helper"):
    return {"test.distributed.test_a": f"from {COMMON} import {names}\n\n\n{body}\n"}


def helpers(rooms, theirs, body="helper()", names="helper", **more):
    """Return upstream's `common_fsdp`, which was ``theirs``, after the export of a suite that needs ``rooms`` of ours;
    ``more`` are other modules.
    """
    ours = {COMMON: FRONT, f"{OURS}._fsdp.rooms": rooms, **suite(body, names)}
    ours |= {name: text for name, text in more.items() if not name.startswith("torch.")}
    upstream = {f"{THEIRS}.common_fsdp": theirs} | {name: text for name, text in more.items() if name not in ours}
    files, found = exported("test.distributed.test_a", ours, upstream)
    assert found == []
    return files[f"{THEIRS}.common_fsdp"]


def test_a_suite_goes_whole_with_upstreams_imports_and_an_owner():
    files, found = exported(
        "test.distributed.test_a", suite("helper()"), {f"{THEIRS}.common_fsdp": "def helper(): ...\n"}
    )
    assert found == []
    assert files == {
        "test.distributed.test_a": '# Owner(s): ["oncall: distributed"]\n\n'
        f"from {THEIRS}.common_fsdp import helper\n\n\nhelper()\n"
    }


def test_missing_helper_is_exported_with_its_dependencies_alone():
    rooms = (
        "import os\nimport functools\n\n__all__ = ['helper', 'other', 'known']\n\n\n"
        "# Why it is two.\n_TWO = 2\n\n\n"
        "@functools.cache\ndef helper() -> int:\n    return known() + _TWO\n\n\n"
        "def known() -> int:\n    return 0\n\n\ndef other() -> str:\n    return os.sep\n"
    )
    assert helpers(rooms, "import os\n\n\ndef known():\n    return 1\n") == (
        "import functools\nimport os\n\n\ndef known():\n    return 1\n\n\n"
        "# Why it is two.\n_TWO = 2\n\n\n"
        "@functools.cache\ndef helper() -> int:\n    return known() + _TWO\n"
    )


def test_private_name_that_clashes_upstream_is_a_problem():
    rooms = "__all__ = ['helper']\n\n\ndef _do():\n    return 1\n\n\ndef helper():\n    return _do()\n"
    ours = {COMMON: FRONT, f"{OURS}._fsdp.rooms": rooms, **suite("helper()")}
    _, found = exported("test.distributed.test_a", ours, {f"{THEIRS}.common_fsdp": "def _do():\n    return 2\n"})
    assert found == [
        "testing/_internal/_fsdp/rooms.py: rename _do: torch/testing/_internal/common_fsdp.py has another of that name"
    ]


def test_a_method_that_upstreams_class_lacks_goes_into_that_class():
    rooms = (
        "__all__ = ['Base']\n\n\nclass Mixin:\n    def more(self):\n        return self.known()\n\n"
        "    def unused(self): ...\n\n\nclass Base(Mixin):\n    def known(self): ...\n"
    )
    theirs = "class Base:\n    def known(self):\n        return 1\n\n\nclass Next: ...\n"
    body = "class TestA(Base):\n    def test_it(self):\n        self.more()"
    assert helpers(rooms, theirs, body, "Base") == (
        "class Base:\n    def known(self):\n        return 1\n\n    def more(self):\n        return self.known()\n\n\n"
        "class Next: ...\n"
    )


def test_device_queries_become_upstreams_expressions():
    rooms = (
        "from torch_ext import accelerator\n"
        f"from {OURS}._fsdp import device\n\n__all__ = ['helper']\n\n\n"
        "def helper(device_type):\n    if device.is_accelerator() and accelerator.is_accelerator():\n"
        "        return device.device_type(), device_type\n"
    )
    ours = {
        f"{OURS}._fsdp": "",
        f"{OURS}._fsdp.device": "def is_accelerator(): ...\ndef device_type(): ...\n",
        "torch_ext.accelerator": "def is_accelerator(): ...\n",
    }
    text = helpers(rooms, "import torch\n\nDEVICE_TYPE = 'cpu'\n\n\ndef get_devtype(): ...\n", "helper(1)", **ours)
    assert '(get_devtype().type != "cpu") and torch.accelerator.is_available()' in text
    assert "return DEVICE_TYPE, device_type" in text


def test_private_names_of_torch_are_imported_from_where_they_are(monkeypatch):
    rooms = (
        "from torch_ext.compat import fsdp as private\n\n__all__ = ['helper']\n\n\n"
        "def helper():\n    return private.checkpoint, private.param_group.FSDPParamGroup\n"
    )
    compat = types.ModuleType("torch_ext.compat.fsdp")
    places = {
        "checkpoint": ("torch.gone:checkpoint", "torch.here:checkpoint"),
        "param_group": ("torch.distributed.fsdp:_group",),
    }
    vars(compat)["__getattr__"] = lazy_names(compat.__name__, places)
    monkeypatch.setitem(sys.modules, compat.__name__, compat)
    more = {compat.__name__: "", "torch.here": "def checkpoint(): ...\n"}
    text = helpers(rooms, "import torch\n", **more)
    assert "from torch.here import checkpoint\n" in text
    assert "from torch.distributed.fsdp import _group\n" in text
    assert "return checkpoint, _group.FSDPParamGroup" in text


def test_annotation_of_a_later_name_is_quoted():
    rooms = (
        "from __future__ import annotations\n\n__all__ = ['Helper']\n\n\n"
        "class Helper:\n    def copy(self, n: int) -> Helper:\n        return self\n"
    )
    assert 'def copy(self, n: int) -> "Helper":' in helpers(rooms, "import torch\n", "Helper()", "Helper")


def test_existing_file_gets_its_missing_tests_with_helpers_and_decorators_before_the_class():
    text = (
        "import os\n\n\ndef twice(test):\n    return test\n\n\ndef used():\n    return 1\n\n\n"
        "class TestA:\n    def test_old(self): ...\n\n"
        "    @twice\n    def test_new(self):\n        os.getpid(), used()\n"
    )
    theirs = {"test.distributed.test_a": "class TestA:\n    def test_old(self):\n        return 1\n"}
    files, found = exported("test.distributed.test_a", {"test.distributed.test_a": text}, theirs)
    assert found == []
    assert files["test.distributed.test_a"] == (
        "import os\n\n\ndef twice(test):\n    return test\n\n\n"
        "class TestA:\n    def test_old(self):\n        return 1\n\n"
        "    @twice\n    def test_new(self):\n        os.getpid(), used()\n\n\n"
        "def used():\n    return 1\n"
    )


def test_engine_is_not_exported_and_the_problem_gives_advice():
    ours = {
        f"{OURS}.common_distributed": "def ours_alone(): ...\n",
        f"{OURS}._distributed.skips": "def skip_rank(): ...\n",
    }
    theirs = {f"{THEIRS}.common_distributed": "def known(): ...\n"}
    for module in ours:
        assert "write against upstream's" in exported(module, ours, theirs)[1][0]
    assert (
        "compat never goes upstream" in exported("torch_ext.compat.fsdp", {"torch_ext.compat.fsdp": ""}, theirs)[1][0]
    )
    using = {"test.distributed.test_a": f"from {OURS}.common_distributed import ours_alone\n\nours_alone()\n"}
    (found,) = exported("test.distributed.test_a", {**ours, **using}, theirs)[1]
    assert found.startswith("test/distributed/test_a.py:3 uses ours_alone, which upstream lacks: ")


def test_lint_finds_new_faults_and_ignores_existing_ones():
    owned = '# Owner(s): ["oncall: distributed"]\n'
    assert problems({"test/test_a.py": owned + "x = 1\n"}, {}) == []
    for text, expected in {
        "x = 1\n": "no line # Owner(s)",
        owned + "x = 1 \n": "W291",
        owned + "x = 1": "W292",
        owned + "if True:\n\tx = 1\n": "W191",
        owned + "import torch_ext.world\n": "names this project",
        owned + "x = 'TORCH_EXT_DEVICE'\n": "names this project",
        owned + "def f():\n    return nothing\n": "F821",
        owned + "import os\n": "F401",
        owned + "def f(:\n": "invalid-syntax",
    }.items():
        assert any(expected in each for each in problems({"test/test_a.py": text}, {})), expected
    assert problems({"a.py": "import os\ny = 1\n"}, {"a.py": "import os\n"}) == []
    assert problems({"a.py": "y = 1 \nz = 1\n"}, {"a.py": "y = 1 \n"}) == []


def test_rules_of_the_checkout_apply():
    config = '[tool.ruff.lint]\nselect = ["T20"]\n'
    (found,) = problems({"a.py": "print(1)\n"}, {}, config)
    assert "T201" in found
    assert problems({"a.py": "import os\n"}, {}, config) == []
    # Settings of a later ruff: only the rules that this ruff knows count.
    (found,) = problems({"a.py": "import os\n"}, {}, "[tool.ruff]\nno-such-setting = 1\n")
    assert "F401" in found
