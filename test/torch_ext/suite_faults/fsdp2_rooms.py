"""Where FSDP2's code is and where its suites are, for the tables of its mistakes."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import Fault, fault

__all__ = ["COMM", "CONTEXT", "GROUP", "INIT", "MODULE", "PARAM", "ROOM", "STATE", "SUITE", "of_group", "of_param"]

ROOM = "torch.distributed.fsdp._fully_shard"
COMM = f"{ROOM}._fsdp_collectives"
PARAM = f"{ROOM}._fsdp_param:FSDPParam"
GROUP = f"{ROOM}._fsdp_param_group:FSDPParamGroup"
CONTEXT = f"{ROOM}._fsdp_param_group:FSDPCommContext"
STATE = f"{ROOM}._fsdp_state:FSDPState"
MODULE = f"{ROOM}._fully_shard:FSDPModule"
INIT = f"{ROOM}._fsdp_init"

SUITE = "_composable.fsdp.test_fully_shard_"


def of_param(method: str, old: str, new: str, test: str, says: str, device: str = "cpu") -> Fault:
    """A mistake in a method of ``FSDPParam``."""
    return fault(f"{PARAM}.{method}", old, new, test, says, device)


def of_group(method: str, old: str, new: str, test: str, says: str, device: str = "cpu") -> Fault:
    """A mistake in a method of ``FSDPParamGroup``."""
    return fault(f"{GROUP}.{method}", old, new, test, says, device)
