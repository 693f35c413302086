# Owner(s): ["oncall: distributed"]
"""The items that a checkpoint's planners write and read: values of every kind, each
once, and plans kept between saves.
"""

import sys

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class PlannerTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def sharded(self, start, rows=5):
        whole = torch.arange(start, start + 2.0 * rows, device=self.device).view(
            rows, 2
        )
        return distribute_tensor(whole, world_mesh(2), [Shard(0)])


class TestSavePlan(PlannerTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_values_of_every_kind(self):
        """Tensors, shards, numbers, texts and nothing, within dictionaries, lists and
        tuples.
        """

        def state(start, number, text):
            tensor = torch.full((2,), float(number), device=self.device)
            return {
                "nested": {
                    "list": [tensor, number, {"deep": self.sharded(start)}],
                    "tuple": (tensor.clone(), text),
                },
                "number": number,
                "text": text,
                "nothing": None,
                "bytes": text.encode(),
            }

        folder = self.shared_folder()
        dcp.save(state(0.0, 3, "saved"), checkpoint_id=folder)
        found = state(100.0, 7, "other")
        dcp.load(found, checkpoint_id=folder)
        expected = state(0.0, 3, "saved")
        for name in ("number", "text", "nothing", "bytes"):
            self.assertEqual(found[name], expected[name], name)
        (tensor, number, deep), (twin, text) = (
            found["nested"]["list"],
            found["nested"]["tuple"],
        )
        threes = torch.full((2,), 3.0, device=self.device)
        self.assertEqual((tensor, number), (threes, 3), "within the list")
        self.assertEqual(
            deep["deep"].full_tensor(),
            self.sharded(0.0).full_tensor(),
            "shards within the list",
        )
        self.assertEqual((twin, text), (threes, "saved"), "within the tuple")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_entries_common_to_all_ranks_are_written_once(self):
        """Replicated values are written by any rank, or by the first if asked."""
        self.run_subtests({"lowest": [False, True]}, self._test_written_once)

    def _test_written_once(self, lowest):
        whole = torch.arange(8.0, device=self.device)
        state = {
            f"replica_{index}": distribute_tensor(whole, world_mesh(2), [Replicate()])
            for index in range(4)
        }
        state["plain"] = whole.clone()
        folder = self.shared_folder()
        dcp.save(
            state,
            checkpoint_id=folder,
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=lowest),
        )
        metadata = FileSystemReader(folder).read_metadata()
        self.assertEqual(
            sorted(index.fqn for index in metadata.storage_data),
            sorted(state),
            "tensors written",
        )
        writers = {
            place.relative_path.split("_")[2]
            for place in metadata.storage_data.values()
        }
        self.assertEqual(
            sorted(writers), ["0"] if lowest else ["0", "1"], "ranks that write"
        )

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
            folder = self.shared_folder()
            plans.clear()
            dcp.save(
                state, checkpoint_id=folder, planner=Noting(enable_plan_caching=True)
            )
            self.assertEqual(plans, [sent], f"{sorted(state)}: sends its plan")
            found = {name: torch.zeros_like(each) for name, each in state.items()}
            dcp.load(found, checkpoint_id=folder)
            for name, each in state.items():
                pair = [
                    part.full_tensor() if isinstance(part, DTensor) else part
                    for part in (found[name], each)
                ]
                self.assertEqual(*pair, f"saved {name}", atol=0, rtol=0)

        save_and_check({"sharded": self.sharded(0.0)}, True)
        save_and_check({"sharded": self.sharded(50.0)}, False)
        own = {f"own_of_{self.rank}": torch.ones(3)} if self.rank else {}
        save_and_check({"sharded": self.sharded(70.0), **own}, bool(own))
        save_and_check({"sharded": self.sharded(90.0), **own}, False)
        save_and_check({"sharded": self.sharded(20.0, rows=6), **own}, True)


class TestLoadPlan(PlannerTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_partial_load(self):
        """A value that the checkpoint lacks is an error that names it, or stays
        unchanged if that is allowed.
        """
        folder = self.shared_folder()
        dcp.save({"saved": self.sharded(0.0)}, checkpoint_id=folder)
        state = {
            "saved": self.sharded(50.0),
            "new": torch.full((2,), 7.0, device=self.device),
        }
        with self.assertRaisesRegex(
            CheckpointException, "Missing key in checkpoint state_dict: new"
        ):
            dcp.load(state, checkpoint_id=folder)
        dcp.load(
            state,
            checkpoint_id=folder,
            planner=DefaultLoadPlanner(allow_partial_load=True),
        )
        self.assertEqual(
            state["saved"].full_tensor(),
            self.sharded(0.0).full_tensor(),
            "saved",
            atol=0,
            rtol=0,
        )
        self.assertEqual(state["new"], torch.full((2,), 7.0, device=self.device), "new")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_sizes_that_differ_are_named(self):
        folder = self.shared_folder()
        dcp.save({"tensor": torch.ones(4)}, checkpoint_id=folder)
        with self.assertRaisesRegex(
            CheckpointException, "Size mismatch between saved .* for tensor"
        ):
            dcp.load({"tensor": torch.ones(5)}, checkpoint_id=folder)


if __name__ == "__main__":
    run_tests()
