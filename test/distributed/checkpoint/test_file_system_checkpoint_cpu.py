# Owner(s): ["oncall: distributed"]
"""Parts of checkpoints that need no ranks: plans of reads and writes, nested values,
copies for a save in the background, and another process that writes.
"""

import collections
import copy
import dataclasses
import gc
import itertools
import os
import sys
import tempfile
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.checkpoint import (
    _state_dict_stager,
    _traverse,
    default_planner,
    planner_helpers,
    utils,
)
from torch.distributed.checkpoint import staging as stagers
from torch.distributed.checkpoint._dedup_tensors import dedup_tensors
from torch.distributed.checkpoint._experimental import (
    builder,
    checkpoint_process,
    config,
    staging,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.format_utils import DynamicMetaLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from torch_ext.testing._internal.common_utils import TestCase, run_tests, slowTest

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Slotted:
    __slots__ = ("tensor", "twin")


class Listing(list):
    def first(self):
        return self[0]


class Marked(torch.Tensor):
    __slots__ = ("mark",)


class Pickled:
    """Is pickled as the first parts of a call, its state, items and entries."""

    def __init__(self, *found):
        self.found, self.parts = [*found], ()

    def __reduce_ex__(self, protocol):
        return self.parts

    def __setstate__(self, state):
        self.found.append(state)

    def append(self, item):
        self.found.append(item)

    def __setitem__(self, key, value):
        self.found += [key, value]


def noting_copies(asked):
    """Note whether each copy of a storage is asynchronous."""
    copy_ = torch.UntypedStorage.copy_

    def note(target, source, non_blocking=None):
        asked.append(non_blocking)
        return copy_(target, source, non_blocking)

    return mock.patch.object(torch.UntypedStorage, "copy_", note)


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

    def test_items_that_differ(self):
        """Plans are the same if all that an item says is."""
        (item,) = create_default_local_save_plan({"a": torch.ones(2, 3)}, True).items
        data, size, zeros = item.tensor_data, torch.Size([1, 1]), item.index.offset

        def of_chunk(**changes):
            chunk = dataclasses.replace(data.chunk, **changes)
            return {"tensor_data": dataclasses.replace(data, chunk=chunk)}

        changes = [
            {},
            {"type": WriteItemType.SHARD},
            {"index": MetadataIndex("b", zeros)},
            {"index": MetadataIndex("a", size)},
            {"index": MetadataIndex("a", zeros, 1)},
            {"tensor_data": None},
            {"tensor_data": dataclasses.replace(data, size=size)},
            {"tensor_data": dataclasses.replace(data, chunk=None)},
            of_chunk(offsets=size),
            of_chunk(sizes=size),
        ]
        plans = [SavePlan([dataclasses.replace(item, **each)]) for each in changes]
        plans += [SavePlan([]), SavePlan([item] * 2)]
        for one, other in itertools.product(range(len(plans)), repeat=2):
            same = planner_helpers._compare_save_plans(plans[one], plans[other])
            self.assertEqual(same, one == other, f"{one}, {other}")

    def test_plan_of_all_ranks(self):
        """It has hints of where each part is, or keeps the given ones. A value that two
        ranks have is not in two plans.
        """
        plan = create_default_local_save_plan({"a": torch.ones(2), "n": 3}, True)
        given = MetadataIndex("a", [0], 7)
        plan.items[0] = dataclasses.replace(plan.items[0], index=given)
        for options, hint in (({}, 0), ({"rewrite_index_hints": False}, 7)):
            (found,), metadata = create_default_global_save_plan([plan], **options)
            self.assertEqual([item.index.index for item in found.items], [hint, None])
            self.assertEqual(sorted(metadata.state_dict_metadata), ["a", "n"])
        with self.assertRaisesRegex(AssertionError, "fqn not in md"):
            create_default_global_save_plan([plan, plan])
        wrong = dataclasses.replace(plan.items[0], tensor_data=None)
        with self.assertRaisesRegex(AssertionError, "tensor_data is not None"):
            create_default_global_save_plan([SavePlan([wrong])])

    def test_planners(self):
        """A planner starts empty, and knows whether it is the coordinator's and which
        nested values to take apart.
        """
        for made, metadata in (
            (DefaultSavePlanner, None),
            (DefaultLoadPlanner, Metadata({})),
            (_EmptyStateDictLoadPlanner, Metadata({})),
            (DynamicMetaLoadPlanner, None),
        ):
            self.assertEqual(made().mappings, {})
            for options in (
                {},
                {"flatten_sharded_tensors": False},
                {"flatten_state_dict": False},
            ):
                planner, empty = made(**options), made is _EmptyStateDictLoadPlanner
                state = {} if empty else {"d": {"w": torch.ones(2).half()}}
                if made is DynamicMetaLoadPlanner and "flatten_state_dict" in options:
                    state = state["d"]
                with mock.patch.object(
                    default_planner, "_flatten_sharded_tensors", side_effect=dict
                ) as flatten:
                    for each in (True, False):
                        planner.set_up_planner(state, metadata, is_coordinator=each)
                        self.assertEqual(planner.is_coordinator, each, f"{made}")
                calls = 0 if "flatten_sharded_tensors" in options else 2
                self.assertEqual(flatten.call_count, calls)
                flat = options.get("flatten_state_dict", True)
                nested = "d" if "d" in state and not flat else "d.w"
                nested = nested if "d" in state else "w"
                self.assertEqual([*planner.state_dict], [] if empty else [nested])
        found = planner.metadata.state_dict_metadata["w"]
        self.assertEqual((found.properties.dtype, found.size), (torch.half, (2,)))
        with self.assertRaisesRegex(RuntimeError, "only supports loading Tensors"):
            planner.set_up_planner({"n": 3})
        self.assertEqual(DefaultLoadPlanner().original_state_dict, {})
        with self.assertLogs(default_planner.logger, "WARNING") as logs:
            DefaultSavePlanner(dedup_replicated_tensors=False)
        self.assertIn("no longer has any effect", logs.output[0])
        for state, metadata, text in (
            ({"n": 1}, Metadata({}), "not state_dict"),
            ({}, None, "metadata is not None"),
        ):
            with self.assertRaisesRegex(AssertionError, text):
                _EmptyStateDictLoadPlanner().set_up_planner(state, metadata)

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

    def test_copies_of_a_container_are_asynchronous_if_asked(self):
        """So is each, of any container's tensors and of those that a tensor or a
        pickled object has; not by default.
        """
        made = [torch.full((2,), float(i)) for i in range(30)]
        tensors = iter(made)
        parts = [Pickled() for _ in range(4)]
        for count, each in enumerate(parts, 2):
            one, state, item, key, value = itertools.islice(tensors, 5)
            entries = (Pickled, (one,), state, [item], [(key, value)])
            each.parts = entries[:count]
        marked, listing = next(tensors).as_subclass(Marked), Listing()
        marked.mark, marked.other = next(tensors), next(tensors)
        listing.append(next(tensors))
        state = {"parts": parts, "marked": marked, "method": listing.first}
        state |= {next(tensors): (next(tensors), [next(tensors)])}
        stager = StateDictStager()
        for options in ({}, {"non_blocking": True}, {"non_blocking": False}):
            asked = []
            with noting_copies(asked):
                found = stager.stage(state, **options)
            # Of the pickled objects, and of the rest.
            expected = [options.get("non_blocking", False)] * (1 + 2 + 3 + 5 + 7)
            self.assertEqual(asked, expected, f"{options}")
            for count, (one, other) in enumerate(
                zip(found["parts"], parts, strict=True), 2
            ):
                values = [(other.parts[1][0]), *other.parts[2:3]]
                values += [*itertools.chain(*other.parts[3:4])]
                values += [*itertools.chain(*itertools.chain(*other.parts[4:5]))]
                self.assertEqual(one.found, values, f"{count} parts")
                for value in one.found:
                    self.assertFalse(any(value is each for each in made))
            one = found["marked"]
            self.assertIs(type(one), Marked)
            for name in ("mark", "other"):
                pair = getattr(one, name), getattr(marked, name)
                self.assertEqual(*pair, name)
                self.assertNotEqual(*(each.data_ptr() for each in pair), name)
            self.assertEqual(found["method"](), listing[0])
            self.assertIsNot(found["method"](), listing[0])

    def test_objects_that_say_how_to_be_copied(self):
        """An object's own copy counts, and its name is itself; one that has no way to
        be copied is refused.
        """
        stager = StateDictStager()

        class Own:
            def __deepcopy__(self, memo):
                return "a copy"

        class Old:
            __reduce_ex__ = None

            def __reduce__(self):
                return str, ("of old",)

        class Listed(Old):
            pass

        class Never(Old):
            __reduce__ = None

        named, table = Pickled(), {Listed: lambda _: (str, ("of the table",))}
        named.parts = "named"
        with mock.patch.dict(_state_dict_stager.dispatch_table, table):
            found = stager.stage([Own(), named, Old(), Listed()])
        self.assertEqual(found[:1] + found[2:], ["a copy", "of old", "of the table"])
        self.assertIs(found[1], named)
        for parts, text in (((str,), "length: 1"), ((str,) * 6, "length: 6")):
            named.parts = parts
            with self.assertRaisesRegex(RuntimeError, f"return value {text}"):
                stager.stage(named)
        with self.assertRaisesRegex(RuntimeError, "copyable object of type .*Never"):
            stager.stage(Never())
        grown = torch.ones(2)
        stager.stage(grown)
        grown.untyped_storage().resize_(16)
        with self.assertRaisesRegex(AssertionError, "does not match original storage"):
            stager.stage(grown)

    def test_pinned_copies(self):
        """Copies of a size are pinned once, until they are freed; all are of the size
        by default that are larger than a number.
        """
        state = {"large": torch.ones(4), "small": torch.ones(3), "n": torch.ones(())}
        for options, sizes in (({"pin_memory_min_bytes": 16}, [16]), ({}, [16, 12])):
            with (
                mock.patch.object(torch.cuda, "is_available", return_value=True),
                mock.patch.object(_state_dict_stager, "pin_memory_utils") as pins,
            ):
                stager = StateDictStager(pin_memory=True, **options)
                for _ in range(2):
                    found = stager.stage(state)
                self.assertEqual(found, state)
                places = {x.data_ptr(): x.nbytes for x in found.values()}
                expected = {at: n for at, n in places.items() if n in sizes}
                pinned = [call.args for call in pins.pin_memory.call_args_list]
                self.assertEqual(pinned, [*expected.items()])
                pins.unpin_memory.assert_not_called()
                del found
                stager.close()
                gc.collect()
                freed = {call.args[0] for call in pins.unpin_memory.call_args_list}
                self.assertEqual(freed, {*expected})
                StateDictStager(**options).stage(state)
                self.assertEqual(pins.pin_memory.call_count, len(sizes), "not asked")
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=False),
            mock.patch.object(_state_dict_stager, "pin_memory_utils") as pins,
        ):
            with self.assertWarnsRegex(UserWarning, "Ignoring pin_memory"):
                StateDictStager(True).stage(state)
            pins.pin_memory.assert_not_called()

    def test_options_of_stagers(self):
        """A stager copies in a thread, shares the copies and waits for asynchronous
        ones, if asked. A closed one makes no more copies.
        """
        names = ("pinned_memory", "shared_memory", "async_staging", "non_blocking_copy")
        for (made, options), *chosen in itertools.product(
            (
                (stagers.DefaultStager, stagers.StagingOptions),
                (staging.DefaultStager, staging.CheckpointStagerConfig),
            ),
            *[(False, True)] * 4,
        ):
            given = {f"use_{name}": x for name, x in zip(names, chosen, strict=True)}
            pinned, shared, thread, is_async = chosen
            asked, label = [], f"{made}, {given}"
            state = {"x": torch.ones(3), "l": [torch.zeros(2)]}
            with (
                mock.patch.object(torch.accelerator, "is_available") as available,
                mock.patch.object(torch.accelerator, "synchronize") as synchronize,
                mock.patch.object(torch, "Stream", mock.MagicMock()) as stream,
                mock.patch.object(torch.cuda, "is_available", return_value=True),
                mock.patch.object(_state_dict_stager, "pin_memory_utils") as pins,
                noting_copies(asked),
            ):
                available.return_value = False
                if is_async:
                    with self.assertRaisesRegex(AssertionError, "Non-blocking copy"):
                        made(options(**given))
                available.return_value = True
                stager = made(options(**given))
                found = stager.stage(state)
                self.assertEqual(isinstance(found, dict), not thread, label)
                found = found.result() if thread else found
                self.assertEqual(pins.pin_memory.call_count, 2 * pinned, label)
                waits = synchronize.call_count, stream().synchronize.call_count
            expected = int(is_async and not thread), int(is_async and thread)
            self.assertEqual(waits, expected, label)
            self.assertEqual(asked, [is_async] * 2, label)
            self.assertEqual(found, state)
            for one, other in (
                (found["x"], state["x"]),
                (found["l"][0], state["l"][0]),
            ):
                self.assertEqual(one.is_shared(), shared, label)
                self.assertNotEqual(one.data_ptr(), other.data_ptr())
            stager.close()
            if thread:
                with self.assertRaisesRegex(RuntimeError, "after shutdown"):
                    stager.stage(state)

    def test_blocking_stager_keeps_its_copy_if_asked(self):
        """And refuses what is no value of a checkpoint, if asked."""
        state = {"x": torch.ones(2), "n": 3}
        for keeps in (False, True):
            stager, found, pinned = stagers.BlockingAsyncStager(keeps), [], []
            with mock.patch.object(
                torch.Tensor, "pin_memory", lambda x, to=pinned: to.append(x) or x
            ):
                for _ in range(2):
                    found.append(stager.stage(state))
                    self.assertEqual(found[-1], state)
                    state["x"] += 1
            self.assertEqual(found[0]["x"] is found[1]["x"], keeps)
            self.assertEqual(found[0]["x"] is state["x"], False)
            self.assertEqual(len(pinned), int(keeps))
            self.assertFalse(stager.should_synchronize_after_execute)
        alone = stagers._ReplicationStager(None)
        self.assertIs(alone.stage(state), state, "no other rank")
        os.rmdir(alone._storage_dir)
        state["object"] = object()
        stagers.BlockingAsyncStager().stage(state)
        with self.assertRaisesRegex(ValueError, "Unexpected value type"):
            stagers.BlockingAsyncStager(type_check=True).stage(state)

    @slowTest
    def test_checkpoints_of_another_process(self):
        """Saved one after another while training goes on; an error comes out of the
        wait. A part is read where it is asked for.
        """
        options = staging.CheckpointStagerConfig(False, True, True, False)
        limits = checkpoint_process.CheckpointProcessConfig(300, 300)
        settings = {"staging_config": options, "process_config": limits}
        made = builder.make_async_checkpointer(config.CheckpointerConfig(**settings))
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
