"""Distributed autograd: gradients through RPC, their contexts, errors in backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

from torch_ext import accelerator
from torch_ext.compat import dist_autograd
from torch_ext.compat import rpc as private
from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.dist_utils import (
    dist_init,
    initialize_pg,
    poll_until,
    start_worker,
    wait_until_node_failure,
    worker_name,
)
from torch_ext.testing._internal.distributed.rpc import _remote_functions as remote
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    CALL_MODES,
    RpcAgentTestFixture,
)

multiply = remote.multiply
_leaf = torch.zeros(3)


def multiply_by_own_leaf(a: Tensor) -> Tensor:
    """Multiply by a tensor that only this worker has."""
    return a * _leaf


def make_leaf(value: float) -> None:
    global _leaf
    _leaf = torch.full((3,), value, requires_grad=True)


def gradient_of_leaf(context_id: int) -> Tensor:
    return dist_autograd.get_gradients(context_id)[_leaf]


def multiply_rref(rref: rpc.RRef[Tensor], b: Tensor) -> Tensor:
    return rref.to_here() * b


def make_parameter(values: list[float]) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def wait_until_forgotten(workers: Iterable[str], context_id: int) -> None:
    """Wait until none of ``workers`` has the context any more."""
    for worker in workers:
        poll_until(
            lambda: not rpc.rpc_sync(worker, remote.knows_context, args=(context_id,)),  # noqa: B023  # called at once
            f"{worker} still has the context",
        )


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError("this backward always fails")


def several_outputs(a: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    return a * 2, [a * 3, a.detach()], torch.arange(3)


def embed(weight: rpc.RRef[nn.EmbeddingBag], rows: Tensor) -> Tensor:
    return weight.local_value()(rows, torch.tensor([0]))


class DistAutogradTest(RpcAgentTestFixture):
    """Every worker sends work to the next. The reference is plain local autograd."""

    world_size = 3

    def _leaves(self, count: int = 2) -> list[Tensor]:
        seeded = torch.Generator().manual_seed(self.rank)
        return [torch.rand(3, generator=seeded).requires_grad_() for _ in range(count)]

    def _assert_gradients(
        self, context_id: int, loss: Tensor, expected: dict[Tensor, Tensor]
    ) -> None:
        dist_autograd.backward(context_id, [loss])
        got = dist_autograd.get_gradients(context_id)
        self.assertEqual(len(got), len(expected))
        for leaf, grad in expected.items():
            self.assertEqual(got[leaf], grad)
            self.assertIsNone(leaf.grad, "a distributed gradient went to .grad as well")

    def _check(
        self, output: Callable[[], Tensor], expected: dict[Tensor, Tensor]
    ) -> None:
        """Check the gradients of the sum of ``output()``, in a context."""
        with dist_autograd.context() as context_id:
            self._assert_gradients(context_id, output().sum(), expected)

    # Contexts.

    @dist_init
    def test_contexts_are_unique_and_end_with_their_block(self) -> None:
        ids = set()
        for _ in range(5):
            with dist_autograd.context() as context_id:
                current = dist_autograd.current_context()._context_id()
                self.assertEqual((current, context_id >> 48), (context_id, self.rank))
                ids.add(context_id)
            self.assertFalse(remote.knows_context(context_id))
        self.assertEqual(len(ids), 5)

    @dist_init
    def test_contexts_do_not_nest(self) -> None:
        with dist_autograd.context():
            nested = dist_autograd.context()
            with self.assertRaisesRegex(RuntimeError, "Already have an autograd"):
                nested.__enter__()

    @dist_init
    def test_context_belongs_to_its_thread(self) -> None:
        with dist_autograd.context(), ThreadPoolExecutor(1) as other:
            with self.assertRaises(RuntimeError):
                other.submit(dist_autograd.current_context).result()
            dist_autograd.current_context()

    @dist_init
    def test_context_is_recorded_where_calls_went_and_cleaned_up_there(self) -> None:
        a, b = self._leaves()
        with dist_autograd.context() as context_id:
            self.call(remote.relay, multiply, (a, b), 1, self.world_size)
            known = dist_autograd.current_context()._known_worker_ids()
            self.assertEqual(known, {rpc.get_worker_info(self.peer()).id})
            others = (self.peer(1), self.peer(2))
            for to in others:
                self.assertTrue(self.call(remote.knows_context, context_id, to=to))
        wait_until_forgotten(others, context_id)

    @dist_init
    def test_call_without_tensors_that_need_gradients_records_nothing(self) -> None:
        with dist_autograd.context():
            for mode in CALL_MODES:
                self.call(multiply, torch.ones(2), torch.ones(2), mode=mode)
            context = dist_autograd.current_context()
            self.assertEqual(context._send_functions(), {})
            self.assertEqual(context._recv_functions(), {})

    @dist_init
    def test_call_records_one_send_and_one_receive(self) -> None:
        a, b = self._leaves()
        with dist_autograd.context():
            product = self.call(multiply, a, b)
            context = dist_autograd.current_context()
            (send,) = context._send_functions().values()
            self.assertEqual(len(context._recv_functions()), 1)
            # One edge for each tensor that needs a gradient.
            self.assertEqual(len(send.next_functions), 2)
            self.assertRegex(product.grad_fn.name(), "::RecvRpcBackward$")
            self.assertTrue(product.requires_grad)

    @dist_init
    def test_no_graph_across_calls_outside_a_context(self) -> None:
        self.assertIsNone(self.call(torch.mul, *self._leaves()).grad_fn)

    # Gradients.

    @dist_init
    def test_gradients_in_every_mode(self) -> None:
        a, b = self._leaves()
        wanted = {a: b.detach(), b: a.detach()}
        peers, functions = (self.peer(), self.peer(0)), (torch.mul, multiply)
        for mode, to, multiplies in itertools.product(CALL_MODES, peers, functions):
            with self.subTest(f"{mode} {to} {multiplies}"):
                output = partial(self.call, multiplies, a, b, to=to, mode=mode)
                self._check(output, wanted)

    @dist_init
    def test_gradient_goes_only_to_tensors_that_require_it(self) -> None:
        (a,), constant = self._leaves(1), torch.full((3,), 5.0)
        for mode in CALL_MODES:
            with self.subTest(mode):
                output = partial(self.call, multiply, a, constant, mode=mode)
                self._check(output, {a: constant})

    @dist_init
    def test_leaf_on_the_callee_gets_its_gradient_there(self) -> None:
        make_leaf(self.rank + 2.0)
        private.barrier({worker_name(rank) for rank in range(self.world_size)})
        (a,) = self._leaves(1)
        with dist_autograd.context() as context_id:
            product = self.call(multiply_by_own_leaf, a)
            factor = torch.full((3,), (self.rank + 1) % self.world_size + 2.0)
            self._assert_gradients(context_id, product.sum(), {a: factor})
            self.assertEqual(self.call(gradient_of_leaf, context_id), a.detach())

    @dist_init
    def test_gradients_through_nested_calls(self) -> None:
        a, b = self._leaves()
        args = (remote.relay, multiply, (a, b), 4, self.world_size)
        self._check(partial(self.call, *args), {a: b.detach(), b: a.detach()})

    @dist_init
    def test_gradients_through_several_round_trips(self) -> None:
        a, b, c = self._leaves(3)

        def output() -> Tensor:
            first = self.call(multiply, a, b)
            second = self.call(multiply, first, c, to=self.peer(2)) + a
            return self.call(multiply, second, b)

        grads = torch.autograd.grad((((a * b) * c + a) * b).sum(), (a, b, c))
        self._check(output, dict(zip((a, b, c), grads, strict=True)))

    @dist_init
    def test_gradients_through_rrefs(self) -> None:
        (b,) = self._leaves(1)
        rref = rpc.remote(self.peer(), make_parameter, args=([1.0, 2.0, 3.0],))
        a = torch.tensor([1.0, 2.0, 3.0])
        for to in (self.peer(), self.peer(2), worker_name(self.rank)):
            with self.subTest(to), dist_autograd.context() as context_id:
                product = rpc.rpc_sync(to, multiply_rref, args=(rref, b))
                self._assert_gradients(context_id, product.sum(), {b: a})
                grads = self.call(remote.gradients_of, rref, context_id)
                self.assertEqual(grads, [b.detach()])

    @dist_init
    def test_backward_from_an_rref(self) -> None:
        a, b = self._leaves()
        with dist_autograd.context() as context_id:
            rref: Any = rpc.RRef(self.call(multiply, a, b).sum())
            rref.backward(context_id)
            self.assertEqual(dist_autograd.get_gradients(context_id)[a], b.detach())
        no_tensor: Any = rpc.RRef("no tensor")
        with self.assertRaisesRegex(RuntimeError, "should contain a tensor|scalar"):
            no_tensor.backward()

    @dist_init
    def test_unused_outputs_and_outputs_without_gradient(self) -> None:
        (a,) = self._leaves(1)
        with dist_autograd.context() as context_id:
            twice, (thrice, detached), indices = self.call(several_outputs, a)
            outputs = (twice, thrice, detached, indices)
            need_grad = [output.requires_grad for output in outputs]
            self.assertEqual(need_grad, [True, True, False, False])
            self._assert_gradients(context_id, thrice.sum(), {a: torch.full((3,), 3.0)})

    @dist_init
    def test_several_roots(self) -> None:
        a, b = self._leaves()
        with dist_autograd.context() as context_id:
            outputs = [self.call(multiply, a, b, mode=mode) for mode in CALL_MODES]
            dist_autograd.backward(context_id, [output.sum() for output in outputs])
            grad = dist_autograd.get_gradients(context_id)[a]
            self.assertEqual(grad, len(outputs) * b.detach())

    @dist_init
    def test_gradients_of_one_context_accumulate_and_of_two_do_not(self) -> None:
        a, b = self._leaves()
        for _ in range(2):
            with dist_autograd.context() as context_id:
                loss = self.call(multiply, a, b).sum()
                for times in (1, 2, 3):
                    dist_autograd.backward(context_id, [loss], retain_graph=True)
                    grad = dist_autograd.get_gradients(context_id)[a]
                    self.assertEqual(grad, times * b.detach())

    @dist_init
    def test_local_gradients_stay_apart(self) -> None:
        a, b = self._leaves()
        (a * b).sum().backward()
        before = a.grad.clone() if a.grad is not None else None
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [self.call(multiply, a, a).sum()])
            self.assertEqual(dist_autograd.get_gradients(context_id)[a], 2 * a.detach())
        self.assertEqual(a.grad, before)

    @dist_init
    def test_sparse_gradients_of_a_remote_embedding(self) -> None:
        options = {"mode": "sum", "sparse": True}
        rref = rpc.remote(self.peer(), nn.EmbeddingBag, args=(4, 2), kwargs=options)
        with dist_autograd.context() as context_id:
            loss = self.call(embed, rref, torch.tensor([1, 3, 3])).sum()
            dist_autograd.backward(context_id, [loss])
            (grad,) = self.call(remote.gradients_of, rref, context_id)
        self.assertTrue(grad.is_sparse)
        uses = torch.tensor([[0.0], [1.0], [0.0], [2.0]])
        self.assertEqual(grad.to_dense(), uses.expand(4, 2))

    @dist_init
    def test_hooks_on_both_sides_of_a_call_run(self) -> None:
        a, b = self._leaves()
        a.register_hook(lambda grad: grad * 10)
        with dist_autograd.context() as context_id:
            product = self.call(multiply, a, b)
            product.register_hook(lambda grad: grad + 1)
            wanted = {a: 20 * b.detach(), b: 2 * a.detach()}
            self._assert_gradients(context_id, product.sum(), wanted)

    @dist_init
    def test_threads_train_in_their_own_contexts(self) -> None:
        def train(key: int) -> Tensor:
            a = torch.full((3,), 1.0, requires_grad=True)
            with dist_autograd.context() as context_id:
                product = self.call(multiply, a, torch.full((3,), float(key)))
                dist_autograd.backward(context_id, [product.sum()])
                return dist_autograd.get_gradients(context_id)[a]

        with ThreadPoolExecutor(6) as pool:
            results = [*pool.map(train, range(6))]
        self.assertEqual(results, [torch.full((3,), float(key)) for key in range(6)])

    # Errors.

    @dist_init
    def test_backward_refuses_bad_roots_and_contexts(self) -> None:
        a, b = self._leaves()
        with dist_autograd.context() as context_id:
            loss = (a * b).sum()
            for roots, why in (
                ([], "No tensors provided for gradient computation"),
                ([loss.detach()], "requires_grad not set on root"),
                ([a * b], "is not a scalar, all roots need to be scalar"),
            ):
                with self.subTest(why), self.assertRaisesRegex(RuntimeError, why):
                    dist_autograd.backward(context_id, roots)
            with self.assertRaises(TypeError):
                dist_autograd.backward(context_id, None)  # the mistake under test
        no_context = "Could not find autograd context with id"
        with self.assertRaisesRegex(RuntimeError, no_context):
            dist_autograd.backward(context_id, [loss])
        with self.assertRaisesRegex(RuntimeError, no_context):
            dist_autograd.get_gradients(context_id)

    @dist_init
    def test_error_in_a_remote_backward_names_the_worker(self) -> None:
        (a,) = self._leaves(1)
        with dist_autograd.context() as context_id:
            failing = (FailingBackward.apply, (a,))
            result = self.call(remote.relay, *failing, 1, self.world_size)
            node = rpc.get_worker_info(self.peer(2)).id
            why = f"Error on Node {node}: .*this backward always fails"
            with self.assertRaisesRegex(RuntimeError, why):
                dist_autograd.backward(context_id, [result.sum()])

    @dist_init
    def test_context_survives_an_error_in_a_call(self) -> None:
        a, b = self._leaves()
        with dist_autograd.context() as context_id:
            with self.assertRaisesRegex(ValueError, "in between"):
                self.call(remote.raise_value_error, "in between")
            product, wanted = self.call(multiply, a, b), {a: b.detach(), b: a.detach()}
            self._assert_gradients(context_id, product.sum(), wanted)

    @dist_init(setup_rpc=False)
    def test_backward_through_a_worker_that_left_fails_as_such(self) -> None:
        initialize_pg(self.pg_init_method, self.rank, self.world_size)
        start_worker(self, rpc_timeout=20)
        (a,) = self._leaves(1)
        with dist_autograd.context() as context_id:
            # Worker 0 calls worker 1 directly; worker 2 reaches it through worker 0.
            hops = 0 if self.rank == 0 else 1
            product = self.call(remote.relay, multiply, (a, a), hops, self.world_size)
            dist.barrier()
            if self.rank == 1:
                rpc.shutdown(graceful=False)
            else:
                gone = self.get_shutdown_error_regex()
                wait_until_node_failure(1, gone)
                with self.assertRaisesRegex(RuntimeError, gone):
                    dist_autograd.backward(context_id, [product.sum()])
            dist.barrier()  # workers 0 and 2 stay until both have seen the error
        if self.rank != 1:
            rpc.shutdown(graceful=False)


def on_device(a: Tensor, rank: int) -> Tensor:
    """Take a host tensor, compute on this worker's device, and return a host tensor."""
    device = accelerator.current_device(rank)
    return (a.to(device) * 3).cpu()


class CudaDistAutogradTest(RpcAgentTestFixture):
    """Graphs that move between the host and an accelerator of any type in a call."""

    world_size = 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @dist_init
    def test_gpu_to_cpu_continuation(self) -> None:
        accelerator.set_device_index(self.rank)
        device = accelerator.current_device(self.rank)
        a = torch.rand(3, device=device, requires_grad=True)
        b = torch.rand(3, requires_grad=True)
        peer_rank = rpc.get_worker_info(self.peer()).id
        for mode in CALL_MODES:
            with self.subTest(mode), dist_autograd.context() as context_id:
                product = self.call(on_device, (a * 2).cpu() * b, peer_rank, mode=mode)
                dist_autograd.backward(context_id, [(product.to(device) * 5).sum()])
                grads = dist_autograd.get_gradients(context_id)
                devices = (grads[a].device, grads[b].device)
                self.assertEqual(devices, (a.device, b.device))
                self.assertEqual(grads[a].cpu(), 30 * b.detach())
                self.assertEqual(grads[b], 30 * a.detach().cpu())
