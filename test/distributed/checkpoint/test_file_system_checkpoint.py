# Owner(s): ["oncall: distributed"]
"""Parts of tensors: plans that write and read any of them, and checkpoints of
ShardedTensors, parts of parts and the state of FSDP1's optimizers among them.
"""

import contextlib
import io
import itertools
import math
import os
import random
import sys
import time
from unittest import mock

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint import utils
from torch.distributed.checkpoint._checkpointer import _Checkpointer
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._traverse import print_tensor, traverse_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _create_default_local_metadata,
    _validate_global_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import TensorProperties as SavedProperties
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict_from_keys,
    load_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save_state_dict
from torch.distributed.checkpoint.utils import (
    _assert_same_keys,
    _DistWrapper,
    find_state_dict_object,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor import distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, get_devtype, world_mesh
from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def sharded(parts, size, group=None):
    """Return a ShardedTensor without communication. ``parts`` has offsets, sizes, the
    owner and, if that is this rank, the values of each.
    """
    shards, places = [], []
    local = next(values for *_, values in parts if values is not None)
    for offsets, sizes, owner, values in parts:
        places.append(
            ShardMetadata([*offsets], [*sizes], f"rank:{owner}/{local.device}")
        )
        if values is not None:
            shards.append(Shard(values, places[-1]))
    whole = ShardedTensorMetadata(places, torch.Size(size), TensorProperties())
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, whole, process_group=group
    )


def boxes(size, draw, cuts):
    """Return offsets and sizes of the parts that ``cuts`` random cuts make."""
    found = [([0] * len(size), [*size])]
    for _ in range(cuts):
        offsets, sizes = found.pop(draw.randrange(len(found)))
        dim = draw.randrange(len(size))
        at = draw.randint(0, sizes[dim])
        for start, length in ((0, at), (at, sizes[dim] - at)):
            if length:
                moved, cut = [*offsets], [*sizes]
                moved[dim], cut[dim] = offsets[dim] + start, length
                found.append((moved, cut))
    return found


def part(whole, offsets, sizes):
    return whole[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def stored(size, parts):
    """Return what the metadata of a checkpoint has of a tensor."""
    chunks = [chunk(*each) for each in parts]
    return TensorStorageMetadata(SavedProperties(), torch.Size(size), chunks)


class TestValidateGlobalPlan(TestCase):
    """Random parts of tensors of up to three dimensions."""

    def _drawn(self, seed):
        draw = random.Random(seed)
        return draw, [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]

    def _changed(self, parts, draw):
        """Drop a part, repeat it, move it, or let it grow."""
        at, change = draw.randrange(len(parts)), draw.choice("drmg")
        offsets, sizes = map(list, parts[at])
        if change in "dmg" and len(parts) > 1:
            parts.pop(at)
        dim = draw.randrange(len(sizes))
        if change == "m":
            offsets[dim] += draw.choice((1, -1))
        elif change == "g":
            sizes[dim] += 1
        if change != "d":
            parts.append((offsets, sizes))

    def test_parts_that_do_not_fit(self):
        """Validation names each part that exceeds the tensor, each pair that overlaps,
        and, if several ranks write, a tensor that is not filled.
        """
        texts = ("out of bounds chunk", "overlapping chunks", "invalid fill")
        for seed in range(120):
            draw, size = self._drawn(seed)
            parts = boxes(size, draw, 4)
            for _ in range(draw.randint(0, 2)):
                self._changed(parts, draw)
            draw.shuffle(parts)
            outside = sum(
                any(a < 0 or a + n > s for a, n, s in zip(*each, size, strict=True))
                for each in parts
            )
            pairs = sum(
                all(
                    max(a, b) < min(a + n, b + m)
                    for a, n, b, m in zip(*one, *other, strict=True)
                )
                for one, other in itertools.combinations(parts, 2)
            )
            volume = sum(math.prod(sizes) for _, sizes in parts)
            for ranks in (1, 2):
                unfilled = int(ranks > 1 and volume != math.prod(size))
                state = {"n": BytesStorageMetadata(), "w": stored(size, parts)}
                state["scalar"] = stored((), [((), ())])
                plans = [SavePlan([])] * ranks
                errors = _validate_global_plan(plans, Metadata(state))
                found = [sum(text in each for each in errors) for text in texts]
                label = f"seed {seed}: {size}, {parts}"
                self.assertEqual(found, [outside, pairs, unfilled], label)
                self.assertEqual([each for each in errors if "key:w " not in each], [])

    def test_reads(self):
        """Reads fill any parts from any saved ones, each element once."""
        for seed in range(120):
            draw, size = self._drawn(seed)
            size = size if seed % 9 else []
            saved, wanted = (boxes(size, draw, 4 if size else 0) for _ in range(2))
            draw.shuffle(saved)
            draw.shuffle(wanted)
            wanted = wanted[: draw.randint(0, len(wanted))]
            whole = torch.arange(float(math.prod(size))).view(size)
            found = [torch.full(sizes, -1.0) for _, sizes in wanted]
            items = create_read_items_for_chunk_list(
                "w", stored(size, saved), [chunk(*each) for each in wanted]
            )
            for item in items:
                source, target = item.storage_index, item.dest_index
                self.assertEqual((source.fqn, target.fqn), ("w", "w"))
                self.assertEqual([*source.offset], saved[source.index][0])
                self.assertEqual([*target.offset], wanted[target.index][0])
                values = part(whole, *saved[source.index])
                values = part(values, item.storage_offsets, item.lengths)
                into = part(found[target.index], item.dest_offsets, item.lengths)
                into.copy_(values)
            expected = [part(whole, *each) for each in wanted]
            self.assertEqual(found, expected, f"seed {seed}: {saved}, {wanted}")
            read = sum(math.prod(item.lengths) for item in items)
            self.assertEqual(read, sum(each.numel() for each in found), "elements read")

    def test_replicas_are_written_once(self):
        """The lowest rank that has a replica writes it if asked, else ranks share the
        bytes. Each keeps its order, and the plans passed in stay as they were.
        """
        for seed in range(40):
            draw = random.Random(seed)
            sizes = {f"{i}": draw.randint(1, 40) for i in range(8)}
            names = [
                {*sizes} if seed % 2 else {*draw.sample([*sizes], draw.randint(1, 8))}
                for _ in range(3)
            ]
            plans = [
                create_default_local_save_plan(
                    {name: torch.empty(n) for name, n in sizes.items() if name in own},
                    True,
                )
                for own in names
            ]
            for lowest in (False, True):
                found = [
                    [item.index.fqn for item in plan.items]
                    for plan in dedup_save_plans(plans, lowest)
                ]
                written = sorted(itertools.chain(*found))
                self.assertEqual(written, sorted(set().union(*names)), "each once")
                for rank, own in enumerate(found):
                    self.assertEqual(own, sorted(own), "order")
                    self.assertEqual({*own} - names[rank], set(), "what the rank has")
                    earlier = set().union(*names[:rank]) & {*own}
                    self.assertEqual(earlier if lowest else set(), set(), "first rank")
                loads = [sum(sizes[name] for name in own) for own in found]
                if seed % 2 and not lowest:
                    self.assertLessEqual(max(loads) - min(loads), max(sizes.values()))
            kept = [{item.index.fqn for item in plan.items} for plan in plans]
            self.assertEqual(kept, names, "plans before")


class TestDistributedReshardOnLoad(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _cut(self, whole, draw):
        """Return a ShardedTensor of ``whole``; each rank has parts."""
        found = boxes(whole.shape, draw, 3)
        while len(found) < 2:
            found = boxes(whole.shape, draw, 3)
        draw.shuffle(found)
        return sharded(
            [
                (
                    *box,
                    i % 2,
                    part(whole, *box).contiguous() if i % 2 == self.rank else None,
                )
                for i, box in enumerate(found)
            ],
            whole.shape,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_load_with_different_shard_plan(self):
        """A checkpoint of any parts loads into any others, and into whole tensors. Each
        rank can predict its metadata.
        """
        for seed in range(3):
            draw, folder = random.Random(seed), self.shared_folder()
            size = [(5, 4), (3, 2, 4), (7,)][seed]
            whole = torch.randn(size, generator=torch.Generator().manual_seed(seed))
            whole = whole.to(self.device)
            saved, empty = self._cut(whole, draw), torch.zeros_like(whole)
            state = {"in": {"sharded": saved}, "plain": whole, "text": "some"}
            dcp.save(state, checkpoint_id=folder)
            written = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            state = {"in.sharded": saved, "plain": whole, "text": "some"}
            expected = _create_default_local_metadata(state).state_dict_metadata
            for each in (written, expected):
                each["in.sharded"].chunks.sort(key=lambda chunk: chunk.offsets)
            self.assertEqual(written, expected, f"metadata of {seed}")
            other = self._cut(empty, draw)
            found = {"in": {"sharded": other}, "plain": empty.clone(), "text": ""}
            dcp.load(found, checkpoint_id=folder)
            self.assertIs(found["in"]["sharded"], other)
            for shard in other.local_shards():
                place = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                self.assertEqual(shard.tensor, part(whole, *place), f"part of {seed}")
            self.assertEqual((found["plain"], found["text"]), (whole, "some"))
            found = {"in": {"sharded": empty}}
            dcp.load(found, checkpoint_id=folder)
            self.assertEqual(empty, whole, f"whole of {seed}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ranks_without_collectives_end_together(self):
        """A save or load without a plan of all ends when the last rank is done."""
        folder, rank = self.shared_folder(), self.rank

        class Writer(dcp.FileSystemWriter):
            def finish(self, **kwargs):
                time.sleep(0.1 * rank)
                super().finish(**kwargs)

        class Reader(dcp.FileSystemReader):
            def read_data(self, *args):
                time.sleep(0.1 * rank)
                os.mkdir(os.path.join(folder, f"read by {rank}"))
                return super().read_data(*args)

        state = {"w": torch.full((2,), float(rank), device=self.device), "n": rank}
        dcp.save(state, storage_writer=Writer(folder), use_collectives=False)
        names = [f"__{each}.metadata" for each in range(2)]
        self.assertEqual([*map(os.listdir(folder).count, names)], [1, 1], "saved")
        found = {"w": torch.zeros_like(state["w"]), "n": None}
        dcp.load(found, storage_reader=Reader(folder))
        self.assertEqual(found, state)
        names = [f"read by {each}" for each in range(2)]
        self.assertEqual([*map(os.listdir(folder).count, names)], [1, 1], "loaded")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_profile(self):
        """If asked, the first rank prints where the time of a call went, or of a part
        until its error.
        """
        state = {"w": torch.ones(2, device=self.device)}
        writer = dcp.FileSystemWriter(self.shared_folder())
        reader, before = dcp.FileSystemReader(writer.path), sys.getprofile()
        calls = (
            lambda: dcp.save(state, storage_writer=writer),
            lambda: save_state_dict(state, writer),
            lambda: dcp.load(state, storage_reader=reader),
            lambda: load_state_dict(state, reader),
            lambda: dcp.load({"none": 1}, storage_reader=reader),
        )
        for asked, call in itertools.product((True, False), calls):
            printed = io.StringIO()
            with (
                mock.patch.object(utils, "ENABLE_PROFILE", asked),
                contextlib.redirect_stdout(printed),
                contextlib.suppress(CheckpointException),
            ):
                call()
            text = printed.getvalue()
            for part in ("Ordered by: internal time", "to 10 due to restriction"):
                self.assertEqual(part in text, asked and self.rank == 0, part)
            self.assertIs(sys.getprofile(), before)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gap_is_refused(self):
        """A save names each tensor that lacks a part."""
        own = torch.ones(3, device=self.device)
        parts = ([0], [3], self.rank, own), ([3], [2], 1 - self.rank, None)
        text = "key:w0 invalid fill tensor-volume: 5 chunks-volume: 3"
        for count in (1, 20):
            state = {f"w{i}": sharded(parts, [5]) for i in range(count)}
            with self.assertRaisesRegex(CheckpointException, text) as caught:
                dcp.save(state, checkpoint_id=self.shared_folder())
            message = f"{caught.exception}"
            self.assertEqual(
                ("w1" in message, "truncated" in message), (count > 1,) * 2
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parts_are_found_by_their_offset(self):
        """A lookup finds a part with a hint, without one, or with a wrong one."""
        whole = torch.arange(8.0, device=self.device).view(4, 2)
        tensor, lines = self._cut(whole, random.Random(1)), []
        shards = tensor.local_shards()
        for own, shard in enumerate(shards):
            offset = shard.metadata.shard_offsets
            for hint in (None, own, 1 - own, len(shards)):
                index = MetadataIndex("a", offset, hint)
                found = find_state_dict_object({"a": tensor}, index)
                self.assertIs(found, shard.tensor, f"{own} of {len(shards)}, {hint}")
        for state, index, text in (
            (tensor, MetadataIndex("a"), "no offset was provided"),
            (tensor, MetadataIndex("a", [3, 3], 0), r"shard at 'torch.Size\(\[3, 3\]"),
            ("text", MetadataIndex("a", [0]), "FQN: 'a' is not a ShardedTensor"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                find_state_dict_object({"a": state}, index)
        state = {"a": tensor, "b": distribute_tensor(whole, world_mesh(2), [DShard(0)])}
        traverse_state_dict(state, lambda *each: print_tensor(*each, lines.append))
        own = [
            f"{each.metadata.shard_offsets}  Tensor size: {each.tensor.shape}"
            for each in shards
        ]
        expected = ["('a',) ShardedTensor size: torch.Size([4, 2])", *own]
        expected.append("('b',) DistributedTensor size: torch.Size([4, 2])")
        self.assertEqual(lines, [*expected, " Tensor size: torch.Size([2, 2])"])

    def _trained(self, seed, steps):
        torch.manual_seed(seed)
        # A rank without a part of a ShardedTensor cannot load in torch 2.13: it looks
        # for CUDA's current device. So each parameter has two rows at least.
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).to(self.device)
        model = FSDP(model, device_id=self.device)
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + seed))
        self._train(model, optimizer, range(steps))
        return model, optimizer

    def _train(self, model, optimizer, steps):
        for step in steps:
            model(self.rows(4, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_load_sharded_optimizer_state_dict(self):
        """An optimizer that was not trained gets all of another's state from a
        checkpoint, and training continues as without a load.
        """
        (model, optimizer), (other, loaded) = self._trained(0, 2), self._trained(1, 0)
        folder = self.shared_folder()
        state = FSDP.optim_state_dict(model, optimizer)
        dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=folder)
        weights = {"model": other.state_dict()}
        dcp.load(weights, checkpoint_id=folder)
        other.load_state_dict(weights["model"])
        reader = dcp.FileSystemReader(folder)
        found = load_sharded_optimizer_state_dict(weights["model"], "optim", reader)
        self.assertEqual(list(found), ["optim"], "parts of the checkpoint")
        for name, each in state["state"].items():
            for key, value in each.items():
                one = found["optim"]["state"][name][key]
                pair = (one, value)
                if isinstance(value, ShardedTensor):
                    self.assertIsInstance(one, ShardedTensor, f"{key} of {name}")
                    pair = [[s.tensor for s in x.local_shards()] for x in pair]
                self.assertEqual(*pair, f"{key} of {name}", exact_device=False)
        flat = FSDP.optim_state_dict_to_load(other, loaded, found["optim"])
        loaded.load_state_dict(flat)
        for each in ((model, optimizer), (other, loaded)):
            self._train(*each, range(2, 4))
        for one, same in zip(other.parameters(), model.parameters(), strict=True):
            self.assertEqual(one, same, "trained on", atol=0, rtol=0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_load_slice_of_tensor_parallel_optimizer(self):
        """A rank reads only its rows of the rows or columns that tensor parallelism
        gives to its group.
        """
        # Torch 2.13 takes ranks of the group for global ones, so the group is the
        # world, and the other slice belongs to the other rank.
        whole = {
            name: torch.arange(start, start + 48.0, device=self.device).view(8, 6)
            for name, start in (("rows", 0), ("columns", 100), ("all", 200))
        }
        state = {name: {"sum": x, "step": x[:1, 0]} for name, x in whole.items()}
        groups, folder = [{"lr": 0.5, "params": [*whole]}], self.shared_folder()
        saved = {"state": state, "param_groups": groups}
        dcp.save({"optim": saved, "model": whole}, checkpoint_id=folder)
        model, slices = {"all": whole["all"]}, {"rows": (0, 5, 3), "columns": (1, 2, 4)}
        for name, (dim, start, size) in slices.items():
            own, offsets, rest = whole[name].narrow(dim, start, size), [0, 0], [8, 6]
            offsets[dim], rest[dim] = start, start
            rows = own.chunk(2)
            inner = [
                ((rank * len(rows[0]), 0), x.shape, rank, x.clone().contiguous())
                for rank, x in enumerate(rows)
            ]
            inner[1 - self.rank] = (*inner[1 - self.rank][:3], None)
            inner = sharded(inner, own.shape, self.process_group)
            outer = ((0, 0), rest, 1 - self.rank, None)
            outer = (outer, (offsets, own.shape, self.rank, inner))
            model[name] = sharded(outer, (8, 6), self.process_group)
        reader = dcp.FileSystemReader(folder)
        found = load_sharded_optimizer_state_dict(model, "optim", reader)["optim"]
        self.assertEqual(found["param_groups"], groups)
        for name, each in whole.items():
            dim, start, size = slices.get(name, (0, 0, 8))
            own = each.narrow(dim, start, size)
            (shard,) = found["state"][name]["sum"].local_shards()
            self.assertEqual(shard.tensor, own.chunk(2)[self.rank], f"rows of {name}")
            self.assertEqual(found["state"][name]["step"], state[name]["step"])


class TestDistributedStateDictSaveLoadWithSharedTensor(FSDPTest):
    """Two data-parallel ranks of two tensor-parallel ones."""

    @property
    def world_size(self):
        return 4

    def _nested(self, whole, groups, dim):
        """Return a tensor whose part, one for each tensor-parallel rank, is sharded in
        rows over the data-parallel ranks.
        """
        dp, tp = divmod(self.rank, 2)
        slices = whole.split((whole.shape[dim] + 1) // 2, dim)
        outer, start = [], 0
        for index, each in enumerate(slices):
            offsets, rows, inner = [0, 0], each.chunk(2), None
            offsets[dim], start = start, start + each.shape[dim]
            if index == tp:
                places = ((0, 0), (len(rows[0]), 0))
                inner = [
                    (place, x.shape, 2 * i + tp, x.clone() if i == dp else None)
                    for i, (place, x) in enumerate(zip(places, rows, strict=True))
                ]
                inner = sharded(inner, each.shape, groups["dp"])
            outer.append((offsets, each.shape, 2 * dp + index, inner))
        return sharded(outer, whole.shape, groups["tp"])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_parts_of_parts(self):
        """A tensor sharded in both parallelisms is saved whole, and loads into one with
        other parts.
        """
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("dp", "tp"))
        groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
        whole = torch.arange(42.0, device=self.device).view(7, 6)
        folder = self.shared_folder()
        state = {f"{dim}": self._nested(whole, groups, dim) for dim in range(2)}
        dcp.save({"list": [state, whole]}, checkpoint_id=folder)
        for dim in range(2):
            empty = torch.zeros_like(whole)
            other = self._nested(empty, groups, 1 - dim)
            dcp.load({"list": [{f"{dim}": other}]}, checkpoint_id=folder)
            pair = (
                x.local_tensor().local_tensor() for x in (other, state[f"{1 - dim}"])
            )
            self.assertEqual(*pair, f"parts of parts, {dim}")
            dcp.load({"list": [{f"{dim}": empty}]}, checkpoint_id=folder)
            self.assertEqual(empty, whole, f"whole, {dim}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_groups_save_on_their_own(self):
        """A group writes and reads its checkpoint without the rest of the world, and so
        does a rank. An error names the rank within the group.
        """
        groups = [dist.new_group(ranks) for ranks in ((0, 3), (1, 2))]
        number, folder = int(self.rank in (1, 2)), self.shared_folder()
        group = groups[number]
        partner = (3, 2, 1, 0)[self.rank]
        for options, ranks in (
            ({"process_group": group}, {self.rank, partner}),
            ({"no_dist": True}, {self.rank}),
        ):
            path = os.path.join(folder, f"{min(ranks)} of {len(ranks)}")
            own = f"of {self.rank}"
            state = {own: torch.ones(2, device=self.device) * self.rank, "all": number}
            found = dcp.save(state, checkpoint_id=path, **options)
            names = {"all", *(f"of {rank}" for rank in ranks)}
            if "no_dist" in options or dist.get_rank(group) == 0:
                self.assertEqual({*found.state_dict_metadata}, names)
            loaded = {own: torch.zeros_like(state[own]), "all": None}
            dcp.load(loaded, checkpoint_id=path, **options)
            self.assertEqual(loaded, state, f"{options}")
        wrapper, rank = _DistWrapper(group, True, 1), dist.get_rank(group)
        ranks = sorted((self.rank, partner))
        self.assertEqual(wrapper.broadcast("step", lambda: self.rank), ranks[1])
        self.assertEqual(wrapper.all_gather("step", lambda: self.rank), ranks)
        self.assertEqual(wrapper.all_reduce("step", lambda: self.rank, list), ranks)
        found = wrapper.reduce_scatter("step", lambda: self.rank, lambda x: x[::-1])
        self.assertEqual((found, wrapper.is_coordinator), (partner, rank == 1))
        with self.assertRaisesRegex(CheckpointException, "division") as caught:
            wrapper.all_gather("step", lambda: 1 / (1 - rank))
        self.assertEqual([*caught.exception.failures], [1])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_every_call_stays_in_its_group_and_asks_its_planners(self):
        """Each way to save and to load concerns the ranks of its group alone, and the
        plan of all is made by the coordinator's planner: the old calls name one.
        """
        group, path = dist.new_group((1, 2), backend="cpu:gloo"), self.shared_folder()
        if self.rank not in (1, 2):
            return  # and waits in the barrier of the world
        asked, own = [], f"of {self.rank}"

        class Save(DefaultSavePlanner):
            def create_global_plan(self, plans):
                asked.append("save")
                return super().create_global_plan(plans)

        class Load(DefaultLoadPlanner):
            def create_global_plan(self, plans):
                asked.append("load")
                return super().create_global_plan(plans)

        saved, loaded = dict.fromkeys((0, 1), 0), dict.fromkeys((0, 1), 0)
        state, index = {own: torch.full((2,), self.rank)}, dist.get_rank(group)
        writer, reader = dcp.FileSystemWriter(path), dcp.FileSystemReader(path)
        checkpointer = _Checkpointer(writer, reader, process_group=group)
        checkpointer.save_planner, checkpointer.load_planner = Save(), Load()
        to, of = {"storage_writer": writer}, {"storage_reader": reader}
        to["process_group"] = of["process_group"] = group
        old = (group, 1, False)
        for coordinator, save in (
            (0, lambda: dcp.save(state, planner=Save(), **to)),
            (0, lambda: dcp.async_save(state, planner=Save(), **to).result()),
            (0, lambda: checkpointer.async_save(state).result()),
            (1, lambda: save_state_dict(state, writer, *old, Save())),
        ):
            state[own] += 10
            save()
            saved[coordinator] += 1
            for coordinator, load in (
                (0, lambda into: dcp.load(into, planner=Load(), **of)),
                (0, checkpointer.load),
                (1, lambda into: load_state_dict(into, reader, *old, Load())),
            ):
                into = {own: torch.zeros(2, dtype=torch.long)}
                load(into)
                loaded[coordinator] += 1
                self.assertEqual(into, state)
            self.assertEqual(_load_state_dict_from_keys(own, **of), state)
            found = asked.count("save"), asked.count("load")
            self.assertEqual(found, (saved[index], loaded[index]), f"rank {index}")
        alone = {"checkpoint_id": f"{path} of {index}", "no_dist": True}
        dcp.async_save(state, process_group=group, **alone).result()
        into = {own: torch.zeros(2, dtype=torch.long)}
        dcp.load(into, process_group=group, **alone)
        self.assertEqual(into, state, "without the group")
        with self.assertRaisesRegex(
            AssertionError, f"difference: {{'of {3 - self.rank}"
        ):
            _assert_same_keys({"same": 1, own: 2}, group)
        _assert_same_keys({"same": self.rank}, group)
        wrapper = _DistWrapper(group, True, 1)
        found = wrapper.get_rank(), wrapper.get_world_size(), wrapper.coordinator_rank
        self.assertEqual(found, (index, 2, 1))
        wrapper = _DistWrapper(group, False, 1)
        self.assertEqual((wrapper.get_rank(), wrapper.get_world_size()), (0, 1))
        self.assertEqual(wrapper.scatter_object([3]), 3)
        self._check_place_of_processes(group, index)

    def _check_place_of_processes(self, group, index):
        """Ranks of a group agree on a place for the processes that write."""
        made, names = executor._ProcessGroupInitInfo, ("USE_PREFIX_STORE",)
        names += ("DISABLE_AUTOMATIC_GC", "DISABLE_MANUAL_GC")
        environ = {"MASTER_ADDR": "host", "MASTER_PORT": "7", "LOCAL_RANK": "5"}
        for chosen in (None, *names):
            asked = {f"DCP_{name}": f"{int(name == chosen)}" for name in names}
            with mock.patch.dict(os.environ, environ | asked):
                info = made(group)
            self.assertEqual(info.use_prefix_store, chosen == names[0])
            self.assertEqual(info.disable_automatic_gc, chosen == names[1])
            self.assertEqual(info.disable_manual_gc, chosen == names[2])
            found = info.local_rank, info.global_rank, info.world_size
            self.assertEqual(found, (5, index, 2))
            self.assertEqual(info.tcp_store_master_addr, "host")
            ports = [None, None]
            dist.all_gather_object(ports, info.tcp_store_master_port, group)
            self.assertEqual(ports[0], ports[1])
            self.assertEqual(ports[0] == 7, chosen == names[0])
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            with (
                mock.patch.dict(os.environ, environ | {"DCP_USE_PREFIX_STORE": "1"}),
                self.assertRaisesRegex(CheckpointException, f"DCP needs {name}"),
            ):
                del os.environ[name]
                made(group)
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(executor, "_get_fq_hostname", return_value="own"),
        ):
            os.environ.pop("MASTER_ADDR", None)
            os.environ.pop("DCP_USE_PREFIX_STORE", None)
            self.assertEqual(made(group).tcp_store_master_addr, "own")


if __name__ == "__main__":
    run_tests()
