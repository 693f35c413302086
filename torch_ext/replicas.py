"""Whether ranks that hold replicas of a tensor hold the same bits (``--check-replicas``).

Note [What is a replica]
~~~~~~~~~~~~~~~~~~~~~~~~
What the program declares: a DTensor's local tensor along each ``Replicate`` dimension of its mesh; a parameter of a
``DistributedDataParallel`` module in that module's group, or of an FSDP1 module in the group that replicates its
shards; the same for their gradients, and for the optimizer's state of the parameter. Whether plain tensors are replicas
nobody but their author knows: :func:`replicated` declares one, as types of the package ``spmd_types`` do.

Each rank writes the hash of each replica into a file, in the order of its program: gradients before a step of an
optimizer, parameters and state after it, and each result of a DTensor operation. The command, or the parent half of a
test, compares the files when the ranks have ended, so the check adds no communication, and a program that hangs because
of a difference is compared too. What a rank computed from a wrong value differs as well: only the first difference is
reported.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from torch_ext.faults.modules import modules_outermost_first
from torch_ext.world.wording import place_here, ranks_phrase


class _Record(NamedTuple):
    """One replica at one time: the n-th of that name and group on its rank."""

    what: str
    ranks: tuple[int, ...]
    number: int


class Recorder:
    """Writes this rank's hashes into ``path``. Records from its start until the process ends."""

    def __init__(self, path: Path) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._file: TextIO = path.open("w", encoding="utf-8")
        self._names: dict[int, str] = {}  # of parameters, by identity
        self._groups: dict[int, tuple[int, ...]] = {}  # the ranks that replicate a plain tensor, by its identity
        self._optimizers: set[int] = set()  # that have made a step
        self._steps = 0
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._operations = _operations(self)
        self._operations.__enter__()
        global _recorder
        _recorder = self

    def declare(self, tensor: Any, ranks: Sequence[int], name: str = "") -> None:
        """See :func:`replicated`."""
        self._groups[id(tensor)] = tuple(ranks)
        if name:
            self._names[id(tensor)] = name

    def _find_modules(self) -> None:
        """Name the parameters by the outermost modules, and find the replicas of DDP and FSDP1. A hook of all modules
        would show in compiled programs.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel

        from torch_ext.compat.fsdp import replicating_group

        for module in modules_outermost_first():
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), name)
            group = module.process_group if isinstance(module, torch.nn.parallel.DistributedDataParallel) else None
            if isinstance(module, FullyShardedDataParallel):
                group = replicating_group(module)
            if group is not None:
                ranks = tuple(dist.get_process_group_ranks(group))
                self._groups |= {id(parameter): ranks for parameter in module.parameters()}

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._steps += 1
        if id(optimizer) not in self._optimizers:
            self._optimizers.add(id(optimizer))
            self._find_modules()
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                self.record(
                    f"the gradient of {self._name(parameter)} before step {self._steps}", parameter.grad, parameter
                )

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        for parameter in _parameters(optimizer):
            name = self._name(parameter)
            self.record(f"{name} after step {self._steps}", parameter, parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                self.record(f"{key} of {name} after step {self._steps}", value, parameter)

    def _name(self, parameter: Any) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {list(parameter.shape)}")

    def record(self, what: str, value: Any, like: Any = None) -> None:
        """Write the hash of ``value``, for each group of ranks that replicates it, or the plain tensor ``like``."""
        import torch

        if not isinstance(value, torch.Tensor):
            return
        groups = [*_mesh_groups(value), *_typed_groups(value, like)] or [self._groups.get(id(like), ())]
        groups = [ranks for ranks in groups if len(ranks) > 1]
        if groups and (digest := _digest(value)):
            self._file.writelines(json.dumps([what, ranks, digest, place_here()]) + "\n" for ranks in groups)
            self._file.flush()


_recorder: Recorder | None = None


def replicated(tensor: Any, group: Any = None, name: str = "") -> Any:
    """Declare that the ranks of process group ``group`` (default: all) hold the same bits in ``tensor``, a plain tensor
    such as the weight of a norm under tensor parallelism, and, if an optimizer updates it, in its gradient and state.
    Checks the bits now. Returns the tensor; does nothing else in a program that runs without ``--check-replicas``.
    """
    if _recorder is not None:
        import torch.distributed as dist

        _recorder.declare(tensor, dist.get_process_group_ranks(group or dist.group.WORLD), name)
        _recorder.record(name or "a declared replica", tensor, tensor)
    return tensor


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _mesh_groups(tensor: Any) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that share the local tensor of a DTensor, for each dimension of its mesh that replicates it."""
    import torch.distributed as dist

    placements = getattr(tensor, "placements", ())
    for dimension, placement in enumerate(placements):
        if placement.is_replicate():
            yield tuple(dist.get_process_group_ranks(tensor.device_mesh.get_group(dimension)))


def _typed_groups(value: Any, like: Any) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that share ``value``, for each axis of a mesh along which ``spmd_types`` knows it as replicated
    or invariant, or ``like`` as invariant, whose gradient and state are too.
    """
    spmd = sys.modules.get("spmd_types")
    if spmd is None:
        return
    import torch.distributed as dist

    axes = {axis for axis, kind in spmd.get_local_type(value).items() if kind in (spmd.R, spmd.I)}
    axes |= {axis for axis, kind in spmd.get_local_type(like).items() if kind is spmd.I}
    for axis in axes:
        for ranks in axis.layout.global_ranks(dist.get_world_size()):
            if dist.get_rank() in ranks:
                yield tuple(ranks)


def _digest(tensor: Any) -> str:
    """Return the hash of the tensor's data; empty for one without, as while a compiler traces."""
    import torch

    with torch.no_grad():
        local = getattr(tensor, "_local_tensor", tensor).detach()
        if local.is_meta or type(local).__name__ in ("FakeTensor", "FunctionalTensor"):
            return ""
        data = local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _operations(recorder: Recorder) -> Any:
    """Return a mode that records the results of DTensor operations, except views and unwritten memory."""
    from torch.distributed.tensor import DTensor

    from torch_ext.compat.fsdp import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not func.is_view and "empty" not in func.__name__:
                for each in result if isinstance(result, (tuple, list)) else (result,):
                    if isinstance(each, DTensor):
                        recorder.record(f"the result of {func}", each)
            return result

    return Operations()


def compare(paths: Iterable[Path]) -> str:
    """Return a report on the first replica whose bits differ between ranks, by their files; empty if all agree."""
    ranks = [list(_read(path)) for path in paths]
    held: dict[_Record, dict[int, tuple[str, str]]] = {}
    for rank, records in enumerate(ranks):
        for record, digest, line in records:
            held.setdefault(record, {})[rank] = digest, line
    differing = {record for record, by_rank in held.items() if len({digest for digest, _ in by_rank.values()}) > 1}
    if not differing:
        return ""
    first = next(record for records in ranks for record, *_ in records if record in differing)
    parties: dict[str, list[int]] = {}
    for rank, (digest, _) in held[first].items():
        parties.setdefault(digest, []).append(rank)
    who = " against ".join(map(ranks_phrase, sorted(parties.values(), key=len)))
    if len(parties) == len(held[first]) > 2:
        who = "no two are equal"
    lines = dict.fromkeys(line for _, line in held[first].values() if line)
    where = f" ({', '.join(lines)})" if lines else ""
    later = len(differing) - 1
    more = f"; {later} later {'ones differ' if later > 1 else 'one differs'} too" if later else ""
    return f"replicas of {ranks_phrase(first.ranks)} differ, first in {first.what}{where}: {who}{more}"


def _read(path: Path) -> Iterator[tuple[_Record, str, str]]:
    numbers = Counter[tuple[str, tuple[int, ...]]]()
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        what, ranks, digest, line = json.loads(text)
        key = what, tuple(ranks)
        numbers[key] += 1
        yield _Record(*key, numbers[key]), digest, line
