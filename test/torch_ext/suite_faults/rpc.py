"""Mistakes that RPC could contain: in the barrier of workers, and in proxies of remote objects."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import fault

__all__ = ["MISTAKES"]

_BARRIER = "torch.distributed.rpc.api:_barrier"
_LIFECYCLE = "rpc.test_tensorpipe_agent:TensorPipeRpcLifecycleTest."
_PROXY = "torch.distributed.rpc.rref_proxy:_invoke_rpc"
_REFERENCES = "rpc.test_tensorpipe_agent:TensorPipeRRefTest."
_CALL = f"{_REFERENCES}test_time_limit_of_a_proxys_call"
_CREATION = f"{_REFERENCES}test_time_limit_of_a_proxy_holds_while_the_object_is_created"

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
    "proxy_calls_without_its_time_limit": fault(
        _PROXY,
        "            timeout=timeout,\n        )",
        "        )",
        _CALL,
        "nobody opened the gate",
    ),
    "proxy_creates_without_its_time_limit": fault(
        _PROXY,
        "            timeout=timeout,\n        )",
        "        )",
        "rpc.test_faulty_agent:FaultyFaultyAgentRpcTest.test_late_creation_through_a_proxy",
        "RuntimeError not raised",
    ),
    "proxy_asks_for_the_type_without_its_time_limit": fault(
        _PROXY,
        "rref._get_type(timeout=timeout, blocking=False)",
        "rref._get_type(blocking=False)",
        _CREATION,
        "nobody opened the gate",
    ),
    "proxy_without_a_time_limit_of_its_own_has_none": fault(
        _PROXY,
        "            timeout=timeout,\n        )",
        "            timeout=max(timeout, 0),\n        )",
        _CALL,
        "nobody opened the gate",
    ),
    "proxy_without_limit_takes_the_default": fault(
        _PROXY,
        "            timeout=timeout,\n        )",
        "            timeout=timeout or 0.05,\n        )",
        _CALL,
        "a limit of zero seconds ended a call",
    ),
    "asynchronous_proxy_swallows_a_failed_type": fault(
        _PROXY,
        "                _rref_type_cont(fut).then(_complete_op)\n            except BaseException as ex:\n"
        "                result.set_exception(ex)",
        "                _rref_type_cont(fut).then(_complete_op)\n            except BaseException as ex:\n"
        "                result.set_result(None)",
        _CREATION,
        "RuntimeError not raised",
    ),
}
