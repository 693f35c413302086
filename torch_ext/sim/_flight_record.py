"""Shows ``simccl``'s operations in torch's flight recorder, in place of the gloo transfers that carried their bytes.

See Note [Flight records] in csrc/work.h. Other backends' entries stay as they are; the transport's are left out.
Operations are listed under the group's ``sim`` half, because a host backend in the same group numbers its operations
separately. Transfers between two ranks and stacks are not recorded.

The pages of ``torch.distributed.debug`` ask each rank's server for the recorder by a name that C++ has taken. They ask
for a handler of ours instead.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torch_ext.sim import _native
from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import NAME, REPORTED_BACKEND
from torch_ext.sim._patches import wrap

Entry = dict[str, Any]
# Handlers of torch.distributed.debug, and ours in the place of both.
_OF_TORCH, _OF_SIM = ("fr_trace_json", "dump_nccl_trace_json"), "simccl_fr_trace_json"
_TRANSPORT = "simccl/transport"  # kTransportDescription in csrc/transport/transport.h


def install() -> None:
    """Make torch's functions that read the recorder show ``simccl``'s operations. Called once."""
    if hasattr(c10d, "_dump_fr_trace_json"):
        wrap(c10d, "_dump_fr_trace_json")(
            functools.partial(_dump, json.loads, lambda trace: json.dumps(trace).encode())
        )
    if hasattr(c10d, "_dump_fr_trace"):
        wrap(c10d, "_dump_fr_trace")(functools.partial(_dump, pickle.loads, lambda trace: pickle.dumps(trace, 2)))
    when_imported("torch.distributed.debug", lambda _: _register())
    when_imported("torch.distributed.debug._debug_handlers", _ask_for_ours)


def for_readers(trace: Entry) -> Entry:
    """Name the operations of ``simccl`` as those of NCCL, which torch's readers know."""
    for entry in trace.get("entries", []):
        entry["profiling_name"] = entry["profiling_name"].replace(f"{REPORTED_BACKEND}:", "nccl:")
    return trace


def _register() -> None:
    recorder: Any = c10d

    def answer(_: Any, response: Any) -> None:
        response.set_content(json.dumps(for_readers(json.loads(recorder._dump_fr_trace_json()))), "application/json")
        response.set_status(200)

    recorder._register_handler(_OF_SIM, answer)


def _ask_for_ours(pages: Any) -> None:
    fetch_all = pages.fetch_all

    def fetch(name: str, *args: Any, **kwargs: Any) -> Any:
        return fetch_all(_OF_SIM if name in _OF_TORCH else name, *args, **kwargs)

    pages.fetch_all = fetch


def translate(entries: Iterable[Entry], operations: Iterable[Entry]) -> list[Entry]:
    """Return ``entries`` without the transport's, merged with ``operations`` in order of creation."""
    others = [entry for entry in entries if entry["process_group"][1] != _TRANSPORT]
    made = [_as_entry(operation) for operation in operations]
    return sorted([*others, *made], key=lambda entry: int(entry["time_created_ns"]))


def _dump(
    read: Callable[[bytes], Entry],
    write: Callable[[Entry], bytes],
    dump: Callable[..., bytes],
    *args: Any,
    **kwargs: Any,
) -> bytes:
    # Read the recorder first: the operation of every recorded transfer is known by then, except for one that is just
    # starting.
    trace = read(dump(*args, **kwargs))
    operations = _native.recorded_operations()
    if operations or "entries" in trace:
        trace["entries"] = translate(trace.get("entries", []), operations)
    if "pg_config" in trace:
        trace["pg_config"] = {
            group.group_name: {"name": group.group_name, "desc": group.group_desc, "ranks": str(sorted(ranks))}
            for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items()
        }
    return write(trace)


def _as_entry(operation: Entry) -> Entry:
    """Convert an operation, in the form that csrc/work.h describes, to an entry of the recorder."""
    has_description = operation["description"] not in ("", "undefined")
    is_done = operation["finished_ns"] > 0
    return {
        "frames": [],
        "record_id": operation["sequence"],
        "pg_id": 0,
        "process_group": (operation["group"], f"{operation['description']}, {NAME}" if has_description else NAME),
        "collective_seq_id": operation["sequence"],
        "op_id": operation["sequence"],
        "profiling_name": f"{REPORTED_BACKEND}:{operation['name']}",
        "input_sizes": operation["input_sizes"],
        "input_dtypes": operation["input_dtypes"],
        "output_sizes": operation["output_sizes"],
        "output_dtypes": operation["output_dtypes"],
        "p2p_seq_id": 0,
        "is_p2p": False,
        "state": "completed" if is_done else "scheduled",
        "retired": is_done,
        "time_created_ns": operation["begun_ns"],
        "time_discovered_started_ns": operation["begun_ns"],
        "time_discovered_completed_ns": operation["finished_ns"] if is_done else None,
        "timeout_ms": 0,
        "thread_id": "",
        "thread_name": "",
    }
