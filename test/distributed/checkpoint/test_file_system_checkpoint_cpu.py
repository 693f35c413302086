# Owner(s): ["oncall: distributed"]
"""Parts of checkpoints that need no ranks: plans of reads and writes, nested values,
copies for a save in the background, and another process that writes.
"""

import collections
import copy
import itertools
import os
import sys
import tempfile

import torch
from torch import distributed as dist
from torch.distributed.checkpoint import _traverse, planner_helpers, utils
from torch.distributed.checkpoint._dedup_tensors import dedup_tensors
from torch.distributed.checkpoint._experimental import builder, config, staging
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Slotted:
    __slots__ = ("tensor", "twin")


class Listing(list):
    def first(self):
        return self[0]


class TestPlans(TestCase):
    def test_plans_that_differ(self):
        def made(**state):
            return create_default_local_save_plan(state, True)

        a, b = torch.ones(2, 3), torch.ones(4)
        plans = [made(a=a, b=b, c=1), made(a=a.t(), b=b, c=1), made(a=a, b=2, c=1)]
        plans += [made(a=a, b=b), made(a=a, b=b, c=1, d=1), made(z=a, b=b, c=1)]
        plans += [made(b=b, a=a, c=1)]
        for one, other in itertools.product(range(len(plans)), repeat=2):
            same = planner_helpers._compare_save_plans(plans[one], plans[other])
            self.assertEqual(same, one == other, f"{one}, {other}")
        self.assertTrue(
            planner_helpers._compare_save_plans(plans[0], made(a=a, b=b, c=1))
        )
        # What two ranks would write, the first alone writes.
        twice = dedup_tensors([plans[0], made(a=a, e=2), plans[0]])
        names = [[item.index.fqn for item in each.items] for each in twice]
        self.assertEqual(names, [["a", "b", "c"], ["e"], []])

    def test_nested_values(self):
        """Dictionaries are walked, and lists that hold tensors or dictionaries."""
        one, two = torch.ones(2, 3), torch.ones(2)
        leaves = {
            ("a", 0): 1, ("a", 1): one, ("b", "c"): [1, [2]], ("b", "d", 0, "e"): 5,
            ("b", "d", 1): 6, ("f", 0, 0): two, ("g",): (two, 1), ("h", 0, 1, "i"): 7,
            ("h", 0, 0): [], ("h", 1): [3],
        }  # fmt: skip
        state, seen, lines = {}, {}, []
        for path, value in leaves.items():
            _traverse.set_element(state, path, value)
        self.assertEqual(state["h"], [[[], {"i": 7}], [3]])
        _traverse.traverse_state_dict(state, seen.__setitem__)
        self.assertEqual(seen, leaves)
        seen.clear()
        _traverse.traverse_state_dict(
            state, seen.__setitem__, lambda value: value is two
        )
        self.assertEqual((seen[("a",)], seen[("f", 0, 0)]), ([1, one], two))
        flat, paths = flatten_state_dict(state)
        self.assertEqual(paths, {".".join(map(str, path)): path for path in leaves})
        for name, path in paths.items():
            self.assertIs(flat[name], leaves[path])
            self.assertIs(_traverse.get_element(state, path), leaves[path])
            self.assertEqual(_traverse.get_element(state, (*path, "none"), 5), 5)
        for path in (("a", "c"), ("b", 0), ("none",), ("a", 9)):
            self.assertEqual(_traverse.get_element(state, path, 5), 5, f"{path}")
        _traverse.set_element(state, ("a", 3), 9)
        self.assertEqual(state["a"], [1, one, None, 9])
        _traverse.traverse_state_dict(
            state, lambda *each: _traverse.print_tensor(*each, lines.append)
        )
        self.assertIn("Tensor size: torch.Size([2, 3])", lines[1])
        with self.assertRaisesRegex(ValueError, "duplicated flatten key a.b"):
            flatten_state_dict({"a": {"b": 1}, "a.b": 2})
        found = utils.find_state_dict_object(
            {"a": one}, MetadataIndex("a", torch.Size([0, 0]))
        )
        self.assertIs(found, one)
        for index, text in (
            (MetadataIndex("b"), "Could not find FQN: 'b'"),
            (MetadataIndex("a", torch.Size([1, 0])), "not a ShardedTensor"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                utils.find_state_dict_object({"a": one}, index)


class TestFiles(TestCase):
    def test_staged_copies(self):
        """A copy shares nothing with the state, and within itself what that shares. A
        second copy is made in the same memory.
        """
        base = torch.arange(12.0)
        slotted, listing = Slotted(), Listing([base[2:4], 1])
        slotted.tensor = slotted.twin = base[4:].view(2, 4)
        listing.extra = collections.OrderedDict(one=base[:3], two=(1, "x"))
        state = {"base": base, "view": base.view(3, 4).t(), "list": [listing, listing]}
        state |= {"tuple": (base[1:2], None), "slots": slotted, "set": {1, 2}}
        state |= {"type": int, "method": listing.first, "constants": (1, ("a",))}
        state["self"] = state
        stager, pointer = StateDictStager(), None
        for _ in range(2):
            found = stager.stage(state)
            pointer = pointer or found["base"].data_ptr()
            self.assertNotEqual(pointer, base.data_ptr())
            for name in ("base", "view", "tuple"):
                self.assertEqual(found[name], state[name], name)
            self.assertEqual(found["view"].stride(), (1, 4))
            self.assertIs(found["self"], found)
            one, other = found["list"]
            self.assertIs(one, other)
            self.assertEqual((type(one), [*one]), (Listing, [base[2:4], 1]))
            self.assertEqual(one.extra, listing.extra)
            self.assertIs(type(one.extra), collections.OrderedDict)
            self.assertIs(found["method"].__self__, one)
            self.assertEqual(found["slots"].tensor, slotted.tensor)
            self.assertIs(found["slots"].tensor, found["slots"].twin)
            self.assertEqual((found["set"], found["type"]), ({1, 2}, int))
            self.assertIs(found["constants"], state["constants"])
            parts = (found["base"], found["view"], found["tuple"][0], one[0])
            parts += (one.extra["one"], found["slots"].tensor)
            memory = {each.untyped_storage().data_ptr() for each in parts}
            self.assertEqual(memory, {pointer}, "the staged copy reuses the memory")
            before = found["base"].clone()
            base += 100
            self.assertEqual(found["base"], before, "changed by training")
        shared = StateDictStager(share_memory=True).stage({"x": base})["x"]
        self.assertTrue(shared.is_shared())
        stager.close()
        self.assertEqual(len(stager._cached_storage_mapping), 0)

    def test_checkpoints_of_another_process(self):
        """Saved one after another while training goes on; an error comes out of the
        wait. A part is read where it is asked for.
        """
        options = staging.CheckpointStagerConfig(False, True, True, False)
        made = builder.make_async_checkpointer(
            config.CheckpointerConfig(staging_config=options)
        )
        state = {
            "a": {"w": torch.arange(6.0).view(2, 3)},
            "l": [torch.ones(2), 3],
            "n": 1,
        }
        with tempfile.TemporaryDirectory() as folder:
            expected, paths = [], [os.path.join(folder, name) for name in "01"]
            for path in paths:
                staged, written = made.save(path, state)
                staged.result()
                expected.append(copy.deepcopy(state))
                state["a"]["w"] += 10
                written.result()
            self.assertEqual([*map(made.load, paths)], expected)
            weight = torch.zeros(2, 3)
            part = {"a": {"w": weight}, "l": None, "none": 4}
            found = made.load(path, part)
            del expected[1]["n"]
            self.assertEqual(found, expected[1] | {"none": 4})
            self.assertIs(found["a"]["w"], weight)
            for wrong, options, text in (
                (part, {"strict": True}, r"missing keys: \['none'\]"),
                ({"a": {"w": torch.zeros(3)}}, {}, "does not match .* for key a.w"),
                ({"n": torch.zeros(1)}, {}, "value n is set to"),
            ):
                with self.assertRaisesRegex(RuntimeError, text):
                    made.load(path, wrong, **options)
            with self.assertRaisesRegex(FileNotFoundError, "checkpoint_0.pt"):
                made.load(folder)
            _, written = made.save(os.path.join(path, "checkpoint_0.pt"), state)
            with self.assertRaisesRegex(RuntimeError, "FileExistsError|NotADirectory"):
                written.result()
            made.close()


if __name__ == "__main__":
    run_tests()
