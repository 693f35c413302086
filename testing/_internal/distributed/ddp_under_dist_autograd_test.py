"""DistributedDataParallel under distributed autograd, over RPC: hybrid models with
local, replicated and remote layers.

The topology of :class:`DdpUnderDistAutogradTest`::

    master (rank 5)  --train_batch-->  trainers (ranks 0-3, DDP among them)
    trainers         --RemoteEM, RemoteNet-->  remote worker (rank 4)

Weights and inputs are small integers and halves, so gradients are exact in float32 and
are compared exactly with :func:`expected_gradients`, which uses neither RPC nor DDP.
Other workers find module-level functions and classes by name.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.nn.parallel import DistributedDataParallel

from torch_ext import accelerator
from torch_ext.compat import dist_autograd
from torch_ext.testing._internal.common_distributed import (
    requires_gloo,
    skip_if_lt_x_gpu,
    skip_if_rocm_multiprocess,
)
from torch_ext.testing._internal.dist_utils import dist_init, initialize_pg, worker_name
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)

NUM_EM_ROW = 2
D_DENSE, D_SPARSE, D_HID, D_OUT = 2, 3, 3, 1
NUM_TRAINERS = 4
TRAINER_RANKS = [*range(NUM_TRAINERS)]
REMOTE_WORKER_RANK, MASTER_RANK = NUM_TRAINERS, NUM_TRAINERS + 1
WORLD_SIZE = NUM_TRAINERS + 2

_T = TypeVar("_T")


class DdpMode(enum.Enum):
    """Where a trainer applies DDP to its hybrid module."""

    NONE = enum.auto()  # nowhere
    OUTSIDE = enum.auto()  # around the whole module
    INSIDE = enum.auto()  # around the second local layer only


def init_logger() -> logging.Logger:
    """Return this module's logger: of warnings, or everything if ``debug`` is set."""
    logger = logging.getLogger(__name__)
    logger.setLevel(logging.DEBUG if "debug" in os.environ else logging.WARNING)
    logger.propagate = False
    if not logger.handlers:
        line = "%(asctime)s %(processName)s/%(threadName)s %(levelname)s: %(message)s"
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(line))
        logger.addHandler(handler)
    return logger


gLogger = init_logger()


class FeatureSet(NamedTuple):
    """One batch of ``n`` examples."""

    dense_features: Tensor  # (n, D_DENSE)
    sparse_features: Tensor  # (n,), int64, a row of the embedding each
    values: Tensor  # (n,), the weight of each example's output in the loss

    def split(self, size: int) -> list[FeatureSet]:
        """Return the examples in batches of ``size``."""
        fields = (torch.split(field, size) for field in self)
        return [FeatureSet(*parts) for parts in zip(*fields, strict=True)]


def _call_method(
    method: Callable[..., _T], rref: rpc.RRef[Any], *args: Any, **kwargs: Any
) -> _T:
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(
    method: Callable[..., _T], rref: rpc.RRef[Any], *args: Any, **kwargs: Any
) -> _T:
    return _remote_method_async(method, rref, *args, **kwargs).wait()


def _remote_method_async(
    method: Callable[..., _T], rref: rpc.RRef[Any], *args: Any, **kwargs: Any
) -> torch.futures.Future[_T]:
    args = (method, rref, *args)
    return rpc.rpc_async(rref.owner(), _call_method, args=args, kwargs=kwargs)


class RemoteEM(nn.Module):
    """An embedding with weights of 0.5: (n,) rows to (n, embedding_dim)."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.em = nn.EmbeddingBag(num_embeddings, embedding_dim)
        nn.init.constant_(self.em.weight, 0.5)

    def forward(self, input: Tensor) -> Tensor:
        gLogger.debug("embedding of %s", input)
        return self.em(input, offsets=torch.arange(len(input)))


def getLinear(d_in: int, d_out: int) -> nn.Linear:
    """Return a linear layer without bias: a first weight of -1, and all others 1."""
    layer = nn.Linear(d_in, d_out, bias=False)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        layer.weight[0, 0] = -1
    return layer


class RemoteNet(nn.Module):
    """A linear layer and a ReLU: (n, d_in) to (n, d_out)."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.fc = getLinear(d_in, d_out)
        self.relu = nn.ReLU()

    def forward(self, input: Tensor) -> Tensor:
        gLogger.debug("dense layer of %s", input)
        return self.relu(self.fc(input))


class HybridModel(nn.Module):
    """``fc2(RemoteNet(fc1(dense) ++ RemoteEM(sparse)))``. DDP replicates ``fc2`` over
    ``process_group_for_ddp``, if given, and averages ``ddp_params``, which
    ``non_ddp_params`` completes to all local parameters.
    """

    def __init__(
        self,
        remote_em_rref: rpc.RRef[RemoteEM],
        remote_net_rref: rpc.RRef[RemoteNet],
        process_group_for_ddp: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.remote_em_rref = remote_em_rref
        self.remote_net_rref = remote_net_rref
        self.fc1: nn.Module = getLinear(D_DENSE, D_DENSE)
        self.fc2: nn.Module = getLinear(D_HID, D_OUT)
        first, second = tuple(self.fc1.parameters()), tuple(self.fc2.parameters())
        self.non_ddp_params: tuple[nn.Parameter, ...] = first + second
        self.ddp_params: tuple[nn.Parameter, ...] = ()
        if process_group_for_ddp is not None:
            self.non_ddp_params, self.ddp_params = first, second
            group = process_group_for_ddp
            self.fc2 = DistributedDataParallel(self.fc2, process_group=group)

    def forward(self, input: FeatureSet) -> Tensor:
        embed, rows = self.remote_em_rref, input.sparse_features
        sparse = _remote_method(RemoteEM.forward, embed, rows)
        joined = torch.cat((self.fc1(input.dense_features), sparse), dim=1)
        hidden = _remote_method(RemoteNet.forward, self.remote_net_rref, joined)
        return self.fc2(hidden)


class Trainer:
    """Trains a :class:`HybridModel` when the master calls. Unless ``ddp_mode`` is
    ``NONE``, every rank of the world creates the trainers' group.
    """

    def __init__(
        self,
        remote_em_rref: rpc.RRef[RemoteEM],
        remote_net_rref: rpc.RRef[RemoteNet],
        ddp_mode: DdpMode,
        rank: int,
    ) -> None:
        self.rank = rank
        self.remote_rrefs = (remote_em_rref, remote_net_rref)
        self.trainer_group = create_trainer_group(ddp_mode)
        inner_group = self.trainer_group if ddp_mode is DdpMode.INSIDE else None
        model = HybridModel(*self.remote_rrefs, inner_group)
        self.hybrid_module: nn.Module = model
        self.ddp_params, self.non_ddp_params = model.ddp_params, model.non_ddp_params
        if ddp_mode is DdpMode.OUTSIDE:
            self.ddp_params, self.non_ddp_params = model.non_ddp_params, ()
            group = self.trainer_group
            self.hybrid_module = DistributedDataParallel(model, process_group=group)

    def destroy_pg(self) -> None:
        """Destroy the module and the trainers' group, if there is one, for good."""
        # The module first: see Note [DDP dies before its group].
        del self.hybrid_module, self.ddp_params, self.non_ddp_params
        if self.trainer_group is not None:
            dist.destroy_process_group(self.trainer_group)

    def train_batch(
        self,
        mini_batch: FeatureSet,
        trainer_has_less_inputs: bool,
        simulate_uneven_inputs: bool,
    ) -> Sequence[list[Tensor]]:
        """Return the last gradients of ``ddp_params``, of ``non_ddp_params`` and of the
        remote layers.

        With uneven inputs a batch is two steps under DDP's ``join``, and a trainer with
        less inputs stops after the first.
        """
        join: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        batches = [mini_batch]
        if simulate_uneven_inputs:
            ddp: Any = self.hybrid_module
            join = ddp.join()
            batches = split_unevenly(mini_batch, trainer_has_less_inputs)
        with join:
            return [self._gradients(batch) for batch in batches][-1]

    def _gradients(self, batch: FeatureSet) -> Sequence[list[Tensor]]:
        with dist_autograd.context() as context_id:
            loss = weighted_sum(self.hybrid_module(batch), batch)
            dist_autograd.backward(context_id, [loss])
            grads = dist_autograd.get_gradients(context_id)
            # Before the context ends, which drops them on every worker.
            remote = [
                grad
                for rref in self.remote_rrefs
                for grad in _remote_method(_gradients_of, rref, context_id)
            ]
        gLogger.debug("trainer %s: loss %s, gradients %s", self.rank, loss, grads)
        own = (self.ddp_params, self.non_ddp_params)
        return *([grads[p] for p in parameters] for parameters in own), remote


def create_trainer_group(ddp_mode: DdpMode) -> dist.ProcessGroup | None:
    """Create the trainers' group if DDP is used. Every rank of the world calls this."""
    return None if ddp_mode is DdpMode.NONE else dist.new_group(TRAINER_RANKS)


def _gradients_of(module: nn.Module, context_id: int) -> list[Tensor]:
    grads = dist_autograd.get_gradients(context_id)
    return [grads[parameter] for parameter in module.parameters()]


def weighted_sum(output: Tensor, batch: FeatureSet) -> Tensor:
    """Return the scalar loss of ``output``, (n, D_OUT), for ``batch``."""
    return (output.squeeze(1) * batch.values).sum()


def split_unevenly(batch: FeatureSet, has_less: bool) -> list[FeatureSet]:
    """Return a trainer's micro-batches of two examples: all, or the first half."""
    batches = batch.split(2)
    return batches[: len(batches) // 2] if has_less else batches


def get_training_examples() -> list[FeatureSet]:
    """Return one batch of 4 examples per trainer. Each example is also there with the
    opposite value, so gradients averaged over all trainers are zero.
    """
    rows = [
        (value, (x * value, y * value), z)
        for value in (-1.0, 1.0)
        for x in (-1.0, 1.0)
        for y in (1.0, -1.0)
        for z in range(NUM_EM_ROW)
    ]
    values, dense, sparse = (torch.tensor(column) for column in zip(*rows, strict=True))
    return FeatureSet(dense, sparse, values).split(len(rows) // NUM_TRAINERS)


def expected_gradients(batch: FeatureSet) -> Sequence[Tensor]:
    """Return the gradients of fc1, fc2, RemoteEM and RemoteNet for ``batch``, by plain
    local autograd.
    """
    fc1, fc2 = getLinear(D_DENSE, D_DENSE), getLinear(D_HID, D_OUT)
    em, net = RemoteEM(NUM_EM_ROW, D_SPARSE), RemoteNet(D_DENSE + D_SPARSE, D_HID)
    features = (fc1(batch.dense_features), em(batch.sparse_features))
    loss = weighted_sum(fc2(net(torch.cat(features, dim=1))), batch)
    weights = (fc1.weight, fc2.weight, em.em.weight, net.fc.weight)
    return torch.autograd.grad(loss, weights)


def averaged_gradients(grads: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Average gradients as DDP does: a missing trainer's are zero."""
    layers = zip(*grads, strict=True)
    return [torch.stack(each).sum(dim=0) / NUM_TRAINERS for each in layers]


# A condition alone is not enough: a notification is lost if the master signals before a
# worker starts to wait.
shutdown_signal = threading.Event()


def set_shutdown_signal() -> None:
    """Let :func:`wait_for_shutdown_signal` return, even if it is called later."""
    shutdown_signal.set()


def wait_for_shutdown_signal(
    timeout_s: float = rpc.constants.DEFAULT_RPC_TIMEOUT_SEC,
) -> None:
    """Wait for the signal and clear it for the next test in this process."""
    if not shutdown_signal.wait(timeout_s):
        master = worker_name(MASTER_RANK)
        raise TimeoutError(f"no shutdown signal from {master} within {timeout_s:g} s")
    shutdown_signal.clear()


@requires_gloo()
class DdpUnderDistAutogradTest(RpcAgentTestFixture):
    """Trainers in each :class:`DdpMode` get the gradients of an all-local model."""

    world_size = WORLD_SIZE

    def remote_worker_name(self) -> str:
        return worker_name(REMOTE_WORKER_RANK)

    def trainer_name(self, rank: int) -> str:
        return worker_name(rank)

    def _remote_worker_process(self, ddp_mode: DdpMode) -> None:
        create_trainer_group(ddp_mode)
        wait_for_shutdown_signal()

    def _trainer_process(self, rank: int) -> None:
        gLogger.debug("trainer %s serves", rank)
        wait_for_shutdown_signal()

    def _master_process(self, ddp_mode: DdpMode, simulate_uneven_inputs: bool) -> None:
        owner = self.remote_worker_name()
        em = rpc.remote(owner, RemoteEM, args=(NUM_EM_ROW, D_SPARSE))
        net = rpc.remote(owner, RemoteNet, args=(D_DENSE + D_SPARSE, D_HID))
        self.do_test_on_master(ddp_mode, simulate_uneven_inputs, em, net)

    def do_test_on_master(
        self,
        ddp_mode: DdpMode,
        simulate_uneven_inputs: bool,
        remote_em_rref: rpc.RRef[RemoteEM],
        remote_net_rref: rpc.RRef[RemoteNet],
    ) -> None:
        """Train three rounds, compare each round's gradients, end the other workers."""
        args = (remote_em_rref, remote_net_rref, ddp_mode)
        trainers = [
            rpc.remote(self.trainer_name(rank), Trainer, args=(*args, rank))
            for rank in TRAINER_RANKS
        ]
        create_trainer_group(ddp_mode)
        examples = get_training_examples()
        # Gradients that cancel do not tell an average from zeros, so the last round
        # weighs trainers unequally.
        unequal = [
            batch._replace(values=batch.values * (rank + 1))
            for rank, batch in enumerate(examples)
        ]
        for batches, rounds in ((examples, 2), (unequal, 1)):
            for _ in range(rounds):
                self._train_round(trainers, batches, ddp_mode, simulate_uneven_inputs)
        self._check_cancelled(examples)
        for trainer in trainers:
            _remote_method(Trainer.destroy_pg, trainer)
        for name in (*map(self.trainer_name, TRAINER_RANKS), self.remote_worker_name()):
            rpc.rpc_sync(name, set_shutdown_signal)

    def _train_round(
        self,
        trainers: list[rpc.RRef[Trainer]],
        batches: list[FeatureSet],
        ddp_mode: DdpMode,
        uneven: bool,
    ) -> None:
        # With uneven inputs the first half of the trainers runs out first.
        has_less = [uneven and rank < NUM_TRAINERS // 2 for rank in TRAINER_RANKS]
        futures = [
            _remote_method_async(Trainer.train_batch, trainer, batch, less, uneven)
            for trainer, batch, less in zip(trainers, batches, has_less, strict=True)
        ]
        parts = [
            split_unevenly(batch, less) if uneven else [batch]
            for batch, less in zip(batches, has_less, strict=True)
        ]
        for rank, future in enumerate(futures):
            last = len(parts[rank]) - 1
            peers = [part[last] for part in parts if len(part) > last]
            mean_fc1, mean_fc2, *_ = averaged_gradients(map(expected_gradients, peers))
            fc1, fc2, *remote = expected_gradients(parts[rank][last])
            ddp, non_ddp = {
                DdpMode.NONE: ([], [fc1, fc2]),
                DdpMode.OUTSIDE: ([mean_fc1, mean_fc2], []),
                DdpMode.INSIDE: ([mean_fc2], [fc1]),
            }[ddp_mode]
            names = ("layers under DDP", "local layers", "remote layers")
            wanted = (ddp, non_ddp, remote)
            for name, grads, each in zip(names, future.wait(), wanted, strict=True):
                message = f"{name}, trainer {rank}"
                self.assertEqual(grads, each, message, rtol=0, atol=0)

    def _check_cancelled(self, examples: list[FeatureSet]) -> None:
        """Check the reference: its averages cancel, its gradients do not."""
        each = [expected_gradients(batch) for batch in examples]
        for layer, average in enumerate(averaged_gradients(each)[:2]):
            self.assertEqual(average.count_nonzero(), 0)
            for own in each:
                self.assertNotEqual(own[layer].count_nonzero(), 0)

    def _do_test(self, ddp_mode: DdpMode, simulate_uneven_inputs: bool = False) -> None:
        initialize_pg(self.pg_init_method, self.rank, self.world_size)
        # The master must not call a trainer that is still in init_process_group.
        dist.barrier()
        if self.rank == MASTER_RANK:
            self._master_process(ddp_mode, simulate_uneven_inputs)
        elif self.rank == REMOTE_WORKER_RANK:
            self._remote_worker_process(ddp_mode)
        else:
            self._trainer_process(self.rank)
        dist.destroy_process_group()

    @dist_init
    def test_backward_no_ddp(self) -> None:
        self._do_test(DdpMode.NONE)

    @dist_init
    def test_backward_ddp_outside(self) -> None:
        self._do_test(DdpMode.OUTSIDE)

    @dist_init
    def test_backward_ddp_outside_uneven_inputs(self) -> None:
        self._do_test(DdpMode.OUTSIDE, simulate_uneven_inputs=True)

    @dist_init
    def test_backward_ddp_inside(self) -> None:
        self._do_test(DdpMode.INSIDE)


# Note [DDP dies before its group]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A DDP module that outlives ``destroy_process_group`` holds the group's last reference.
# Its destructor joins the group's threads with the GIL held, and one that is dropping a
# finished collective's Python objects waits for the GIL: a hang in one of forty runs
# (torch 2.13, gloo). So modules go out of scope, or are dropped, first.


class CommonDdpComparisonTest(RpcAgentTestFixture):
    """A world of trainers, for comparisons on the host and on an accelerator."""

    world_size = NUM_TRAINERS

    def trainer_name(self, rank: int) -> str:
        return worker_name(rank)

    @staticmethod
    def get_remote_grads(rref: rpc.RRef[nn.Linear], context_id: int) -> Tensor:
        """Return the gradient of a layer's weight; runs on the layer's owner."""
        return dist_autograd.get_gradients(context_id)[rref.local_value().weight]

    @contextlib.contextmanager
    def _trainers(self, backend: str = "gloo") -> Iterator[None]:
        """Initialise the process group for the body, and seed each trainer by its rank:
        equal gradients would not show a missing average. The body is one call, so that
        its locals are gone afterwards: see Note [DDP dies before its group].
        """
        initialize_pg(self.pg_init_method, self.rank, self.world_size, backend)
        torch.manual_seed(self.rank)
        yield
        dist.destroy_process_group()

    def _compare_local_and_remote(
        self, owner: str, device: torch.device, widths: Sequence[int]
    ) -> None:
        """Compare layers of these widths, on ``owner`` and replicated on ``device`` in
        turn, with the same layers all here.
        """
        remotes, here, replicated = [], [], []
        for at in range(0, len(widths) - 1, 2):
            first, second, third = widths[at : at + 3]
            remotes.append(RemoteModule(owner, nn.Linear, args=(first, second, False)))
            here.append(nn.Linear(first, second, bias=False))
            here[-1].load_state_dict(remotes[-1].module_rref.to_here().state_dict())
            layer = nn.Linear(second, third).to(device)
            ids = [device] if device.type != accelerator.HOST else None
            replicated.append(DistributedDataParallel(layer, device_ids=ids))
        inputs = torch.rand((10, widths[0]))

        def loss(others: Sequence[nn.Module]) -> Tensor:
            x = inputs
            for other, own in zip(others, replicated, strict=True):
                x = own(other(x).to(device)).cpu()
            return x.sum()

        loss(here).backward()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss(remotes)])
            grads = dist_autograd.get_gradients(context_id)
            for own in replicated:
                weight = own.module.weight
                self.assertEqual(grads[weight].device, device)
                self.assertEqual(weight.grad, grads[weight])
            for remote, local in zip(remotes, here, strict=True):
                rref, run = remote.module_rref, CommonDdpComparisonTest.get_remote_grads
                grad = rpc.rpc_sync(rref.owner(), run, args=(rref, context_id))
                self.assertEqual(local.weight.grad, grad)

    def _mean_over_trainers(
        self, losses: Sequence[Tensor | None], parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return DDP's gradients for the trainers' losses (None: no input)."""
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for loss in losses:
            if loss is not None:
                grads = torch.autograd.grad(loss, parameters)
                for total, grad in zip(totals, grads, strict=True):
                    total += grad.to_dense() if grad.is_sparse else grad
        return [total / self.world_size for total in totals]


def _inputs_of(rank: int, *, uneven: bool) -> list[Tensor]:
    """Return batches, (3, 2) each: one, or three on even ranks if uneven."""
    seeded = torch.Generator().manual_seed(rank)
    count = 3 if uneven and rank % 2 == 0 else 1
    return [torch.rand((3, 2), generator=seeded) for _ in range(count)]


def _bags_of(rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows, (10,), and the offsets, (2,), of trainer ``rank``'s bags."""
    seeded = torch.Generator().manual_seed(rank)
    return torch.randint(10, (10,), generator=seeded), torch.tensor([0, 4])


@requires_gloo()
class DdpComparisonTest(CommonDdpComparisonTest):
    """DDP gives the trainers' mean gradients, which each process computes from all
    trainers' seeds, within a distributed autograd context and without.
    """

    def _run_test_ddp_comparision(self, simulate_uneven_inputs: bool = False) -> None:
        with self._trainers():
            self._compare_local_and_distributed(simulate_uneven_inputs)

    def _compare_local_and_distributed(self, uneven: bool) -> None:
        net = nn.Linear(2, 3)
        ddp_net = DistributedDataParallel(net)
        plain = copy.deepcopy(net)
        inputs = [_inputs_of(rank, uneven=uneven) for rank in range(self.world_size)]
        with ddp_net.join(enable=uneven):
            for step, batch in enumerate(inputs[self.rank]):
                losses = [
                    plain(own[step]).norm() if step < len(own) else None
                    for own in inputs
                ]
                expected = self._mean_over_trainers(losses, list(plain.parameters()))
                self._compare_step(ddp_net, batch, expected, step)

    def _compare_step(
        self, ddp_net: nn.Module, batch: Tensor, expected: list[Tensor], step: int
    ) -> None:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [ddp_net(batch).norm()])
            distributed = dist_autograd.get_gradients(context_id)
        ddp_net.zero_grad()
        ddp_net(batch).norm().backward()
        parameters = list(ddp_net.parameters())
        self.assertEqual(set(distributed), set(parameters))
        for parameter, mean in zip(parameters, expected, strict=True):
            for grad in (distributed[parameter], parameter.grad):
                self.assertEqual(grad, mean, msg=f"the trainers' mean, step {step}")

    @dist_init
    def test_ddp_comparison(self) -> None:
        self._run_test_ddp_comparision()

    @dist_init
    def test_ddp_comparison_uneven_inputs(self) -> None:
        self._run_test_ddp_comparision(simulate_uneven_inputs=True)

    @dist_init
    def test_ddp_dist_autograd_sparse_grads(self) -> None:
        with self._trainers():
            self._compare_sparse()

    def _compare_sparse(self) -> None:
        model = nn.EmbeddingBag(10, 3, sparse=True)
        ddp_model = DistributedDataParallel(model)
        plain = copy.deepcopy(model)
        losses = [plain(*_bags_of(rank)).sum() for rank in range(self.world_size)]
        (expected,) = self._mean_over_trainers(losses, [plain.weight])

        ddp_model(*_bags_of(self.rank)).sum().backward()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [ddp_model(*_bags_of(self.rank)).sum()])
            grads = dist_autograd.get_gradients(context_id)
        self.assertEqual(set(grads), {model.weight})
        grad = grads[model.weight]
        self.assertTrue(grad.is_sparse)
        self.assertEqual(grad, model.weight.grad)
        self.assertEqual(grad.to_dense(), expected)

    @dist_init
    def test_ddp_dist_autograd_local_vs_remote(self) -> None:
        with self._trainers():
            host = torch.device(accelerator.HOST)
            for owner in ("worker0/cpu", "worker0"):  # the device is optional
                self._compare_local_and_remote(owner, host, (10, 5, 1))


class CudaDdpComparisonTest(CommonDdpComparisonTest):
    """Layers alternate between the remote host and the trainer's own accelerator, of
    any type. Only host tensors cross RPC, as not all devices' memory can.
    """

    @skip_if_lt_x_gpu(NUM_TRAINERS, allow_cpu=True)
    @skip_if_rocm_multiprocess
    @dist_init
    def test_ddp_dist_autograd_local_vs_remote_gpu(self) -> None:
        accelerator.set_device_index(self.rank)
        device = accelerator.current_device(self.rank)
        with self._trainers(accelerator.backend()):
            self._compare_local_and_remote("worker0/cpu", device, (10, 7, 5, 3, 1))
