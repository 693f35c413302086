"""Torch's flight recorder shows the operations of ``simccl`` that a program called, one entry each."""

import json
import pickle
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional  # here, so that ranks need not load it
from torch.distributed import distributed_c10d as c10d

from test.torch_ext.sim import ranks
from torch_ext.sim import _native


def _x(*sizes):
    return torch.ones(sizes, device="sim")


def _world():
    return c10d._get_default_group()


def _entries():
    """The entries of the recorder, by either of its functions."""
    native = torch._C._distributed_c10d
    as_json = json.loads(native._dump_fr_trace_json()).get("entries", [])
    pickled = pickle.loads(native._dump_fr_trace()).get("entries", [])
    for name in ("profiling_name", "collective_seq_id", "input_sizes", "output_dtypes"):
        assert [entry[name] for entry in as_json] == [entry[name] for entry in pickled], name
    return as_json


# By entry: a call of one of two ranks, its name, and the sizes of its inputs and outputs on rank 0.
CALLS = [
    (lambda rank: dist.all_reduce(_x(3)), "all_reduce", [[3]], [[3]]),
    (lambda rank: dist.reduce(_x(3), 1), "reduce", [[3]], [[3]]),
    (lambda rank: dist.broadcast(_x(2, 2), 0), "broadcast", [[2, 2]], [[2, 2]]),
    (lambda rank: dist.all_gather([_x(3), _x(3)], _x(3)), "all_gather", [[3]], [[3], [3]]),
    (lambda rank: dist.all_gather([_x(1), _x(2)], _x(rank + 1)), "all_gather", [[1]], [[1], [2]]),
    (lambda rank: dist.all_gather_into_tensor(_x(6), _x(3)), "_all_gather_base", [[3]], [[6]]),
    (lambda rank: dist.reduce_scatter_tensor(_x(2), _x(4)), "_reduce_scatter_base", [[4]], [[2]]),
    (lambda rank: dist.reduce_scatter(_x(2), [_x(2), _x(2)]), "reduce_scatter", [[2], [2]], [[2]]),
    (lambda rank: dist.all_to_all_single(_x(4), _x(4)), "all_to_all", [[4]], [[4]]),
    (lambda rank: dist.all_to_all([_x(3), _x(3)], [_x(3), _x(3)]), "all_to_all", [[3], [3]], [[3], [3]]),
    (lambda rank: dist.gather(_x(1), [_x(1), _x(1)] if rank == 0 else None), "gather", [[1]], [[1], [1]]),
    (lambda rank: dist.scatter(_x(1), [_x(1), _x(1)] if rank == 0 else None), "scatter", [[1], [1]], [[1]]),
    (lambda rank: dist.barrier(dist.group.WORLD), "barrier", [], []),
    (lambda rank: dist.all_reduce_coalesced([_x(3), _x(2)]), "allreduce_coalesced", [[3], [2]], [[3], [2]]),
    (
        lambda rank: list(functional.all_gather_into_tensor_coalesced([_x(1), _x(2)], _world())),
        "all_gather_into_tensor_coalesced", [[1], [2]], [[2], [4]],
    ),
    (
        lambda rank: list(functional.reduce_scatter_tensor_coalesced([_x(2), _x(4)], "sum", [0, 0], _world())),
        "reduce_scatter_tensor_coalesced", [[2], [4]], [[1], [2]],
    ),
]  # fmt: skip


@pytest.mark.usefixtures("transport")
@ranks.world_of(2, backend="simccl")
def test_every_collective_has_one_entry_of_its_own(rank, world_size):
    warnings.filterwarnings("ignore", ranks.COALESCED_WARNING, FutureWarning)
    for call, *_ in CALLS:
        call(rank)
    assert not [entry for entry in _entries() if "transport" in entry["process_group"][1]]
    entries = [entry for entry in _entries() if entry["profiling_name"].startswith("simccl:")]
    assert [entry["profiling_name"] for entry in entries] == [f"simccl:{name}" for _, name, *_ in CALLS]
    assert [entry["collective_seq_id"] for entry in entries] == [n + 1 for n in range(len(CALLS))]
    deadline = time.monotonic() + 20
    while not all(entry["retired"] for entry in _entries()):  # set just after the waiting thread wakes
        assert time.monotonic() < deadline
    assert {tuple(entry["process_group"]) for entry in entries} == {(_world().group_name, "default_pg, sim")}
    if rank == 0:
        for (_, name, inputs, outputs), entry in zip(CALLS, entries, strict=True):
            assert (entry["input_sizes"], entry["output_sizes"]) == (inputs, outputs), name
            assert entry["input_dtypes"] == ["Float"] * len(inputs)


@ranks.world_of(2)
def test_entries_distinguish_groups_and_backends(rank, world_size):
    groups = [dist.new_group(backend="simccl", group_desc=desc) for desc in ("ring", None)]
    dist.all_reduce(_x(3), group=groups[0])
    dist.broadcast(_x(5), 0, group=groups[1])
    dist.all_reduce(torch.ones(7))
    dist.all_reduce(_x(1))
    seen = [(e["profiling_name"], *e["process_group"], *e["input_sizes"][0]) for e in _entries() if e["input_sizes"]]
    name = _world().group_name
    assert seen[-4:] == [
        ("simccl:all_reduce", groups[0].group_name, "ring, sim", 3),
        ("simccl:broadcast", groups[1].group_name, "sim", 5),
        ("gloo:all_reduce", name, "default_pg", 7),
        ("simccl:all_reduce", name, "default_pg, sim", 1),
    ]


def _check_capacity(rank, world_size, kept):
    for _ in range(5):
        dist.all_reduce(_x(1))
    assert [operation["sequence"] for operation in _native.recorded_operations()] == [5 - n for n in range(kept)][::-1]
    assert len(_entries()) == kept


@pytest.mark.parametrize("size", [0, 3])
def test_capacity_is_that_of_the_recorder(size, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", str(size))
    ranks.run(1, _check_capacity, size)
