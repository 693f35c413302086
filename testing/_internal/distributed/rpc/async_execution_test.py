"""``rpc.functions.async_execution``: a callee that returns a future frees a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from torch_ext.testing._internal.dist_utils import dist_init
from torch_ext.testing._internal.distributed.rpc import _remote_functions as remote
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)

# torch's decorator, with annotations.
async_execution: Callable[[Any], Any] = rpc.functions.async_execution


@async_execution
def add_elsewhere(to: str, a: Tensor, b: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, torch.add, args=(a, b))


@async_execution
def add_elsewhere_then(to: str, a: Tensor, b: Tensor, c: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, torch.add, args=(a, b)).then(lambda done: done.wait() + c)


@async_execution
def add_through_two(first: str, second: str, a: Tensor, b: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(first, add_elsewhere, args=(second, a, b))


@async_execution
def sum_from_many(to: str, tensor: Tensor, times: int) -> Future[Tensor]:
    futures = [rpc.rpc_async(to, torch.mul, args=(tensor, i)) for i in range(times)]
    return torch.futures.collect_all(futures).then(
        lambda all_: sum(f.wait() for f in all_.wait())
    )


@async_execution
def promise(result: Any) -> Future[Any]:
    future: Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


@async_execution
def promise_that_fails(to: str) -> Future[Any]:
    return rpc.rpc_async(to, remote.my_name).then(
        lambda done: remote.raise_value_error(f"raised after {done.wait()}")
    )


@async_execution
def raise_at_once() -> Future[Any]:
    raise ValueError("raised before there was a future")


@async_execution
def no_future() -> int:
    return 1


class Methods:
    of_no_one = staticmethod(add_elsewhere)

    @classmethod
    @async_execution
    def of_the_class(cls, to: str, a: Tensor, b: Tensor) -> Future[Tensor]:
        return rpc.rpc_async(to, torch.add, args=(a, b))

    @async_execution
    def of_the_object(self, to: str, a: Tensor, b: Tensor) -> Future[Tensor]:
        return rpc.rpc_async(to, torch.add, args=(a, b))


_waiting: list[Future[str]] = []


@async_execution
def wait_for_release() -> Future[str]:
    future: Future[str] = torch.futures.Future()
    _waiting.append(future)
    return future


def count_waiting() -> int:
    return len(_waiting)


def release_all() -> None:
    while _waiting:
        _waiting.pop().set_result("released")


class AsyncExecutionTest(RpcAgentTestFixture):
    """Every worker calls the next one, which passes the work on to the next."""

    world_size = 3

    @dist_init
    def test_result_of_the_future_is_the_answer(self) -> None:
        one, two = torch.ones(2), torch.full((2,), 2.0)
        second, third = self.peer(2), self.peer(3)
        self.check_call(one + two, add_elsewhere, second, one, two)
        self.check_call(one + 2 * two, add_elsewhere_then, second, one, two, two)
        self.check_call(one + two, add_through_two, second, third, one, two)
        self.check_call(one * 10, sum_from_many, second, one, 5)
        self.check_call(("anything", one), promise, ("anything", one))

    @dist_init
    def test_methods_of_every_kind(self) -> None:
        args = (self.peer(2), torch.ones(2), torch.ones(2))
        bound = Methods().of_the_object
        for method in (Methods.of_no_one, Methods.of_the_class, bound):
            self.check_call(torch.full((2,), 2.0), method, *args)

    @dist_init
    def test_method_through_an_rref(self) -> None:
        rref = rpc.remote(self.peer(), Methods)
        args, two = (self.peer(2), torch.ones(2), torch.ones(2)), torch.full((2,), 2.0)
        self.assertEqual(rref.rpc_sync().of_the_object(*args), two)
        self.assertEqual(rref.rpc_async().of_the_class(*args).wait(), two)
        self.assertEqual(rref.remote().of_no_one(*args).to_here(), two)

    @dist_init
    def test_errors_before_and_after_the_future(self) -> None:
        before, after = "raised before there was a future", self.peer(2)
        self.check_call_raises(ValueError, before, raise_at_once)
        why = f"raised after {after}"
        self.check_call_raises(Exception, why, promise_that_fails, after)

    @dist_init
    def test_function_that_returns_no_future_is_an_error(self) -> None:
        why = "must return a torch.futures.Future"
        self.check_call_raises(RuntimeError, why, no_future)

    @dist_init
    def test_waiting_calls_hold_no_thread_of_the_callee(self) -> None:
        count = 3 * rpc.constants.DEFAULT_NUM_WORKER_THREADS
        futures = [rpc.rpc_async(self.peer(), wait_for_release) for _ in range(count)]
        # A call is answered only while a thread is free.
        while self.call(count_waiting) < count:
            pass
        self.assertFalse(any(future.done() for future in futures))
        self.call(release_all)
        self.assertEqual([future.wait() for future in futures], ["released"] * count)
        self.assertEqual(self.call(remote.my_name), self.peer())
