"""What held the memory of a rank at its peak, by kind and by line.

The allocator's history says when each block lived, and which lines asked for it. Optimizers say which blocks are
parameters, gradients and states: from the moment of a step on, and backwards to the block's allocation. All others go
by the file that asked for them.
"""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from torch_ext.sim import _memory as memory
from torch_ext.sim import _native
from torch_ext.sim._name import NAME
from torch_ext.sim._patches import wrap
from torch_ext.sim.dry._reads import TORCH, is_of_program, place_in_program

_MOST_LINES = 8

# Kinds of blocks that the innermost file names: the first part of a path below torch's folder that fits.
_OF_FILES = (
    ("distributed/fsdp/_fully_shard/_fsdp_collectives.py", "collective buffers"),
    ("distributed/fsdp/_fully_shard/", "unsharded parameters"),
    ("distributed/fsdp/_flat_param.py", "unsharded parameters"),
    ("distributed/utils.py", "unsharded parameters"),
    ("distributed/", "collective buffers"),
    ("nn/parallel/distributed.py", "collective buffers"),
    ("optim/", "temporaries of the optimizer"),
)


@dataclass
class _Block:
    begin: int  # numbers of events
    size: int
    frames: list[dict[str, Any]]
    end: float = math.inf
    kind: str = ""


class Watch:
    """Follows a program from here on."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, list[int]] = defaultdict(list)  # by device: its events before each step's end
        self._marks: list[tuple[dict[int, int], dict[int, str]]] = []  # events by device, and kinds by address
        self._backwards: list[tuple[dict[int, int], str]] = []  # events by device, and the place of each backward
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._mark(_gradients(optimizer)))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))

        @wrap(torch.autograd, "_engine_run_backward")
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._backwards.append((_events(), place_in_program(sys._getframe())[0]))
            return original(*args, **kwargs)

    def _mark(self, tensors: Iterable[tuple[torch.Tensor, str]]) -> None:
        kinds = {address: kind for tensor, kind in tensors if (address := _address(tensor))}
        self._marks.append((_events(), kinds))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        states = (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor))
        self._mark([*((leaf, "optimizer state") for leaf in states), *_gradients(optimizer)])
        for device, events in _events().items():
            self._steps[device].append(events)

    def report(self, snapshot: dict[str, Any], *, is_timed: bool) -> dict[str, Any]:
        """Return the peak of the device that held most, in plain types: bytes, and where they come from.

        ``time_us``: of the peak, if events have virtual times. ``beyond``: bytes past the device's memory, and
        ``beyond_at``, where it was passed first; absent if it sufficed.
        """
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        parameters = [each for each in found if isinstance(each, torch.nn.Parameter)]
        self._mark(_with_gradients(parameters))
        reserved = {index: _reserved(index) for index in range(_native.device_count())}
        device = max(reserved, key=lambda index: reserved[index])
        events = [each for each in snapshot["device_traces"][device] if each["action"] != "free_completed"]
        blocks = self._blocks(device, events)
        held = _held(events, blocks)
        peak = max(held, default=0)
        at = held.index(peak) if held else 0
        lines: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for block in blocks.values():
            if block.begin <= at < block.end:
                line = lines[self._place(device, block.begin, block.frames), block.kind or _kind(block.frames)]
                line[:] = line[0] + block.size, line[1] + 1
        kinds = Counter[str]()
        for (_, kind), (nbytes, _) in lines.items():
            kinds[kind] += nbytes
        report = {
            "allocated": peak,
            "reserved": reserved[device],
            "at": self._place(device, at, events[at]["frames"]) if events else "unknown",
            "steps": sum(step <= at for step in self._steps[device]),
            "kinds": dict(kinds.most_common()),
            "lines": [(*key, *line) for key, line in sorted(lines.items(), key=lambda each: -each[1][0])[:_MOST_LINES]],
        }
        if is_timed and events:
            report["time_us"] = events[at]["time_us"]
        beyond = next((number for number, event in enumerate(events) if event["action"] == "oom"), None)
        if beyond is not None:
            report["beyond"] = reserved[device] - _native.memory_limit(device)
            report["beyond_at"] = self._place(device, beyond, events[beyond]["frames"])
        return report

    def _blocks(self, device: int, events: Sequence[dict[str, Any]]) -> dict[int, _Block]:
        """Return the blocks of a device, by the number of the event that begins each."""
        marks = deque((at[device], kinds) for at, kinds in self._marks)
        blocks: dict[int, _Block] = {}
        live: dict[int, _Block] = {}  # by address

        def mark(until: int) -> None:
            while marks and marks[0][0] <= until:
                for address, kind in marks.popleft()[1].items():
                    if address in live:
                        live[address].kind = kind

        for number, event in enumerate(events):
            mark(number)
            if event["action"] == "alloc":
                blocks[number] = live[event["addr"]] = _Block(number, event["allocated_size"], event["frames"])
            elif event["addr"] in live:
                live.pop(event["addr"]).end = number
        mark(len(events))
        return blocks

    def _place(self, device: int, number: int, frames: list[dict[str, Any]]) -> str:
        """Return the line of the program that an event comes from; the call of backward for autograd's threads."""
        for frame in frames:
            if is_of_program(frame["filename"]):
                return f"{frame['filename']}:{frame['line']}"
        earlier = [place for at, place in self._backwards if at[device] <= number and place]
        return earlier[-1] if earlier else "unknown"


def _held(events: Sequence[dict[str, Any]], blocks: dict[int, _Block]) -> list[int]:
    """Return the bytes that are allocated after each event."""
    changes = [0] * len(events)
    for block in blocks.values():
        changes[block.begin] += block.size
        if block.end < len(events):
            changes[int(block.end)] -= block.size
    return list(accumulate(changes))


def _reserved(index: int) -> int:
    return int(memory.memory_stats(index).get("reserved_bytes.all.peak", 0))


def _events() -> dict[int, int]:
    return {index: _native.memory_events(index) for index in range(_native.device_count())}


def _gradients(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str]]:
    return _with_gradients([each for group in optimizer.param_groups for each in group["params"]])


def _with_gradients(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, str]]:
    gradients = [(each.grad, "gradients") for each in parameters if each.grad is not None]
    return [*((each, "parameters") for each in parameters), *gradients]


def _address(tensor: torch.Tensor) -> int:
    """Return where the memory of a device tensor begins; 0 for other tensors."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if local.device.type != NAME or local.layout != torch.strided:
        return 0
    try:
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return 0


def _kind(frames: list[dict[str, Any]]) -> str:
    if not frames:
        return "backward"  # of autograd's threads: gradients on their way, and temporaries
    files = (each["filename"] for each in frames)
    inner = next((each for each in files if not each.endswith(("/_ops.py", "/storage.py"))), "")
    fitting = (kind for part, kind in _OF_FILES if inner.startswith(TORCH + part))
    return next(fitting, "activations")
