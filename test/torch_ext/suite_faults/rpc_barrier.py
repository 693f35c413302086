"""Mistakes that the barrier of RPC workers could contain."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import fault

__all__ = ["MISTAKES"]

_BARRIER = "torch.distributed.rpc.api:_barrier"
_LIFECYCLE = "rpc.test_tensorpipe_agent:TensorPipeRpcLifecycleTest."

MISTAKES = {
    "barrier_of_workers_waits_for_nobody": fault(
        _BARRIER,
        "_all_gather(None, set(worker_names))",
        "set(worker_names)",
        f"{_LIFECYCLE}test_nobody_passes_a_barrier_before_the_last_has_come",
        r"ranks that had come when worker \d passed barrier 0",
    ),
    "barrier_of_workers_waits_for_the_first_two": fault(
        _BARRIER,
        "_all_gather(None, set(worker_names))",
        'if get_worker_info().id < 2:\n            _all_gather(None, {"worker0", "worker1"})',
        f"{_LIFECYCLE}test_nobody_passes_a_barrier_before_the_last_has_come",
        r"ranks that had come when worker \d passed barrier",
    ),
}
