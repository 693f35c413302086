"""Every upstream name exists, and ``common_fsdp`` exports what its modules list."""

import importlib
import pkgutil

import pytest
import torch

from torch_ext.testing._internal import _fsdp, common_fsdp

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
    names = list(upstreams_names())
    assert len(names) > 100
    assert [
        (name, member)
        for name, member in names
        if not hasattr(common_fsdp, name) or (member and not hasattr(getattr(common_fsdp, name), member))
    ] == []


def test_old_names_are_aliases():
    assert common_fsdp.CUDAInitMode is common_fsdp.DEVICEInitMode
    assert common_fsdp._maybe_cuda is common_fsdp._move_to_device
    assert common_fsdp.test_compiled_fsdp is common_fsdp.compiled_fsdp_test
    for moment in ("BEFORE", "AFTER", "NEVER"):
        assert common_fsdp.CUDAInitMode[f"CUDA_{moment}"] is common_fsdp.DEVICEInitMode[f"DEVICE_{moment}"]
    assert len(common_fsdp.DEVICEInitMode) == 3


def exports():
    for found in pkgutil.walk_packages(_fsdp.__path__, f"{_fsdp.__name__}."):
        module = importlib.import_module(found.name)
        yield from ((module, name) for name in getattr(module, "__all__", ()))


def test_front_door_exports_the_names_of_every_module():
    listed = list(exports())
    assert {"FSDPTest", "MLP", "module_trees", "patch_reshard"} <= {name for _, name in listed}
    missing = [name for module, name in listed if vars(common_fsdp).get(name) is not getattr(module, name)]
    assert missing == []
