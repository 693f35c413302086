"""What torch's flight recorder shows of ``simccl``: the operations that a program called, not what carried their bytes.

See Note [Flight records] in csrc/flight_record.h. Other backends' entries stay as they are. Of ``simccl`` the recorder
has the transport's transfers; an operation takes the place of its first one and is over when all of them are. Its group
is described as the group's ``sim`` half, because a group with a backend for host tensors too counts those apart.
Transfers between two ranks are missing, because gloo does not record them.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d as c10d

from torch_ext.sim import _native
from torch_ext.sim._name import NAME

__all__ = ["RecordedOperation", "install", "translate"]

Entry = dict[str, Any]


@dataclass(frozen=True)
class RecordedOperation:
    """An operation of ``simccl``.

    Attributes:
        transport: what the transport that carried it calls itself, in place of a group's description.
        first: the first of its transfers, by the transport's count.
        last: the last one.
        name: such as ``"all_reduce"``, as NCCL's entries have it.
        group: name of its group.
        description: of its group; empty or ``"undefined"`` without one.
        sequence: its number among the collectives of its group, from 1.
    """

    transport: str
    first: int
    last: int
    name: str
    group: str
    description: str
    sequence: int
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    output_sizes: list[list[int]]
    output_dtypes: list[str]

    def as_entry(self) -> Entry:
        """Return what an entry of the recorder says of this operation."""
        described = self.description not in ("", "undefined")
        return {
            "process_group": (self.group, f"{self.description}, {NAME}" if described else NAME),
            "profiling_name": f"simccl:{self.name}",
            "collective_seq_id": self.sequence,
            "input_sizes": self.input_sizes,
            "input_dtypes": self.input_dtypes,
            "output_sizes": self.output_sizes,
            "output_dtypes": self.output_dtypes,
        }


def install() -> None:
    """Make torch's functions that read the recorder show ``simccl``'s operations. Called once."""
    for name, read, write in (("_dump_fr_trace_json", json.loads, _to_json), ("_dump_fr_trace", pickle.loads, _pickle)):
        dump = getattr(c10d, name, None)
        if dump is not None:
            setattr(c10d, name, _translating(dump, read, write))


def translate(entries: Iterable[Entry], operations: Iterable[RecordedOperation]) -> list[Entry]:
    """Return the entries with transfers replaced by the operations that they belong to, oldest first."""
    owners = {
        (operation.transport, number): operation
        for operation in operations
        for number in range(operation.first, operation.last + 1)
    }
    shown: dict[int, Entry] = {}
    translated = []
    for entry in entries:
        operation = owners.get((entry["process_group"][1], entry["op_id"]))
        if operation is None:
            translated.append(entry)
        elif id(operation) not in shown:
            shown[id(operation)] = {**entry, **operation.as_entry()}
            translated.append(shown[id(operation)])
        elif not entry["retired"]:
            shown[id(operation)].update({name: value for name, value in entry.items() if name in _PROGRESS})
    return translated


_PROGRESS = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")


def _translating(
    dump: Callable[..., bytes], read: Callable[[bytes], Entry], write: Callable[[Entry], bytes]
) -> Callable[..., bytes]:
    @functools.wraps(dump)
    def wrapped(*args: Any, **kwargs: Any) -> bytes:
        # Read the recorder first: the operations of all transfers that it has seen are known by then, except for one
        # that is just starting.
        trace = read(dump(*args, **kwargs))
        if "entries" in trace:
            operations = [RecordedOperation(**operation) for operation in _native.recorded_operations()]
            trace["entries"] = translate(trace["entries"], operations)
        return write(trace)

    return wrapped


def _to_json(trace: Entry) -> bytes:
    return json.dumps(trace).encode()


def _pickle(trace: Entry) -> bytes:
    return pickle.dumps(trace, protocol=2)
