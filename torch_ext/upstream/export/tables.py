"""Tables of the export: upstream's expressions for our helpers, stand-ins, and modules that never go upstream."""

from __future__ import annotations

_FSDP = "torch.testing._internal.common_fsdp"
_OURS = "torch_ext.testing._internal"
_TYPE = '(torch.accelerator.current_accelerator() or torch.device("cpu")).type'
_DEVICE, _ACCELERATOR = f"{_OURS}._fsdp.device", "torch_ext.accelerator"

# By the place where the name is defined: upstream's expression, in which "{0}" is the first argument of a call, and
# the "module:name" that it needs.
EXPRESSIONS: dict[str, tuple[str, str]] = {
    f"{_DEVICE}.device_type()": ("DEVICE_TYPE", f"{_FSDP}:DEVICE_TYPE"),
    f"{_DEVICE}.device_count()": ("DEVICE_COUNT", f"{_FSDP}:DEVICE_COUNT"),
    f"{_DEVICE}.distributed_backend()": ("DISTRIBUTED_BACKEND", f"{_FSDP}:DISTRIBUTED_BACKEND"),
    f"{_DEVICE}.is_accelerator()": ('(get_devtype().type != "cpu")', f"{_FSDP}:get_devtype"),
    f"{_ACCELERATOR}.HOST": ('"cpu"', ""),
    f"{_ACCELERATOR}.is_accelerator()": ("torch.accelerator.is_available()", "torch"),
    f"{_ACCELERATOR}.device_type()": (_TYPE, "torch"),
    f"{_ACCELERATOR}.device_count()": ("max(torch.accelerator.device_count(), 1)", "torch"),
    f"{_ACCELERATOR}.backend()": (f"torch.distributed.get_default_backend_for_device({_TYPE})", "torch"),
    f"{_ACCELERATOR}.current_device()": (f"torch.device({_TYPE}, {{0}})", "torch"),
    f"{_ACCELERATOR}.set_device_index()": ("torch.accelerator.set_device_index({0})", "torch"),
    f"{_ACCELERATOR}.can_sleep()": ('hasattr(torch.get_device_module(), "_sleep")', "torch"),
}

# Files that go in place of ours, which need the engine.
STAND_INS = {"testing/_internal/hypothesis_utils.py": "torch_ext/upstream/export/stand_ins.py"}

# Modules that stay here, and advice; the first that fits counts.
ADVICE: dict[str, str] = {
    f"{_OURS}._distributed": "the engine's half of common_distributed stays here: write against upstream's "
    "common_distributed, or change upstream's file by hand in a separate patch",
    f"{_OURS}.common_distributed": "common_distributed is the engine here and never goes upstream: write against "
    "upstream's names, or change upstream's file by hand in a separate patch",
    f"{_OURS}.common_utils": "common_utils is the runner's front door here and never goes upstream: use upstream's "
    "names",
    _OURS: "",
    "torch_ext.testing.fsdp_extension_contract": "a front door for users of this project: export the names that it "
    "re-exports, from testing/_internal/_fsdp/extension_contract.py",
    "torch_ext.compat": "compat never goes upstream, which imports torch's names from where they are: the export "
    "rewrites uses of it",
    "torch_ext": "the engine stays here: only tests and the helpers below testing/_internal go upstream",
}


def advice_for(module: str) -> str:
    """Return why ``module`` stays here and what to do instead; empty if it may go upstream.

    >>> advice_for("torch_ext.world.tree").split(":")[0]
    'the engine stays here'
    >>> advice_for("torch_ext.testing._internal._fsdp.cases")
    ''
    """
    return next((advice for prefix, advice in ADVICE.items() if f"{module}.".startswith(f"{prefix}.")), "")
