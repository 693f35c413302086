"""The hybrid model of the DDP suites: local layers on trainers, an embedding and a
dense layer on a remote worker.

Runs in the rank, on all workers: each name here is an RPC target. Import these names
from ``ddp_under_dist_autograd_test``.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

from torch_ext.compat import dist_autograd

NUM_EM_ROW = 2
D_SPARSE = 3
D_DENSE = 2
D_HID = 3
D_OUT = 1
NUM_TRAINERS = 4
WORLD_SIZE = (
    NUM_TRAINERS + 2
)  # the remote worker and the master come after the trainers
TRAINER_RANKS = list(range(NUM_TRAINERS))
REMOTE_WORKER_RANK = NUM_TRAINERS
MASTER_RANK = NUM_TRAINERS + 1

_T = TypeVar("_T")


class DdpMode(enum.Enum):
    """Where a trainer applies DDP to its hybrid module."""

    NONE = enum.auto()  # nowhere
    OUTSIDE = enum.auto()  # around the whole module
    INSIDE = enum.auto()  # around the second local layer only


def init_logger() -> logging.Logger:
    """Return this module's logger, writing to stderr: warnings, or everything if the
    variable ``debug`` is set.
    """
    logger = logging.getLogger(__name__)
    logger.setLevel(logging.DEBUG if "debug" in os.environ else logging.WARNING)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter(
                "%(asctime)s %(processName)s/%(threadName)s %(levelname)s: %(message)s"
            )
        )
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
        return [
            FeatureSet(*parts)
            for parts in zip(*(torch.split(field, size) for field in self), strict=True)
        ]


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
    return rpc.rpc_async(
        rref.owner(), _call_method, args=(method, rref, *args), kwargs=kwargs
    )


class RemoteEM(nn.Module):
    """An embedding on the remote worker, all weights 0.5: (n,) rows to (n,
    embedding_dim).
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.em = nn.EmbeddingBag(
            num_embeddings,
            embedding_dim,
            _weight=torch.full((num_embeddings, embedding_dim), 0.5),
        )

    def forward(self, input: Tensor) -> Tensor:
        gLogger.debug("embedding of %s", input)
        bags: Tensor = self.em(input, offsets=torch.arange(len(input)))
        return bags


def getLinear(d_in: int, d_out: int) -> nn.Linear:
    """Return a linear layer without bias; its weights are 1, except the first, which is
    -1.
    """
    layer = nn.Linear(d_in, d_out, bias=False)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        layer.weight[0, 0] = -1
    return layer


class RemoteNet(nn.Module):
    """A linear layer and a ReLU on the remote worker: (n, d_in) to (n, d_out)."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.fc = getLinear(d_in, d_out)
        self.relu = nn.ReLU()

    def forward(self, input: Tensor) -> Tensor:
        gLogger.debug("dense layer of %s", input)
        return torch.as_tensor(self.relu(self.fc(input)))


class HybridModel(nn.Module):
    """``fc2(RemoteNet(fc1(dense) ++ RemoteEM(sparse)))``, where ``fc1`` and ``fc2`` are
    local.

    Args:
        remote_em_rref: the :class:`RemoteEM`.
        remote_net_rref: the :class:`RemoteNet`.
        process_group_for_ddp: replicate ``fc2`` over this group; None replicates
            nothing.

    Attributes:
        ddp_params: parameters that DDP averages.
        non_ddp_params: the other local parameters.
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
            self.fc2 = DistributedDataParallel(
                self.fc2, process_group=process_group_for_ddp
            )

    def forward(self, input: FeatureSet) -> Tensor:
        sparse = _remote_method(
            RemoteEM.forward, self.remote_em_rref, input.sparse_features
        )
        if len(sparse) != len(input.dense_features):
            raise AssertionError(
                f"got {len(sparse)} embeddings for {len(input.dense_features)} examples"
            )
        joined = torch.cat((self.fc1(input.dense_features), sparse), dim=1)
        return torch.as_tensor(
            self.fc2(_remote_method(RemoteNet.forward, self.remote_net_rref, joined))
        )


class Trainer:
    """Trains a :class:`HybridModel`. It lives on a trainer, and the master calls its
    methods.

    Args:
        remote_em_rref: see :class:`HybridModel`.
        remote_net_rref: see :class:`HybridModel`.
        ddp_mode: where to apply DDP. Unless it is ``NONE``, every rank of the world
            creates the trainers' group.
        rank: the trainer's rank.
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
        self.remote_grads: list[Tensor] = []
        self.trainer_group = (
            None if ddp_mode is DdpMode.NONE else dist.new_group(TRAINER_RANKS)
        )
        model = HybridModel(
            *self.remote_rrefs,
            self.trainer_group if ddp_mode is DdpMode.INSIDE else None,
        )
        self.hybrid_module: nn.Module = model
        self.ddp_params, self.non_ddp_params = model.ddp_params, model.non_ddp_params
        if ddp_mode is DdpMode.OUTSIDE:
            self.ddp_params, self.non_ddp_params = model.non_ddp_params, ()
            self.hybrid_module = DistributedDataParallel(
                model, process_group=self.trainer_group
            )

    def destroy_pg(self) -> None:
        """Destroy the module and the trainers' group, if there is one. The trainer
        cannot be used afterwards.
        """
        # The module first: see Note [DDP dies before its group] in
        # ddp_under_dist_autograd_test.
        del self.hybrid_module, self.ddp_params, self.non_ddp_params
        if self.trainer_group is not None:
            dist.destroy_process_group(self.trainer_group)
            self.trainer_group = None

    def train_batch(
        self,
        mini_batch: FeatureSet,
        trainer_has_less_inputs: bool,
        simulate_uneven_inputs: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the local gradients of the last backward: those of ``ddp_params`` and
        of ``non_ddp_params``.

        Args:
            mini_batch: one step, or two micro-batches if inputs are uneven.
            trainer_has_less_inputs: stop after the first micro-batch.
            simulate_uneven_inputs: train under DDP's ``join``, which stands in for the
                trainers that stopped.
        """
        join: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        batches = [mini_batch]
        if simulate_uneven_inputs:
            if not isinstance(self.hybrid_module, DistributedDataParallel):
                raise ValueError(
                    "uneven inputs need DDP around the whole module: use "
                    "DdpMode.OUTSIDE"
                )
            join, batches = (
                self.hybrid_module.join(),
                split_unevenly(mini_batch, trainer_has_less_inputs),
            )
        grads: dict[Tensor, Tensor] = {}
        with join:
            for batch in batches:
                grads = self._gradients(batch)
        return tuple(grads[p] for p in self.ddp_params), tuple(
            grads[p] for p in self.non_ddp_params
        )

    def _gradients(self, batch: FeatureSet) -> dict[Tensor, Tensor]:
        with dist_autograd.context() as context_id:
            loss = weighted_sum(self.hybrid_module(batch), batch)
            dist_autograd.backward(context_id, [loss])
            grads = dist_autograd.get_gradients(context_id)
            # Before the context ends: that drops the gradients on every worker that
            # took part.
            self.remote_grads = [
                grad
                for rref in self.remote_rrefs
                for grad in _remote_method(_gradients_of, rref, context_id)
            ]
        gLogger.debug("trainer %s: loss %s, gradients %s", self.rank, loss, grads)
        return grads

    def get_remote_grads(self) -> list[Tensor]:
        """Return this trainer's gradients of the remote layers' parameters, from its
        last backward.
        """
        return self.remote_grads


def _gradients_of(module: nn.Module, context_id: int) -> list[Tensor]:
    grads = dist_autograd.get_gradients(context_id)
    return [grads[parameter] for parameter in module.parameters()]


def weighted_sum(output: Tensor, batch: FeatureSet) -> Tensor:
    """Return the scalar loss of ``output``, (n, D_OUT), for ``batch``."""
    return (output.squeeze(1) * batch.values).sum()


def split_unevenly(batch: FeatureSet, has_less: bool) -> list[FeatureSet]:
    """Return a trainer's micro-batches of two examples each: all of them, or the first
    half.
    """
    batches = batch.split(2)
    return batches[: len(batches) // 2] if has_less else batches


def get_training_examples() -> list[FeatureSet]:
    """Return one batch of 4 examples per trainer.

    Another trainer has each example with the opposite value, so gradients averaged over
    all trainers are zero.
    """
    rows = [
        (value, (x * value, y * value), z)
        for value in (-1.0, 1.0)
        for x in (-1.0, 1.0)
        for y in (1.0, -1.0)
        for z in range(NUM_EM_ROW)
    ]
    values, dense, sparse = (torch.tensor(column) for column in zip(*rows, strict=True))
    if len(rows) % NUM_TRAINERS:
        raise AssertionError(
            f"{len(rows)} examples cannot be divided evenly among {NUM_TRAINERS} "
            "trainers"
        )
    return FeatureSet(dense, sparse, values).split(len(rows) // NUM_TRAINERS)


class ExpectedGradients(NamedTuple):
    """Gradients of one batch in an all-local model, in the order of each module's
    parameters.
    """

    fc1: Tensor
    fc2: Tensor
    remote: list[Tensor]  # of RemoteEM, then of RemoteNet


def expected_gradients(batch: FeatureSet) -> ExpectedGradients:
    """Return the hybrid model's gradients for ``batch``, computed by plain autograd in
    one process.
    """
    fc1, fc2 = getLinear(D_DENSE, D_DENSE), getLinear(D_HID, D_OUT)
    em, net = RemoteEM(NUM_EM_ROW, D_SPARSE), RemoteNet(D_DENSE + D_SPARSE, D_HID)
    hidden = net(
        torch.cat((fc1(batch.dense_features), em(batch.sparse_features)), dim=1)
    )
    remote = [*em.parameters(), *net.parameters()]
    first, second, *rest = torch.autograd.grad(
        weighted_sum(fc2(hidden), batch), [fc1.weight, fc2.weight, *remote]
    )
    return ExpectedGradients(first, second, rest)


def averaged_gradients(grads: Sequence[ExpectedGradients]) -> ExpectedGradients:
    """Average the local layers' gradients as DDP does. A trainer that is missing from
    ``grads`` counts as zero.
    """

    def mean(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)).sum(dim=0) / NUM_TRAINERS

    return ExpectedGradients(
        mean([g.fc1 for g in grads]), mean([g.fc2 for g in grads]), []
    )
