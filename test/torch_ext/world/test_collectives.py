"""Parsing flight records and finding the first mismatched collective, on handwritten records."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from torch_ext.world.outcome import Collective, first_mismatch, read_record


def call(
    sequence: int, operation: str = "gloo:all_reduce", group: str = "0 (default_pg)", over: bool = True
) -> Collective:
    return Collective(group, sequence, operation, "[3] Float", over)


def test_record_is_read_without_point_to_point_operations() -> None:
    entry = {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 4,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[3], [2, 2]],
        "input_dtypes": ["Float", "Long"],
        "state": "scheduled",
        "retired": True,
    }
    found = read_record(json.dumps([entry, {**entry, "is_p2p": True}]))
    assert found == [Collective("0 (default_pg)", 4, "gloo:all_reduce", "[3] Float, [2, 2] Long", True)]
    assert str(found[0]) == "#4 gloo:all_reduce([3] Float, [2, 2] Long) in group 0 (default_pg)"


def test_record_of_a_torch_that_writes_less_is_read_too() -> None:
    assert read_record("") == []
    assert read_record("[{}]") == [Collective("?", 0, "?", "", False)]


def test_odd_one_out_is_guilty_and_halves_are_not() -> None:
    odd = first_mismatch({0: [call(1)], 1: [call(1, "gloo:broadcast")], 2: [call(1)]})
    assert odd is not None and odd.ranks == (1,)
    halves = first_mismatch({0: [call(1)], 1: [call(1, "gloo:broadcast")]})
    assert halves is not None and halves.ranks == ()
    assert first_mismatch({0: [call(1, group="3 (sub)")], 1: []}) is None, "rank 1 may be no member"
    assert first_mismatch({0: [call(1), call(2), call(3)], 1: [call(3)]}) is None, "the ring buffer dropped the others"


@given(
    length=st.integers(0, 8),
    world_size=st.integers(2, 6),
    guilty=st.integers(0, 5),
    at=st.integers(1, 8),
)
def test_same_program_on_every_rank_matches_and_one_that_stops_early_is_found(
    length: int, world_size: int, guilty: int, at: int
) -> None:
    program = [call(number) for number in range(1, length + 1)]
    records = {rank: list(program) for rank in range(world_size)}
    assert first_mismatch(records) is None
    rank = guilty % world_size
    records[rank] = program[: at - 1]
    mismatch = first_mismatch(records)
    assert (mismatch is not None) == (at <= length)
    assert mismatch is None or (mismatch.ranks == (rank,) and f"#{at} " in mismatch.sentence)
