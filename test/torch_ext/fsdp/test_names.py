"""Every upstream name exists, and ``common_fsdp`` exports what its modules list."""

import importlib
import pkgutil
from collections import Counter

import pytest
import torch

from torch_ext.testing._internal import _fsdp

ON_USE = {"DEVICE_TYPE", "DEVICE_COUNT", "DISTRIBUTED_BACKEND"}  # no module lists them

same_release = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="a later release may have others")


def upstreams_names():
    """Yield ``(name, member)`` of what torch's own module defines; the member is None for the name itself."""
    upstream = importlib.import_module("torch.testing._internal.common_fsdp")
    yield from ((name, None) for name in ON_USE)
    for name, found in vars(upstream).items():
        if getattr(found, "__module__", None) == upstream.__name__:
            yield name, None
            members = vars(found) if isinstance(found, type) else ()
            yield from ((name, member) for member in members if not member.startswith(("__", "_abc_")))


@same_release
def test_every_name_of_upstreams_module_exists():
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    names = list(upstreams_names())
    assert len(names) > 100
    assert [
        (name, member)
        for name, member in names
        if not hasattr(common_fsdp, name) or (member and not hasattr(getattr(common_fsdp, name), member))
    ] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("CUDAInitMode", "DEVICEInitMode"),
        ("_maybe_cuda", "_move_to_device"),
        ("test_compiled_fsdp", "compiled_fsdp_test"),
    ],
)
def test_old_name_is_an_alias(old, new):
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    assert getattr(common_fsdp, old) is getattr(common_fsdp, new)


def test_old_mode_names_are_the_same_members():
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    for moment in ("BEFORE", "AFTER", "NEVER"):
        assert common_fsdp.CUDAInitMode[f"CUDA_{moment}"] is common_fsdp.DEVICEInitMode[f"DEVICE_{moment}"]
    assert len(common_fsdp.DEVICEInitMode) == 3


def exports():
    """Yield ``(module, name)`` of everything that the modules behind ``common_fsdp`` list in ``__all__``."""
    for found in pkgutil.walk_packages(_fsdp.__path__, f"{_fsdp.__name__}."):
        # A package's __init__ lists the names of its modules.
        if not found.name.startswith(f"{_fsdp.__name__}.extensions."):
            module = importlib.import_module(found.name)
            yield from ((module, name) for name in getattr(module, "__all__", ()))


def test_front_door_exports_what_every_module_lists():
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    listed = list(exports())
    assert {"FSDPTest", "MLP", "module_trees", "patch_reshard"} <= {name for _, name in listed}
    missing = [name for module, name in listed if vars(common_fsdp).get(name) is not getattr(module, name)]
    assert missing == []


def test_no_two_modules_export_one_name():
    counts = Counter(name for _, name in exports())
    assert {name for name, count in counts.items() if count > 1} == set()


@same_release
def test_upstreams_names_are_exported():
    assert {name for name, _ in upstreams_names()} - ON_USE - {name for _, name in exports()} == set()


def test_process_cases_share_one_run():
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    runs = {
        cls._run.__func__ for cls in (common_fsdp.FSDPTest, common_fsdp.FSDPTestContinuous, common_fsdp.FSDPTestMixin)
    }
    assert len(runs) == 1
