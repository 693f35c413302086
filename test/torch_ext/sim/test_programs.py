"""Random programs of collectives over random groups match a model of them, and errors name the rank that departs.

A program is drawn from a seed, alike on every rank: operations on random groups, of random kinds, types, sizes and
roots, some asynchronous and waited for later, in any order. The model computes each result in one process. In half of
the programs one rank does one thing differently; then all ranks of that group get an error, and go on. A failure names
the seed: ``TORCH_EXT_PROGRAMS=SEED:1`` runs that program alone.
"""

import os
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")
WORLD_SIZE = 4
OPERATIONS = 12
OPS = dist.ReduceOp
REDUCTIONS = {
    OPS.SUM: torch.add, OPS.MAX: torch.maximum, OPS.MIN: torch.minimum, OPS.PRODUCT: torch.mul,
}  # fmt: skip
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast")
KINDS = (*REDUCING, "broadcast", "all_gather", "all_to_all", "barrier")
SIZES = (0, 1, 3, 17, 1000, 1 << 15)  # the last is shared out between ranks
TYPES = (torch.float32, torch.int64, torch.uint8, torch.bfloat16)


@dataclass(frozen=True)
class Operation:
    group: int
    kind: str
    dtype: torch.dtype
    size: int
    reduction: Any
    root: int  # in its group
    asynchronous: bool
    seed: int  # of its inputs


@dataclass(frozen=True)
class Departure:
    """The deviation of one rank: at an operation, in one respect."""

    operation: int
    rank: int
    what: str
    instead: Operation


@dataclass(frozen=True)
class Program:
    groups: list[list[int]]
    operations: list[Operation]
    departure: Departure | None


def draw_program(seed):
    draw = random.Random(seed)
    groups = [list(range(WORLD_SIZE))]
    groups += [sorted(draw.sample(range(WORLD_SIZE), draw.randint(2, WORLD_SIZE))) for _ in range(2)]
    operations = []
    for _ in range(OPERATIONS):
        group = draw.randrange(len(groups))
        operations.append(
            Operation(
                group, draw.choice(KINDS), draw.choice(TYPES), draw.choice(SIZES), draw.choice(list(REDUCTIONS)),
                draw.randrange(len(groups[group])), draw.random() < 0.5, draw.randrange(1 << 30),
            )
        )  # fmt: skip
    return Program(groups, operations, _draw_departure(draw, groups, operations) if seed % 2 else None)


def _draw_departure(draw, groups, operations):
    number = draw.randrange(len(operations))
    one = operations[number]
    respects = {"operation": replace(one, kind=draw.choice([kind for kind in KINDS if kind != one.kind]))}
    if one.kind != "barrier":
        respects["type"] = replace(one, dtype=draw.choice([dtype for dtype in TYPES if dtype != one.dtype]))
        respects["size"] = replace(one, size=one.size + draw.choice((1, 7)))
    if one.kind in REDUCING:
        respects["reduction"] = replace(one, reduction=draw.choice([op for op in REDUCTIONS if op != one.reduction]))
    if one.kind in ROOTED:
        respects["root"] = replace(one, root=(one.root + 1) % len(groups[one.group]))
    what = draw.choice(list(respects))
    return Departure(number, draw.choice(groups[one.group]), what, respects[what])


# The words of the error for each respect in which ranks differ; earlier rows are compared first.
DIFFERENCES = {
    "operation": "the operation",
    "reduction": "the reduction",
    "root": "the root",
    "type": "the element type",
    "size": "the number of elements",
}


def inputs_of(one, members):
    """The inputs of all members, ``[members, elements]``: 1 or 2, exact in every type for every reduction."""
    parts = members if one.kind in ("reduce_scatter", "all_to_all") else 1
    generator = torch.Generator().manual_seed(one.seed)
    return torch.randint(1, 3, (members, parts * one.size), generator=generator).to(one.dtype)


def model(one, members, me):
    """The output of a member of the group; ``None`` if it is unspecified."""
    rows = inputs_of(one, members)
    if one.kind == "barrier" or (one.kind == "reduce" and me != one.root):
        return None
    if one.kind == "broadcast":
        return rows[one.root]
    if one.kind == "all_gather":
        return rows.flatten()
    if one.kind == "all_to_all":
        return rows.view(members, members, one.size)[:, me].flatten()
    total = rows[0].clone()
    for row in rows[1:]:
        total = REDUCTIONS[one.reduction](total, row)
    return total.view(members, one.size)[me] if one.kind == "reduce_scatter" else total


def begin(one, group, ranks_of, me):
    mine = inputs_of(one, len(ranks_of))[me].to("sim")
    root, later = ranks_of[one.root], one.asynchronous
    sizes = {"all_gather": one.size * len(ranks_of), "reduce_scatter": one.size, "all_to_all": mine.numel()}
    out = torch.full((sizes.get(one.kind, 0),), 7, dtype=one.dtype, device="sim")
    calls = {
        "barrier": lambda: dist.barrier(group, async_op=later),
        "all_reduce": lambda: dist.all_reduce(mine, one.reduction, group, later),
        "reduce": lambda: dist.reduce(mine, root, one.reduction, group, later),
        "broadcast": lambda: dist.broadcast(mine, root, group, later),
        "all_gather": lambda: dist.all_gather_into_tensor(out, mine, group, later),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, mine, one.reduction, group, later),
        "all_to_all": lambda: dist.all_to_all_single(out, mine, group=group, async_op=later),
    }
    return out if one.kind in sizes else mine, calls[one.kind]()


def run_program(seed, rank):  # noqa: C901
    program = draw_program(seed)
    departure = program.departure
    groups = [dist.new_group(members, backend="simccl") for members in program.groups]
    waiting = []
    draw = random.Random(f"{seed} {rank}")  # each rank decides for itself when to wait

    def finish(number, begun):
        out, work = begun
        members = program.groups[program.operations[number].group]
        try:
            if work is not None:
                work.wait()
                SIM.current_stream().synchronize()  # waiting orders the stream, which is where an error shows
        except RuntimeError as error:
            message = str(error)
        else:
            message = ""
        if departure is not None and number == departure.operation:
            check_error(message, rank, departure, members)
            return
        assert message == "", (number, message)
        expected = model(program.operations[number], len(members), members.index(rank))
        assert expected is None or (out is not None and torch.equal(out.cpu(), expected)), (number, out, expected)

    for number, one in enumerate(program.operations):
        members = program.groups[one.group]
        if rank not in members:
            continue
        departs = departure is not None and (number, rank) == (departure.operation, departure.rank)
        chosen = departure.instead if departs and departure is not None else one
        try:
            begun = begin(chosen, groups[one.group], members, members.index(rank))
        except RuntimeError as error:
            assert departure is not None and number == departure.operation, (number, error)
            check_error(str(error), rank, departure, members)
            continue
        waiting.append((number, begun))
        while waiting and draw.random() < 0.4:
            finish(*waiting.pop(draw.randrange(len(waiting))))
    draw.shuffle(waiting)
    for number, begun in waiting:
        finish(number, begun)
    for members, group in zip(program.groups, groups, strict=True):
        if rank in members:
            dist.destroy_process_group(group)


def check_error(text, rank, departure, members):
    assert f"simccl on rank {rank}: " in text, (departure, text)
    if departure.what == "size" and departure.instead.kind == "all_to_all":
        assert "ranks disagree in the number of elements: " in text and f"rank {departure.rank} called " in text, text
        return
    assert f"ranks disagree in {DIFFERENCES[departure.what]}: rank {rank} called " in text, (departure, text)
    others = [other for other in members if other != rank]
    named = [departure.rank] if rank != departure.rank else others
    assert any(f"; rank {other} called " in text for other in named), (departure, text)


def _run_programs(rank, world_size, first, count):
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    for seed in range(first, first + count):
        try:
            run_program(seed, rank)
        except Exception as error:
            error.add_note(f"in program {seed}: TORCH_EXT_PROGRAMS={seed}:1")
            raise


def test_programs_match_their_model(transport, request):
    usual = 2000 if request.config.getoption("--long", default=False) else 60 if transport == "shared" else 12
    first, _, count = os.environ.get("TORCH_EXT_PROGRAMS", f"0:{usual}").partition(":")
    ranks.run(WORLD_SIZE, _run_programs, int(first), int(count), backend="simccl")
