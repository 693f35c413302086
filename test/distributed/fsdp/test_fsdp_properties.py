# Owner(s): ["oncall: distributed"]
"""Properties of every model, however FSDP1 wraps and shards it: it trains like the
unsharded model, and its state dict loads at any world size.

Models are random trees of small layers with odd sizes, so shards are uneven and, on
four ranks, often empty.
"""

import contextlib
import functools
import shutil
import sys

import hypothesis.strategies as st
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import assume, given, settings
from torch import distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    build_tree,
    first_ranks_mesh,
    get_full_params,
    module_trees,
    train_tree,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import across_ranks

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HOST = torch.empty(0).device

WORLD_SIZE = 4
ROWS_PER_RANK = 2
# For sums of a few hundred float64 terms of size one in different orders.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}
NEED_MESH = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@functools.cache
def group_of(size):
    """Return the group of the first ``size`` ranks. Collective over the world."""
    return dist.new_group(list(range(size)))


def is_one_element(module):
    """Whether ``module`` has one parameter of one element.

    If gradients accumulate after their reduction, FSDP1 (torch 2.13) gets such a module
    wrong. It recognizes sharded gradients by their size, takes this one for unsharded,
    and reduces it again with the next one.
    """
    return (
        module._handle is not None
        and module._handle.flat_param._unpadded_unsharded_size.numel() == 1
    )


class PropertiesTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _unsharded(self, tree, seed=0):
        return build_tree(tree, self.device, seed=seed)


class TestTrainingProperties(PropertiesTest):
    def _sharded(self, tree, strategy, dtype=torch.float64, **options):
        if strategy in NEED_MESH:
            options["device_mesh"] = world_mesh(2, 2)
        return build_tree(
            tree,
            self.device,
            lambda module: FSDP(
                module, sharding_strategy=strategy, device_id=self.device, **options
            ),
            dtype=dtype,
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=30)
    @given(
        tree=module_trees(),
        strategy=st.sampled_from(ShardingStrategy),
        use_orig_params=st.booleans(),
        backward_prefetch=st.sampled_from([None, *BackwardPrefetch]),
        forward_prefetch=st.booleans(),
        steps=st.integers(1, 3),
        accumulate=st.sampled_from(["never", "reduced", "unreduced"]),
    )
    def test_sharded_training_equals_unsharded(
        self, tree, strategy, steps, accumulate, **options
    ):
        """Each rank trains on its own rows; the reference trains on all rows.

        Gradients accumulate over two steps: after their reduction, or under ``no_sync``
        before it.
        """
        reference = self._unsharded(tree)
        model = self._sharded(tree, strategy, **options)
        assume(
            accumulate != "reduced"
            or not any(map(is_one_element, FSDP.fsdp_modules(model)))
        )
        self.assertEqual(
            get_full_params(model),
            list(reference.parameters()),
            "parameters before training",
        )
        own = slice(self.rank * ROWS_PER_RANK, (self.rank + 1) * ROWS_PER_RANK)
        plain = None if accumulate == "never" else contextlib.nullcontext
        losses = train_tree(
            model,
            own,
            steps,
            self.device,
            model.no_sync if accumulate == "unreduced" else plain,
        )
        dist.all_reduce(losses)
        expected = train_tree(reference, slice(None), steps, self.device, plain)
        self.assertEqual(
            losses / WORLD_SIZE, expected, "losses of sharded training", **TOLERANCE
        )
        self.assertEqual(
            get_full_params(model),
            list(reference.parameters()),
            "parameters after training",
            **TOLERANCE,
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=15)
    @given(
        tree=module_trees(),
        strategy=st.sampled_from(ShardingStrategy),
        use_orig_params=st.booleans(),
    )
    def test_gradient_norm_is_that_of_all_shards(self, tree, strategy, use_orig_params):
        """Neither padding nor replicas count. FSDP1 computes no norms in float64."""
        reference = build_tree(tree, self.device, dtype=torch.float32)
        model = self._sharded(
            tree, strategy, torch.float32, use_orig_params=use_orig_params
        )
        torch.manual_seed(0)
        rows = torch.randn(4, 3).to(self.device)
        for module in (reference, model):
            module(rows).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        self.assertEqual(model.clip_grad_norm_(1.0), expected, "norm of all gradients")


class TestStateDictProperties(PropertiesTest):
    def _sharded(self, tree, size, seed, use_orig_params, **where):
        """Return the model over the first ``size`` ranks; None on the others."""
        where = where or {"process_group": group_of(size)}
        if self.rank >= size:
            return None
        where |= {"device_id": self.device, "use_orig_params": use_orig_params}
        return build_tree(tree, self.device, lambda each: FSDP(each, **where), seed)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=20)
    @given(
        tree=module_trees(),
        saved_by=st.integers(1, WORLD_SIZE),
        loaded_by=st.integers(1, WORLD_SIZE),
        use_orig_params=st.booleans(),
    )
    def test_full_state_dict_fits_any_world_size(
        self, tree, saved_by, loaded_by, use_orig_params
    ):
        """Names and values are those of the unsharded model."""
        reference = self._unsharded(tree, seed=1)
        state = [None]
        if saver := self._sharded(tree, saved_by, 1, use_orig_params):
            with FSDP.state_dict_type(saver, StateDictType.FULL_STATE_DICT):
                state = [
                    {name: tensor.cpu() for name, tensor in saver.state_dict().items()}
                ]
            expected = {
                name: tensor.cpu() for name, tensor in reference.state_dict().items()
            }
            self.assertEqual(state[0], expected, "saved state")
        dist.broadcast_object_list(state)
        if loader := self._sharded(tree, loaded_by, 2, use_orig_params):
            with FSDP.state_dict_type(loader, StateDictType.FULL_STATE_DICT):
                loader.load_state_dict(state[0])
            self.assertEqual(
                get_full_params(loader),
                list(reference.parameters()),
                "loaded parameters",
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=15)
    @given(
        tree=module_trees(),
        saved_by=st.integers(1, WORLD_SIZE),
        loaded_by=st.integers(1, WORLD_SIZE),
        use_orig_params=st.booleans(),
    )
    def test_sharded_checkpoint_fits_any_world_size(
        self, tree, saved_by, loaded_by, use_orig_params
    ):
        """Uses a mesh, so shards are DTensors, because a ShardedTensor without a local
        shard requires CUDA.
        """
        folder = self.shared_folder()
        saver_mesh, loader_mesh = (
            first_ranks_mesh(saved_by),
            first_ranks_mesh(loaded_by),
        )
        if saver := self._sharded(
            tree, saved_by, 1, use_orig_params, device_mesh=saver_mesh
        ):
            with FSDP.state_dict_type(saver, StateDictType.SHARDED_STATE_DICT):
                dcp.save(
                    saver.state_dict(),
                    checkpoint_id=folder,
                    process_group=saver_mesh.get_group(),
                )
        dist.barrier()
        if loader := self._sharded(
            tree, loaded_by, 2, use_orig_params, device_mesh=loader_mesh
        ):
            with FSDP.state_dict_type(loader, StateDictType.SHARDED_STATE_DICT):
                state = loader.state_dict()
                dcp.load(
                    state, checkpoint_id=folder, process_group=loader_mesh.get_group()
                )
                loader.load_state_dict(state)
            reference = self._unsharded(tree, seed=1)
            self.assertEqual(
                get_full_params(loader),
                list(reference.parameters()),
                "loaded parameters",
            )
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)

    def _trained(self, model):
        """Train ``model`` on the same rows on every rank, and return the optimizer."""
        torch.manual_seed(0)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        model(
            torch.randn(4, 3, dtype=torch.float64).to(self.device)
        ).square().mean().backward()
        optim.step()
        return optim

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=15)
    @given(
        tree=module_trees(),
        saved_by=st.integers(1, WORLD_SIZE),
        loaded_by=st.integers(1, WORLD_SIZE),
        use_orig_params=st.booleans(),
    )
    def test_optimizer_state_fits_any_world_size(
        self, tree, saved_by, loaded_by, use_orig_params
    ):
        """Each parameter has the same state as in unsharded training, under the same
        name.
        """
        # See docs/findings/optimizer_state_on_the_host.md
        assume(not use_orig_params or self.device != HOST)
        reference = self._unsharded(tree, seed=1)
        ref_optim = self._trained(reference)
        expected = {
            name: ref_optim.state[param] for name, param in reference.named_parameters()
        }
        state = [None]
        if saver := self._sharded(tree, saved_by, 1, use_orig_params):
            optim = self._trained(saver)
            state = [FSDP.optim_state_dict(saver, optim, group=group_of(saved_by))]
            self.assertEqual(
                state[0]["state"], expected, "saved optimizer state", **TOLERANCE
            )
        dist.broadcast_object_list(state)
        if loader := self._sharded(tree, loaded_by, 2, use_orig_params):
            optim = self._trained(loader)
            group = group_of(loaded_by)
            optim.load_state_dict(
                FSDP.optim_state_dict_to_load(loader, optim, state[0], group=group)
            )
            loaded = FSDP.optim_state_dict(loader, optim, group=group)
            self.assertEqual(
                loaded["state"], expected, "loaded optimizer state", **TOLERANCE
            )


if __name__ == "__main__":
    run_tests()
