"""How upstream says what our helpers say in their own words: expressions, stand-ins, and what never goes upstream."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ADVICE", "EXPRESSIONS", "MEMBERS", "STAND_INS", "Expression", "advice_for"]

_FSDP = "torch.testing._internal.common_fsdp"
_OURS = "torch_ext.testing._internal"


@dataclass(frozen=True)
class Expression:
    """What upstream writes for a call of ours. ``{0}`` is the call's first argument.

    Attributes:
        text: the expression.
        names: what it needs, each as ``module:name``.
    """

    text: str
    names: tuple[str, ...] = ()


_DEVICE = Expression("DEVICE_TYPE", (f"{_FSDP}:DEVICE_TYPE",))
_TORCH = ("torch:",)

# By where the function that is called is defined. A value that is not called has no "()".
EXPRESSIONS: dict[str, Expression] = {
    f"{_OURS}._fsdp.device.device_type()": _DEVICE,
    f"{_OURS}._fsdp.device.device_count()": Expression("DEVICE_COUNT", (f"{_FSDP}:DEVICE_COUNT",)),
    f"{_OURS}._fsdp.device.distributed_backend()": Expression("DISTRIBUTED_BACKEND", (f"{_FSDP}:DISTRIBUTED_BACKEND",)),
    f"{_OURS}._fsdp.device.is_accelerator()": Expression('(get_devtype().type != "cpu")', (f"{_FSDP}:get_devtype",)),
    "torch_ext.accelerator.HOST": Expression('"cpu"'),
    "torch_ext.accelerator.is_accelerator()": Expression("torch.accelerator.is_available()", _TORCH),
    "torch_ext.accelerator.device_type()": Expression(
        '(torch.accelerator.current_accelerator() or torch.device("cpu")).type', _TORCH
    ),
    "torch_ext.accelerator.device_count()": Expression("max(torch.accelerator.device_count(), 1)", _TORCH),
    "torch_ext.accelerator.backend()": Expression(
        "torch.distributed.get_default_backend_for_device("
        '(torch.accelerator.current_accelerator() or torch.device("cpu")).type)',
        _TORCH,
    ),
    "torch_ext.accelerator.current_device()": Expression(
        'torch.device((torch.accelerator.current_accelerator() or torch.device("cpu")).type, {0})', _TORCH
    ),
    "torch_ext.accelerator.set_device_index()": Expression("torch.accelerator.set_device_index({0})", _TORCH),
    "torch_ext.accelerator.capabilities().device_sleep": Expression(
        'hasattr(torch.get_device_module(), "_sleep")', _TORCH
    ),
}

_STAND_INS = "torch_ext.upstream.export.stand_ins"

# Where ours is made of the engine: a definition in its place, of the module on the right.
STAND_INS: dict[str, str] = {
    f"{_OURS}.hypothesis_utils.across_ranks": f"{_STAND_INS}:across_ranks",
}

# The same for a method that upstream's class of the same name does not have.
MEMBERS: dict[str, str] = {
    "skip_check": f"{_STAND_INS}:Subtests",
}

# What stays here, by module, and what to do instead.
ADVICE: dict[str, str] = {
    f"{_OURS}._distributed": "the engine's half of common_distributed stays here: write against upstream's "
    "common_distributed, or change upstream's file by hand in a patch of its own",
    f"{_OURS}.common_distributed": "common_distributed is the engine here and never goes upstream: write against "
    "upstream's names, or change upstream's file by hand in a patch of its own",
    f"{_OURS}.common_utils": "common_utils is the runner's front door here and never goes upstream: use upstream's "
    "names",
    f"{_OURS}.hypothesis_utils": "hypothesis_utils is made of the engine, all but across_ranks(), which has a stand-in",
    "torch_ext.testing.fsdp_extension_contract": "a front door for users of this project: export the names that it "
    "re-exports, from testing/_internal/_fsdp/extensions",
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
    for prefix, advice in ADVICE.items():
        if module == prefix or module.startswith(f"{prefix}."):
            goes = module.startswith(f"{_OURS}.") and prefix == "torch_ext"
            return "" if goes else advice
    return ""
