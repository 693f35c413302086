"""Every upstream name exists, and ``common_fsdp`` exports what its modules list."""

import importlib
import pkgutil

from torch_ext.testing._internal import _fsdp, common_fsdp


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
