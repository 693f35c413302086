# Owner(s): ["oncall: distributed"]
"""``clip_grad_norm_`` over sharded gradients: the norm is that of the whole model, and
every shard is scaled by it.
"""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    MLPStack,
    average_gradients,
    check_sharded_parity,
    fully_shard_children,
    sequential_mlps,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

NORMS = [1, 2, 2.5, float("inf")]


def check_full_gradients(case, reference, model):
    for (name, whole), part in zip(
        reference.named_parameters(), model.parameters(), strict=True
    ):
        case.assertEqual(part.grad.full_tensor(), whole.grad, name)


class ClipGradNormTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _check_clipping(
        self, reference, model, width, check=check_sharded_parity, norms=NORMS
    ):
        """Clip by each norm, to half of it and to twice, which changes nothing."""
        for each in (reference, model):
            each(self.rows(width)).square().sum().backward()
        average_gradients(reference)
        before = [parameter.grad.clone() for parameter in reference.parameters()]
        sharded_before = [parameter.grad.clone() for parameter in model.parameters()]
        for norm_type in norms:
            flat = torch.cat([gradient.flatten() for gradient in before])
            norm = torch.linalg.vector_norm(flat, norm_type)
            self.assertGreater(norm.item(), 0.1)
            for factor in (0.5, 2.0):
                for gradients, each in ((before, reference), (sharded_before, model)):
                    for parameter, gradient in zip(
                        each.parameters(), gradients, strict=True
                    ):
                        parameter.grad.copy_(gradient)
                found = nn.utils.clip_grad_norm_(
                    model.parameters(), norm.item() * factor, norm_type
                )
                self.assertEqual(found.full_tensor(), norm, f"norm {norm_type}")
                for parameter, gradient in zip(
                    reference.parameters(), before, strict=True
                ):
                    parameter.grad.copy_(gradient * min(1.0, factor))
                check(self, reference, model)


class TestClipGradNormWorldSize2(ClipGradNormTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_clip_grad_norm_1d(self):
        """Shards differ in size."""
        model = sequential_mlps(2)
        reference = copy.deepcopy(model).to(self.device)
        self._check_clipping(reference, fully_shard_children(model.to(self.device)), 5)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parameters_without_gradients_do_not_count(self):
        model = sequential_mlps(2)
        model[0].requires_grad_(False)
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        for each in (reference, model):
            each(self.rows(5)).square().sum().backward()
        average_gradients(reference)
        norms = [
            nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            for each in (reference, model)
        ]
        self.assertEqual(norms[1].full_tensor(), norms[0], "norm")
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_nonfinite_norm_is_an_error_on_every_rank(self):
        """Ranks whose own shards are finite raise it too."""
        model = fully_shard(nn.Linear(4, 4).to(self.device))
        model(self.rows(4)).sum().backward()
        if self.rank == 1:
            model.weight.grad.to_local()[0, 0] = float("inf")
        with self.assertRaisesRegex(
            RuntimeError, "total norm of order 2.0 .* is non-finite"
        ):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


class TestClipGradNormWorldSize3(ClipGradNormTest):
    @property
    def world_size(self):
        return 3

    @skip_if_lt_x_gpu(3, allow_cpu=True)
    def test_clip_grad_norm_of_three_ranks(self):
        model = sequential_mlps(1)
        reference = copy.deepcopy(model).to(self.device)
        self._check_clipping(reference, fully_shard_children(model.to(self.device)), 5)


class TestClipGradNormWorldSize4(ClipGradNormTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_clip_grad_norm_of_a_hybrid_mesh(self):
        """Replicas count once."""
        model = sequential_mlps(1)
        reference = copy.deepcopy(model).to(self.device)
        self._check_clipping(
            reference,
            fully_shard_children(model.to(self.device), mesh=world_mesh(2, 2)),
            5,
            norms=[1, 2],
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_clip_grad_norm_2d(self):
        mesh = init_device_mesh(self.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = MLPStack(4)
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device).parallelize(mesh["tp"], mesh["dp"], False)
        own = self.rows

        def rows(width):  # ranks of one tensor-parallel group have the same
            shared = own(width)
            dist.broadcast(shared, self.rank // 2 * 2, mesh["tp"].get_group())
            return shared

        self.rows = rows
        self._check_clipping(
            reference, model, 4, check_full_gradients, norms=[2.5, float("inf")]
        )


if __name__ == "__main__":
    run_tests()
