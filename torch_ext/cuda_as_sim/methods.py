"""``x.cuda()`` moves to the simulated accelerator: methods of torch's classes, which rewriting a file cannot reach.

Rewriting does not reach ``torch.autograd.profiler.emit_nvtx``, whose methods call CUDA, nor what a profiler is
given: a program has ``ProfilerActivity`` under its own name, or leaves the profiling to a library.
A stream has the ``cuda_stream`` that programs give to libraries, as the number that tells it from others.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_ext.cuda_as_sim.words import word_as_sim
from torch_ext.sim._name import NAME
from torch_ext.sim._streams import Stream

__all__ = ["complete", "install"]


def install() -> None:
    """Replace the methods, in this process. Without CUDA they could only fail. Calling it again changes nothing."""
    setattr(torch.Tensor, "cuda", _tensor_cuda)  # noqa: B010 - mypy refuses to assign a method
    setattr(torch.nn.Module, "cuda", _module_cuda)  # noqa: B010
    setattr(torch.nn.utils.rnn.PackedSequence, "cuda", _packed_cuda)  # noqa: B010
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        setattr(storage, "cuda", _storage_cuda)  # noqa: B010
    _let_profilers_see_the_device()
    complete()


def complete() -> None:
    """Give streams their handles, and let programs that mark ranges for NVIDIA's tools run."""
    setattr(Stream, "cuda_stream", property(_stream_handle))  # noqa: B010
    marks = torch.autograd.profiler.emit_nvtx
    setattr(marks, "__enter__", _begin_marks)  # noqa: B010
    setattr(marks, "__exit__", _end_marks)  # noqa: B010


def _device(which: Any) -> torch.device:
    if which is None:
        return torch.device(NAME, torch.accelerator.current_device_index())
    if isinstance(which, int):
        return torch.device(NAME, which)
    return torch.device(word_as_sim(str(which)))


def _tensor_cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Return a copy in the memory of the simulated device; ``self`` if it is there."""
    return self.to(_device(device), non_blocking=non_blocking, memory_format=memory_format)


def _module_cuda(self: Any, device: Any = None) -> Any:
    """Move all parameters and buffers to the simulated device."""
    return self._apply(lambda tensor: tensor.cuda(device))


def _packed_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Move the sequence to the simulated device."""
    return self.to(_device(args[0] if args else kwargs.pop("device", None)), **kwargs)


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """Return a copy in the memory of the simulated device."""
    return self.to(device=_device(device), non_blocking=non_blocking)


def _stream_handle(self: Any) -> int:
    """The stream as a number: 0 for the default stream of its device, as CUDA's."""
    return int(self.native_handle) if self.stream_id else 0


def _let_profilers_see_the_device() -> None:
    """``ProfilerActivity.CUDA`` is the simulated device's, for every profiler that is made from now on."""
    profiler: Any = torch.profiler.profile.__base__
    original = profiler.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, activities: Any = None, **kwargs: Any) -> None:
        told = None if activities is None else [_activity_as_sim(each) for each in activities]
        original(self, *args, activities=told, **kwargs)

    profiler.__init__ = __init__


def _activity_as_sim(activity: Any) -> Any:
    if isinstance(activity, dict):  # with a list of what to keep of each
        return {_activity_as_sim(each): kept for each, kept in activity.items()}
    kinds = torch.profiler.ProfilerActivity
    return kinds.PrivateUse1 if activity == kinds.CUDA else activity


def _begin_marks(self: Any) -> Any:
    """Mark nothing: marks are hints to NVIDIA's tools, as those of ``torch.cuda.nvtx`` are."""
    return self if self.enabled else None


def _end_marks(self: Any, *error: Any) -> None:
    """End what marked nothing."""
