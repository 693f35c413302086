# Owner(s): ["oncall: distributed"]
"""Checkpoints that become others: torch's own files, other file systems, another rank's
memory; and those that were never finished.
"""

import itertools
import os
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._experimental.builder import make_sync_checkpointer
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint._pg_transport import PGTransport
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


KINDS = {
    "files": (FileSystemWriter, FileSystemReader),
    "fsspec": (FsspecWriter, FsspecReader),
}


class TestFormatUtils(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _state(self, start):
        """Return tensors on every rank, uneven parts, strided ones and on the host."""
        whole = torch.arange(start, start + 10.0, device=self.device).view(5, 2)
        return {
            "parts": distribute_tensor(whole, world_mesh(2), [Shard(0)]),
            "nested": {"same": whole[:, 0] + 1, "list": [whole.t() + 2]},
            "host": torch.full((3,), start, dtype=torch.bfloat16),
        }

    def _check(self, found, start, what):
        for one, other in zip(
            *(torch.utils._pytree.tree_leaves(x) for x in (found, self._state(start))),
            strict=True,
        ):
            pair = [
                x.full_tensor() if isinstance(x, DTensor) else x for x in (one, other)
            ]
            self.assertEqual(*pair, what, atol=0, rtol=0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_torch_files(self):
        """A checkpoint becomes a file of torch, and that a checkpoint again; a file is
        also read by one rank for all.
        """
        folder, expected = self.shared_folder(), self._state(1.0)
        file, again = (os.path.join(folder, name) for name in ("file.pt", "again"))
        dcp.save(expected, checkpoint_id=os.path.join(folder, "first"))
        if self.rank == 0:
            dcp_to_torch_save(os.path.join(folder, "first"), file)
            torch_save_to_dcp(file, again)
            saved = torch.load(file)
            self.assertEqual(sorted(saved), ["host", "nested", "parts"])
            parts = torch.arange(1.0, 11.0).view(5, 2)
            self.assertEqual(saved["parts"], parts, "whole tensor in the file")
            self.assertEqual(saved["host"], expected["host"], "type of the file")
        dist.barrier()
        found = self._state(50.0)
        dcp.load(found, checkpoint_id=again)
        self._check(found, 1.0, "checkpoint of a file")
        # Torch 2.13 cannot broadcast to a DTensor, nor to a transposed tensor.
        found = {"nested": {"same": self._state(50.0)["nested"]["same"]}}
        dcp.load(
            found,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
            checkpoint_id=file,
        )
        whole = self._state(1.0)["nested"]["same"]
        self.assertEqual(found["nested"]["same"], whole, "read by one rank")
        found["nested"]["same"].zero_()
        # Only the coordinator needs the file.
        reader = BroadcastingTorchSaveReader(file if self.rank == 1 else "none", 1)
        options = {"coordinator_rank": 1, "planner": DynamicMetaLoadPlanner()}
        _load_state_dict(found, reader, **options)
        self.assertEqual(found["nested"]["same"], whole, "read by the last rank")
        for wrong, text in (
            (reader, "expected 1, got 0"),
            (BroadcastingTorchSaveReader(), "checkpoint_id must be set"),
        ):
            options = {"planner": DynamicMetaLoadPlanner(), "storage_reader": wrong}
            with self.assertRaisesRegex(CheckpointException, text):
                dcp.load(found, **options)
        with self.assertRaisesRegex(CheckpointException, "only supports loading"):
            dcp.load(
                {"text": "none"},
                storage_reader=BroadcastingTorchSaveReader(file),
                planner=DynamicMetaLoadPlanner(),
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_writers(self):
        """Any writer's files are read by any reader of their kind."""
        options = {
            "kind": tuple(KINDS),
            "single_file_per_rank": (False, True),
            "thread_count": (1, 3),
            "per_thread_copy_ahead": (0, 10_000_000),
            "sync_files": (False, True),
        }
        # So little is copied ahead that a file is written between copies.
        little = {name: values[0] for name, values in options.items()}
        little |= {"single_file_per_rank": True, "per_thread_copy_ahead": 16}
        for row in [*pairwise(options), little]:
            writer, reader = KINDS[row.pop("kind")]
            folder = self.shared_folder()
            dcp.save(self._state(1.0), storage_writer=writer(folder, **row))
            files = [name for name in os.listdir(folder) if name.endswith(".distcp")]
            # A rank with one file has one for each thread, else one for each tensor.
            items = len(FileSystemReader(folder).read_metadata().storage_data)
            single = row["single_file_per_rank"]
            most = 2 * row["thread_count"] if single else items
            self.assertIn(len(files), range(2 if single else most, most + 1), f"{row}")
            found = self._state(50.0)
            dcp.load(found, storage_reader=reader(folder))
            self._check(found, 1.0, f"{writer.__name__}, {row}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_interrupted_save_leaves_the_last_checkpoint(self):
        """If a rank cannot write, all raise and name it, and the folder is no
        checkpoint. One in another folder stays; in the same it would have lost a part.
        """
        folder, fresh = self.shared_folder(), self.shared_folder()
        dcp.save(self._state(1.0), checkpoint_id=folder)
        failing = FileSystemWriter(fresh)
        full = OSError("the disk is full") if self.rank == 1 else None
        with (
            mock.patch.object(
                failing, "write_data", side_effect=full, wraps=failing.write_data
            ),
            self.assertRaisesRegex(CheckpointException, r"ranks:dict_keys\(\[1\]"),
        ):
            dcp.save(self._state(9.0), storage_writer=failing)
        found = self._state(50.0)
        dcp.load(found, checkpoint_id=folder)
        self._check(found, 1.0, "the last checkpoint")
        with self.assertRaisesRegex(CheckpointException, "No such file"):
            dcp.load(found, checkpoint_id=fresh)
        with self.assertRaisesRegex(CheckpointException, "overwrite"):
            writer = FileSystemWriter(folder, overwrite=False)
            dcp.save(self._state(9.0), storage_writer=writer)
        shard = next(name for name in os.listdir(folder) if "__1_" in name)
        dist.barrier()
        if self.rank == 0:
            os.remove(os.path.join(folder, shard))
        dist.barrier()
        with self.assertRaisesRegex(CheckpointException, f"No such file.*{shard}"):
            dcp.load(found, checkpoint_id=folder)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_a_rank_gets_the_state_of_another(self):
        """New tensors on the host, or those that are there already."""
        for in_place in (False, True):
            mine = self._state(1.0 if self.rank == 0 else 50.0)
            keep = (lambda mine=mine: mine) if in_place else None
            transport = PGTransport(
                self.process_group, timedelta(seconds=30), self.device, keep
            )
            if self.rank == 0:
                transport.send_checkpoint([1], {"number": 3, **mine})
                continue
            got = transport.recv_checkpoint(0)
            self.assertEqual(got.pop("number"), 3)
            self.assertEqual(got["nested"]["same"].cpu(), torch.arange(2.0, 12.0, 2))
            self.assertEqual(got["host"].dtype, torch.bfloat16)
            self.assertEqual(got["nested"]["list"][0].shape, (2, 5))
            part = got["parts"].to_local().cpu()
            self.assertEqual(part, torch.arange(1.0, 7.0).view(3, 2), "rank 0's part")
            self.assertFalse(got["parts"].requires_grad)
            same = mine["nested"]["same"].data_ptr()
            self.assertEqual(got["nested"]["same"].data_ptr() == same, in_place)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_synchronous_checkpointer(self):
        checkpointer, folder = make_sync_checkpointer(), self.shared_folder()
        checkpointer.save(folder, {"mine": torch.full((2,), float(self.rank)), "n": 4})
        found = checkpointer.load(folder)
        self.assertEqual(found, {"mine": torch.full((2,), float(self.rank)), "n": 4})
        into = {"mine": torch.full((2,), 9.0)}
        found = checkpointer.load(folder, into, strict=False)
        self.assertEqual(found["mine"], torch.full((2,), float(self.rank)))
        checkpointer.close()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_states_go_from_rank_0_to_all(self):
        """A full state on the host is only on rank 0, and all ranks load it from there,
        whole or parts; a frozen parameter is left out if asked, and a name that is
        missing or too many raises.
        """

        def trained(seed, steps):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(self.device)
            fully_shard(model, mesh=world_mesh(2))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + seed))
            for step in range(steps):
                model(self.rows(4, step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model, optimizer

        (model, optimizer), (other, loaded) = trained(0, 2), trained(1, 1)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        self.assertEqual(len(state), 4 if self.rank == 0 else 0)
        self.assertEqual({each.device.type for each in state.values()} - {"cpu"}, set())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, dict(state), options=options)
        set_optimizer_state_dict(other, loaded, dict(states), options=options)
        for name, one in model.named_parameters():
            found = other.get_parameter(name)
            self.assertEqual(found.to_local(), one.to_local(), name)
            for key in ("step", "exp_avg", "exp_avg_sq"):
                pair = loaded.state[found][key], optimizer.state[one][key]
                pair = [getattr(x, "_local_tensor", x).cpu() for x in pair]
                self.assertEqual(*pair, f"{key} of {name}")
        self.assertEqual(loaded.param_groups[0]["lr"], 0.1, "learning rate")
        with torch.no_grad():
            for each in other.parameters():
                each.zero_()
        options = StateDictOptions(full_state_dict=True)
        whole = get_model_state_dict(model, options=options)
        whole = {name: each.cpu() for name, each in whole.items()}
        set_model_state_dict(other, whole, options=options)
        for name, one in model.named_parameters():
            found = other.get_parameter(name).to_local()
            self.assertEqual(found, one.to_local(), f"{name} of a state on all hosts")
        model[0].bias.requires_grad_(False)
        names = get_model_state_dict(
            model, options=StateDictOptions(ignore_frozen_params=True)
        )
        self.assertEqual(sorted(names), ["0.weight", "1.bias", "1.weight"])
        for change, text in (
            ({"1.bias": None}, "Missing key"),
            ({"extra": names["1.bias"]}, "Unexpected key"),
        ):
            wrong = {**get_model_state_dict(model), **change}
            wrong = {name: each for name, each in wrong.items() if each is not None}
            with self.assertRaisesRegex(RuntimeError, text):
                set_model_state_dict(model, wrong)
            found = set_model_state_dict(
                model, wrong, options=StateDictOptions(strict=False)
            )
            self.assertEqual([*itertools.chain(*found)], [*change])


if __name__ == "__main__":
    run_tests()
