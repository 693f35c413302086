# Owner(s): ["oncall: distributed"]
"""The items that a checkpoint's planners write and read: values of every kind, each
once, and plans kept between saves.
"""

import os
import sys

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _assert_same_keys, _DistWrapper
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def whole(value):
    """Return a tensor of whole DTensors, in lists and dictionaries too."""
    return tree_map_only(DTensor, DTensor.full_tensor, value)


class PlannerTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def sharded(self, start, rows=5):
        values = torch.arange(start, start + 2.0 * rows, device=self.device)
        return distribute_tensor(values.view(rows, 2), world_mesh(2), [Shard(0)])

    def check(self, found, expected, label):
        self.assertEqual(whole(found), whole(expected), label, atol=0, rtol=0)


class TestSavePlan(PlannerTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_values_of_every_kind(self):
        """Tensors, shards, numbers, texts and nothing, within dictionaries, lists and
        tuples; of all ranks, or of each alone.
        """

        def state(start, number, text):
            tensor = torch.full((2,), float(number), device=self.device)
            values = [tensor, number, {"deep": self.sharded(start)}]
            nested = {"list": values, "tuple": (tensor.clone(), text)}
            state = {"nested": nested, "number": number, "text": text}
            return {**state, "nothing": None, "bytes": text.encode()}

        for options in ({}, {"use_collectives": False}):
            folder, own = self.shared_folder(), 0.0 if not options else self.rank
            saver, loader = FileSystemWriter(folder), FileSystemReader(folder)
            dcp.save(state(own, 3, "saved"), storage_writer=saver, **options)
            dist.barrier()
            found = state(100.0, 7, "other")
            dcp.load(found, storage_reader=loader)
            self.check(found, state(own, 3, "saved"), f"{options}")
            if options:
                names = [f"__{rank}.metadata" for rank in range(2)]
                self.assertEqual(sorted(set(os.listdir(folder)) & {*names}), names)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_entries_common_to_all_ranks_are_written_once(self):
        """Replicated values are written by any rank, or by the first if asked."""
        values = torch.arange(8.0, device=self.device)
        state = {
            f"replica_{index}": distribute_tensor(values, world_mesh(2), [Replicate()])
            for index in range(4)
        }
        state["plain"] = values.clone()
        for lowest in (False, True):
            folder = self.shared_folder()
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
            dcp.save(state, checkpoint_id=folder, planner=planner)
            data = FileSystemReader(folder).read_metadata().storage_data
            self.assertEqual(sorted(index.fqn for index in data), sorted(state))
            writers = {place.relative_path.split("_")[2] for place in data.values()}
            expected = ["0"] if lowest else ["0", "1"]
            self.assertEqual(sorted(writers), expected, "ranks that write")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_plans_are_kept_while_nothing_changes(self):
        """A second save sends no plan, and saves new values; one that changes on a
        single rank sends that rank's.
        """
        plans = []

        class Noting(DefaultSavePlanner):
            def create_local_plan(self):
                plan = super().create_local_plan()
                plans.append(plan.usable)
                return plan

        def save_and_check(state, sent):
            folder, planner = self.shared_folder(), Noting(enable_plan_caching=True)
            plans.clear()
            dcp.save(state, checkpoint_id=folder, planner=planner)
            self.assertEqual(plans, [sent], f"{sorted(state)}: sends its plan")
            found = {name: torch.zeros_like(each) for name, each in state.items()}
            dcp.load(found, checkpoint_id=folder)
            self.check(found, state, "saved")

        save_and_check({"sharded": self.sharded(0.0)}, True)
        save_and_check({"sharded": self.sharded(50.0)}, False)
        own = {f"own_of_{self.rank}": torch.ones(3)} if self.rank else {}
        save_and_check({"sharded": self.sharded(70.0), **own}, bool(own))
        save_and_check({"sharded": self.sharded(90.0), **own}, False)
        save_and_check({"sharded": self.sharded(20.0, rows=6), **own}, True)


class TestLoadPlan(PlannerTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_partial_load(self):
        """A value that the checkpoint lacks or has in another size is an error that
        names it; the first stays unchanged if that is allowed.
        """
        folder, new = self.shared_folder(), torch.full((2,), 7.0, device=self.device)
        dcp.save({"saved": self.sharded(0.0)}, checkpoint_id=folder)
        state = {"saved": self.sharded(50.0), "new": new.clone()}
        for wrong, text in (
            (state, "Missing key in checkpoint state_dict: new"),
            ({"saved": torch.ones(5)}, "Size mismatch between saved .* for saved"),
        ):
            with self.assertRaisesRegex(CheckpointException, text):
                dcp.load(wrong, checkpoint_id=folder)
        planner = DefaultLoadPlanner(allow_partial_load=True)
        more = {"number": 7, "none": None, "nested": {"list": [1, ("text", 2.5)]}}
        dcp.load(state | more, checkpoint_id=folder, planner=planner)
        expected = {"saved": self.sharded(0.0), "new": new, **more}
        self.check(state | more, expected, "loaded")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_load_into_tensors_without_memory(self):
        """On the meta device, in any containers: they are made on the rank's device."""

        def state(start):
            tensor = torch.arange(start, start + 3, device=self.device)
            nested = {"deep": self.sharded(start), "n": 3, "text": "a", "none": None}
            return {"list": [tensor, nested], "plain": tensor + 1, "sharded": nested}

        def without_memory(tensor):
            if not isinstance(tensor, DTensor):
                return tensor.to("meta")
            shape, stride = tensor.shape, tensor.stride()
            more = {"shape": shape, "stride": stride, "run_check": False}
            local = tensor.to_local().to("meta")
            return DTensor.from_local(local, world_mesh(2), [Shard(0)], **more)

        folder = self.shared_folder()
        dcp.save(state(1.0), checkpoint_id=folder)
        found = tree_map_only(torch.Tensor, without_memory, state(50.0))
        dcp.load(found, checkpoint_id=folder)
        self.check(found, state(1.0), "loaded")
        self.assertEqual(found["sharded"]["deep"].stride(), (2, 1), "stride")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_error_of_one_rank_reaches_all(self):
        """Of what each computes, or the first for all; the error names the rank."""
        wrapper = _DistWrapper(None, True, 0)

        def value(fails):
            if self.rank in fails:
                raise ValueError(f"of rank {self.rank}")
            return self.rank + 1

        def doubled(values):
            if values[0] < 0:
                raise KeyError("negative")
            return [2 * each for each in values]

        calls = {
            "all_reduce": (doubled, [2, 4]),
            "reduce_scatter": (doubled, 2 * (self.rank + 1)),
            "all_gather": (None, [1, 2]),
            "broadcast": (None, 1),
        }
        for name, (reduce, expected) in calls.items():
            run, more = getattr(wrapper, name), [reduce] if reduce else []
            self.assertEqual(run("step", lambda: value(()), *more), expected, name)
            for fails in ((0,), (0, 1), (1,))[: 1 if name == "broadcast" else 3]:
                with self.assertRaisesRegex(CheckpointException, "of rank") as caught:
                    run("step", lambda fails=fails: value(fails), *more)
                self.assertEqual((*caught.exception.failures,), fails, name)
            if reduce:
                with self.assertRaisesRegex(CheckpointException, "negative") as caught:
                    run("step", lambda: -1, *more)
                self.assertEqual([*caught.exception.failures], [0], name)
        own = {"same": 1, f"{self.rank}": 2}
        with self.assertRaisesRegex(AssertionError, f"difference: {{'{1 - self.rank}'"):
            _assert_same_keys(own)


if __name__ == "__main__":
    run_tests()
