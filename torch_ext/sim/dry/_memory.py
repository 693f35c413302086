"""What held the memory of a rank at its peak, by kind and by line.

The allocator's history says when each block lived, and which lines asked for it. Optimizers say which blocks are
parameters, gradients and states: from the moment of a step on, and backwards to the block's allocation. Whatever is left
goes by the file that asked for it.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from torch_ext.sim import _memory as memory
from torch_ext.sim import _native
from torch_ext.sim._name import NAME
from torch_ext.sim._patches import wrap
from torch_ext.sim.dry._reads import OURS, place_in_program

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
_TORCH = OURS[0]


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

    def report(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Return the peak of the device that held most, in plain types: bytes, and where they come from.

        ``beyond``: bytes past the device's memory, and ``beyond_at`` where it was passed first; absent if it sufficed.
        """
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        found = [each for each in found if isinstance(each, torch.nn.Parameter)]
        self._mark(pair for each in found for pair in ((each, "parameters"), (each.grad, "gradients")) if pair[0] is not None)
        peaks = {index: memory.memory_stats(index) for index in range(_native.device_count())}
        device = max(peaks, key=lambda index: peaks[index].get("reserved_bytes.all.peak", 0))
        peak, lines, moment = self._replay(device, snapshot["device_traces"][device])
        reserved = peaks[device].get("reserved_bytes.all.peak", 0)
        kinds = Counter[str]()
        for (_, kind), (nbytes, _) in lines.items():
            kinds[kind] += nbytes
        most = sorted(lines.items(), key=lambda each: -each[1][0])[:_MOST_LINES]
        report = {
            "device": device,
            "allocated": peak,
            "reserved": reserved,
            "kinds": dict(kinds.most_common()),
            "lines": [(place, kind, *held) for (place, kind), held in most],
        }
        return report | moment | ({"beyond": reserved - _native.memory_limit(device)} if "beyond_at" in moment else {})

    def _replay(
        self, device: int, trace: list[dict[str, Any]]
    ) -> tuple[int, dict[tuple[str, str], tuple[int, int]], dict[str, Any]]:
        """Return the peak of allocated bytes; bytes and blocks by place and kind; and the moment, in plain types."""
        events = [event for event in trace if event["action"] != "free_completed"]
        marks = [(at[device], kinds) for at, kinds in self._marks]
        ends: dict[int, int] = {}  # by number of an allocation
        kinds: dict[int, str] = {}
        live: dict[int, int] = {}
        held = peak = peak_at = 0
        moment: dict[str, Any] = {}
        for number in range(len(events) + 1):
            while marks and marks[0][0] <= number:
                kinds.update((live[address], kind) for address, kind in marks.pop(0)[1].items() if address in live)
            if number == len(events):
                break
            event = events[number]
            if event["action"] == "alloc":
                live[event["addr"]] = number
                held += event["size"]
                if held > peak:
                    peak, peak_at = held, number
            elif event["action"] == "oom":
                moment.setdefault("beyond_at", self._place(device, number, event["frames"]))
            elif event["addr"] in live:
                ends[live.pop(event["addr"])] = number
                held -= event["size"]
        lines: dict[tuple[str, str], tuple[int, int]] = {}
        for number, event in enumerate(events[: peak_at + 1] if peak else ()):
            if event["action"] == "alloc" and ends.get(number, len(events)) > peak_at:
                key = self._place(device, number, event["frames"]), kinds.get(number) or _kind(event["frames"])
                nbytes, blocks = lines.get(key, (0, 0))
                lines[key] = nbytes + event["size"], blocks + 1
        if peak:
            moment["at"] = self._place(device, peak_at, events[peak_at]["frames"])
            moment["time_us"] = events[peak_at]["time_us"]
        moment["steps"] = sum(step <= peak_at for step in self._steps[device])
        return peak, lines, moment

    def _place(self, device: int, number: int, frames: list[dict[str, Any]]) -> str:
        """Return the line of the program that an event comes from; the call of backward for autograd's threads."""
        for frame in frames:
            if not frame["filename"].startswith(OURS):
                return f"{frame['filename']}:{frame['line']}"
        earlier = [place for at, place in self._backwards if at[device] <= number and place]
        return earlier[-1] if earlier else "unknown"


def _events() -> dict[int, int]:
    return {index: _native.memory_events(index) for index in range(_native.device_count())}


def _gradients(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str]]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
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
    inner = next((each["filename"] for each in frames if not each["filename"].endswith(("/_ops.py", "/storage.py"))), "")
    path = inner.removeprefix(_TORCH)
    return next((kind for part, kind in _OF_FILES if path.startswith(part)), "activations") if path != inner else "activations"
