"""What torch's flight recorder shows of ``simccl``: the operations that a program called, not what carried their bytes.

See Note [Flight records] in csrc/flight_record.h. Other backends' entries stay as they are; those of the gloo that
carries ``simccl`` are left out. An operation's group is described as the group's ``sim`` half, because a group with a
backend for host tensors too counts those apart. Transfers between two ranks are not recorded, nor are stacks.
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
_TRANSPORT = "simccl/transport"  # kTransportDescription in csrc/flight_record.h


@dataclass(frozen=True)
class RecordedOperation:
    """An operation of ``simccl``.

    Attributes:
        name: such as ``"all_reduce"``, as NCCL's entries have it.
        group: name of its group.
        description: of its group; empty or ``"undefined"`` without one.
        sequence: its number among the collectives of its group, from 1.
        begun_ns: when it was launched, in nanoseconds since 1970.
        finished_ns: when it was over on this rank, be it by an error; 0 if it is not.
    """

    name: str
    group: str
    description: str
    sequence: int
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    output_sizes: list[list[int]]
    output_dtypes: list[str]
    begun_ns: int
    finished_ns: int

    def as_entry(self) -> Entry:
        """Return an entry as the recorder has them."""
        described = self.description not in ("", "undefined")
        over = self.finished_ns > 0
        return {
            "frames": [],
            "record_id": self.sequence,
            "pg_id": 0,
            "process_group": (self.group, f"{self.description}, {NAME}" if described else NAME),
            "collective_seq_id": self.sequence,
            "op_id": self.sequence,
            "profiling_name": f"simccl:{self.name}",
            "input_sizes": self.input_sizes,
            "input_dtypes": self.input_dtypes,
            "output_sizes": self.output_sizes,
            "output_dtypes": self.output_dtypes,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "state": "completed" if over else "scheduled",
            "retired": over,
            "time_created_ns": self.begun_ns,
            "time_discovered_started_ns": self.begun_ns,
            "time_discovered_completed_ns": self.finished_ns if over else None,
            "timeout_ms": 0,
            "thread_id": "",
            "thread_name": "",
        }


def install() -> None:
    """Make torch's functions that read the recorder show ``simccl``'s operations. Called once."""
    for name, read, write in (("_dump_fr_trace_json", json.loads, _to_json), ("_dump_fr_trace", pickle.loads, _pickle)):
        dump = getattr(c10d, name, None)
        if dump is not None:
            setattr(c10d, name, _translating(dump, read, write))


def translate(entries: Iterable[Entry], operations: Iterable[RecordedOperation]) -> list[Entry]:
    """Return the entries in order of time, with operations in the place of what carried them."""
    others = [entry for entry in entries if entry["process_group"][1] != _TRANSPORT]
    made = [operation.as_entry() for operation in operations]
    return sorted([*others, *made], key=lambda entry: int(entry["time_created_ns"]))


def _translating(
    dump: Callable[..., bytes], read: Callable[[bytes], Entry], write: Callable[[Entry], bytes]
) -> Callable[..., bytes]:
    @functools.wraps(dump)
    def wrapped(*args: Any, **kwargs: Any) -> bytes:
        # Read the recorder first: the operations of all transfers that it has seen are known by then, except for one
        # that is just starting.
        trace = read(dump(*args, **kwargs))
        operations = [RecordedOperation(**operation) for operation in _native.recorded_operations()]
        if operations or "entries" in trace:
            trace["entries"] = translate(trace.get("entries", []), operations)
        return write(trace)

    return wrapped


def _to_json(trace: Entry) -> bytes:
    return json.dumps(trace).encode()


def _pickle(trace: Entry) -> bytes:
    return pickle.dumps(trace, protocol=2)
