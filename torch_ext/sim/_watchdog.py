"""A watchdog of the groups of ``simccl`` in this process, as NCCL's groups have one.

On where ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` asks for it. Torch's default on GPUs is 3; here, the reports of torch_ext
come before and say more, so that it is 0.

======  ======================================================================================================
value   after the timeout of the group of a collective or a transfer between two ranks
======  ======================================================================================================
``0``   nothing: a wait that blocks the host raises
``1``   abort the group, and end the process by SIGABRT
``2``   abort the group: waits and reads raise NCCL's error, and the process goes on
``3``   end the process by SIGABRT
======  ======================================================================================================

Before that, each rank of the group says through the group's store which collective it came to, and writes its flight
record to the file that ``TORCH_FR_DUMP_TEMP_FILE`` or ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` names, with its rank at the
end. ``torch.distributed.flight_recorder.fr_trace`` reads these. A call has the limit of its group.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import time
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d

from torch_ext.sim import _native
from torch_ext.sim._flight_record import for_readers
from torch_ext.sim._name import NAME
from torch_ext.sim._threads import start_beside

_VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_TEAR_DOWN, _CLEAN_UP, _SKIP_CLEAN_UP = 1, 2, 3
# Seconds between two looks, and for which a rank waits for the states of its peers.
_LOOK_S, _PEERS_S = 0.5, 3.0
_KEY = "simccl/watchdog/"
_started = 0  # the process whose groups are watched: a fork has no such thread

Operation = dict[str, Any]


def start() -> None:
    """Watch this process's groups from now on, if the user asks for it. Raises ValueError for an unknown value."""
    global _started
    text = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "0")
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"{_VARIABLES[0]}={text}: expected 0, 1, 2 or 3")
    if text != "0" and _started != os.getpid():
        _started = os.getpid()
        start_beside("simccl watchdog", partial(_watch, int(text)))


def _watch(mode: int) -> None:
    reported: set[str] = set()
    while True:
        time.sleep(_LOOK_S)
        operations, transfers = _native.recorded_operations(), _native.recorded_transfers()
        for group, (_, store) in list(c10d._world.pg_map.items()):
            name, backend = group.group_name, _backend(group)
            if backend is None or name in reported:
                continue
            own = [each for each in operations if each["group"] == name]
            limit_s = backend.options._timeout.total_seconds()
            begun = own + [each for each in transfers if each["group"] == name]
            late = next((each for each in begun if not each["finished_ns"] and _age_s(each) > limit_s), None)
            with contextlib.suppress(Exception):  # the store is gone, with the rank that served it
                if late is not None:
                    store.set(f"{_KEY}{name}", "timeout")
                elif not store.check([f"{_KEY}{name}"]):
                    continue
                reported.add(name)
                store.set(f"{_KEY}{name}/{dist.get_rank(group)}", json.dumps(own[-1:]))
                _write_record()
            if late is not None:
                reported.add(name)
                _fail(group, store, backend, late, mode, limit_s)


def _backend(group: dist.ProcessGroup) -> _native.ProcessGroupSimCCL | None:
    with contextlib.suppress(RuntimeError):  # the group has none for the device
        found = group._get_backend(torch.device(NAME))
        return found if isinstance(found, _native.ProcessGroupSimCCL) else None
    return None


def _age_s(operation: Operation) -> float:
    return float(time.time_ns() - operation["begun_ns"]) / 1e9


def _fail(
    group: dist.ProcessGroup, store: dist.Store, backend: Any, late: Operation, mode: int, limit_s: float
) -> None:
    rank, name = dist.get_rank(), group.group_name
    kind = late["name"].upper().replace("ALL_TO_ALL", "ALLTOALL_BASE").replace("ALL_", "ALL")
    sizes = [sum(map(prod, late[f"{side}_sizes"])) for side in ("input", "output")]
    error = (
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={late['sequence']}, "
        f"OpType={kind}, NumelIn={sizes[0]}, NumelOut={sizes[1]}, Timeout(ms)={limit_s * 1e3:.0f}) ran for "
        f"{_age_s(late) * 1e3:.0f} milliseconds before timing out."
    )
    _say(error, *_states(group, store, late))
    if mode in (_TEAR_DOWN, _CLEAN_UP):
        _native.fail_operation(name, late["sequence"], late["peer"] >= 0, error)
        backend.abort()
    if mode in (_TEAR_DOWN, _SKIP_CLEAN_UP):
        _say(f"Process group watchdog thread terminated with exception: {error}")
        os.abort()


def _states(group: dist.ProcessGroup, store: dist.Store, late: Operation) -> list[str]:
    """Return which collective each rank of the group came to, in words."""
    found = [f"What the ranks of group {group.group_name} ({group.group_desc}) came to:"]
    if late["peer"] >= 0:
        found.append(f"  rank {dist.get_rank()} is in {late['name']} with rank {late['peer']}")
    end_s = time.monotonic() + _PEERS_S
    for number, rank in enumerate(dist.get_process_group_ranks(group)):
        key, state = f"{_KEY}{group.group_name}/{number}", "does not answer"
        with contextlib.suppress(Exception):  # as above
            while not store.check([key]) and time.monotonic() < end_s:
                time.sleep(_LOOK_S / 10)
            if store.check([key]):
                last = json.loads(store.get(key))
                state = _state(last[0]) if last else "has called no collective"
                behind = late["peer"] < 0 and (not last or last[0]["sequence"] < late["sequence"])
                state += f", and never called #{late['sequence']} {late['name']}" if behind else ""
        found.append(f"  rank {rank} {state}")
    return found


def _state(last: Operation) -> str:
    return f"{'has finished' if last['finished_ns'] else 'is in'} #{last['sequence']} {last['name']}"


def _write_record() -> None:
    place = next((os.environ[name] for name in _FILES if os.environ.get(name)), "")
    if place:
        recorder: Any = _distributed_c10d
        trace = for_readers(pickle.loads(recorder._dump_fr_trace()))
        with open(f"{place}{dist.get_rank()}", "wb") as file:
            pickle.dump(trace, file, 2)


def _say(*lines: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the program has closed its stderr
        print(*lines, sep="\n", file=sys.stderr, flush=True)
