# Owner(s): ["oncall: distributed"]
"""Properties of every model, however FSDP2 shards it: it trains like the unsharded
model, its state dict loads at any world size, and all-gather extensions may fill
padding with any value.

Models are random trees of small layers with odd sizes, so shards are uneven and, on
four ranks, often empty.
"""

import contextlib
import shutil
import sys
import types

import hypothesis.strategies as st
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    BlockSpec,
    FSDPTest,
    LayerSpec,
    build_tree,
    first_ranks_mesh,
    module_trees,
    train_tree,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import across_ranks

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WORLD_SIZE = 4
ROWS_PER_RANK = 2
# For sums of a few hundred float64 terms of size one in different orders.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


@contextlib.contextmanager
def unreduced(model):
    """Have backward accumulate unsharded gradients, which a later backward reduces."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def full_params(model):
    return [param.full_tensor() for param in model.parameters()]


class PropertiesTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _unsharded(self, tree, seed=0):
        return build_tree(tree, self.device, seed=seed)

    def _sharded(self, tree, mesh, seed=0, **options):
        return build_tree(
            tree,
            self.device,
            lambda module: fully_shard(module, mesh=mesh, **options),
            seed,
        )

    def _check_training(self, model, reference, steps, accumulate=None):
        """Train the model on this rank's rows and the reference on all rows; compare
        losses and parameters.
        """
        own = slice(self.rank * ROWS_PER_RANK, (self.rank + 1) * ROWS_PER_RANK)
        losses = train_tree(model, own, steps, self.device, accumulate)
        dist.all_reduce(losses)
        expected = train_tree(
            reference,
            slice(None),
            steps,
            self.device,
            contextlib.nullcontext if accumulate else None,
        )
        self.assertEqual(
            losses / WORLD_SIZE, expected, "losses of sharded training", **TOLERANCE
        )
        self.assertEqual(
            full_params(model),
            list(reference.parameters()),
            "parameters after training",
            **TOLERANCE,
        )


class TestTrainingProperties(PropertiesTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=20)
    @given(
        tree=module_trees(),
        sizes=st.sampled_from([(4,), (2, 2), (4, 1), (1, 4)]),
        reshard_after_forward=st.sampled_from([True, False, 2]),
        steps=st.integers(1, 3),
        accumulate=st.sampled_from(["never", "reduced", "unreduced"]),
    )
    # Backward gathers the second layer over a mesh of two, which is drawn too rarely to
    # rely on.
    @example(
        tree=BlockSpec((LayerSpec(4, wrapped=True), LayerSpec(4))),
        sizes=(4,),
        reshard_after_forward=2,
        steps=2,
        accumulate="never",
    )
    def test_sharded_training_equals_unsharded(
        self, tree, sizes, reshard_after_forward, steps, accumulate
    ):
        if sizes[-1] % 2 and reshard_after_forward == 2:
            reshard_after_forward = True  # one rank cannot reshard to two
        reference = self._unsharded(tree)
        model = self._sharded(
            tree, world_mesh(*sizes), reshard_after_forward=reshard_after_forward
        )
        self.assertEqual(
            full_params(model),
            list(reference.parameters()),
            "parameters before training",
        )

        contexts = {
            "never": None,
            "reduced": contextlib.nullcontext,
            "unreduced": lambda: unreduced(model),
        }
        self._check_training(model, reference, steps, contexts[accumulate])


class TestStateDictProperties(PropertiesTest):
    def _sharded_over(self, tree, size, seed):
        """Return the model over the first ``size`` ranks; None on the others."""
        mesh = first_ranks_mesh(size)
        return self._sharded(tree, mesh, seed) if self.rank < size else None

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=20)
    @given(
        tree=module_trees(),
        saved_by=st.integers(1, WORLD_SIZE),
        loaded_by=st.integers(1, WORLD_SIZE),
    )
    def test_full_state_dict_fits_any_world_size(self, tree, saved_by, loaded_by):
        """Names and values are those of the unsharded model."""
        reference = self._unsharded(tree, seed=1)
        state = [None]
        if saver := self._sharded_over(tree, saved_by, seed=1):
            full = {
                name: shard.full_tensor()
                for name, shard in get_model_state_dict(saver).items()
            }
            self.assertEqual(full, dict(reference.state_dict()), "saved state")
            state = [{name: tensor.cpu() for name, tensor in full.items()}]
        dist.broadcast_object_list(state)
        if loader := self._sharded_over(tree, loaded_by, seed=2):
            set_model_state_dict(
                loader, state[0], options=StateDictOptions(full_state_dict=True)
            )
            self.assertEqual(
                full_params(loader), list(reference.parameters()), "loaded parameters"
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=15)
    @given(
        tree=module_trees(),
        saved_by=st.integers(1, WORLD_SIZE),
        loaded_by=st.integers(1, WORLD_SIZE),
    )
    def test_sharded_checkpoint_fits_any_world_size(self, tree, saved_by, loaded_by):
        folder = self.shared_folder()
        if saver := self._sharded_over(tree, saved_by, seed=1):
            group = first_ranks_mesh(saved_by).get_group()
            dcp.save(
                get_model_state_dict(saver), checkpoint_id=folder, process_group=group
            )
        dist.barrier()
        if loader := self._sharded_over(tree, loaded_by, seed=2):
            state = get_model_state_dict(loader)
            dcp.load(
                state,
                checkpoint_id=folder,
                process_group=first_ranks_mesh(loaded_by).get_group(),
            )
            set_model_state_dict(loader, state)
            reference = self._unsharded(tree, seed=1)
            self.assertEqual(
                full_params(loader), list(reference.parameters()), "loaded parameters"
            )
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)


class Padding:
    """Extension hooks for plain shards, which pad each shard with ``filler`` and count
    their calls.
    """

    def __init__(self, filler):
        self.filler = filler
        self.gathered = 0

    def attach(self, param):
        shard = param._local_tensor
        shard.fsdp_pre_all_gather = types.MethodType(self._pre(), shard)
        shard.fsdp_post_all_gather = types.MethodType(self._post(param.size()), shard)

    def _pre(self):
        def fsdp_pre_all_gather(
            shard, mesh, outer_size, outer_stride, module, mp_policy
        ):
            rows = -(-outer_size[0] // mesh.size())
            padded = shard.new_full((rows, *outer_size[1:]), self.filler)
            padded[: shard.size(0)] = shard
            return (padded,), outer_size

        return fsdp_pre_all_gather

    def _post(self, size):
        def fsdp_post_all_gather(shard, outputs, outer_size, param_dtype, *, out=None):
            if outer_size != size:
                raise AssertionError(
                    f"a parameter of size {size} got the metadata of one of size "
                    f"{outer_size}"
                )
            self.gathered += 1
            (padded,) = outputs
            if out is not None:
                return None  # the weight is a view of the gathered memory
            return padded[: outer_size[0]], (padded,)

        return fsdp_post_all_gather


class TestExtensionProperties(PropertiesTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @across_ranks(example_timeout_s=20)
    @settings(max_examples=12)
    @given(
        tree=module_trees(),
        sizes=st.sampled_from([(4,), (2, 2)]),
        filler=st.sampled_from([0.0, 1.0, float("inf"), float("nan")]),
        reshard_after_forward=st.booleans(),
    )
    def test_padding_of_an_extension_never_shows(
        self, tree, sizes, filler, reshard_after_forward
    ):
        reference = self._unsharded(tree)
        model = self._sharded(
            tree, world_mesh(*sizes), reshard_after_forward=reshard_after_forward
        )
        padding = Padding(filler)
        params = list(model.parameters())
        for param in params:
            padding.attach(param)
        self._check_training(model, reference, steps=2)
        self.assertGreaterEqual(padding.gathered, 2 * len(params))


if __name__ == "__main__":
    run_tests()
