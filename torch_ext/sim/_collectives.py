"""The process group backend ``simccl``: how groups are made. Its collectives are in csrc/simccl.cpp.

Which backends a group gets:

========================================================  =======================
``init_process_group()`` and ``new_group()`` after it     ``cpu:gloo,sim:simccl``
``init_process_group(device_id=torch.device("sim", r))``  ``sim:simccl``
``backend="simccl"``                                      ``sim:simccl``
``backend="cpu:gloo,sim:simccl"``                         as written
========================================================  =======================

Other backends' names: see :mod:`torch_ext.sim._other_backends`.

A group that is bound to a device is device-only, because torch uses the device's backend alone for it, as on CUDA.

The transport of a group's bytes (``TORCH_EXT_SIM_TRANSPORT``):

==========  ============================================================================================
unset       memory that the ranks share; gloo where they cannot, because they run on several machines
``shared``  memory that the ranks share; making a group fails where they cannot
``gloo``    gloo
==========  ============================================================================================

``TORCH_EXT_SIM_REDUCE`` (``rank``, ``ring``, ``tree``, ``random:SEED``) sets the order in which reductions over shared
memory combine ranks: see csrc/transport/fold.h. Both variables must be the same on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_ext.faults import points
from torch_ext.sim import _flight_record, _gloo_halves, _native, _other_backends, _watchdog
from torch_ext.sim._name import IS_CUDA, NAME
from torch_ext.sim._patches import wrap

BACKEND = "simccl"
TIMEOUT_OF_NCCL = timedelta(minutes=10)  # the default of its groups
# Parts of a group's configuration that give its device tensors to simccl; with CUDA's personality, NCCL means simccl.
_PAIRS = {f"{NAME}:{BACKEND}", "cuda:nccl", "cuda:nccl2", "cuda:nccl-legacy"} if IS_CUDA else {f"{NAME}:{BACKEND}"}
_GET_NUMBER, _SET_NUMBER = "_get_sequence_number_for_group", "_set_sequence_number_for_group"
# Store key that counts how many times a rank has made a group's backend.
_MADE = "made"
# Torch 2.15 starts every group's numbers at 0 by itself, and warns callers that still set them.
_NUMBERS_ARE_SET = hasattr(dist.ProcessGroup, _SET_NUMBER)
_groups_made = 0
_objects_moved = 0


def groups_made() -> int:
    """Return the number of groups that this process has made, of any backend, destroyed ones included."""
    return _groups_made


def objects_moved() -> int:
    """Return the number of objects that this process has sent or received in object collectives."""
    return _objects_moved


def register() -> None:
    """Make ``simccl`` the default backend of ``sim`` tensors, and let torch's threaded group serve them too."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[NAME])
    _native.set_gloo_factory(_make_gloo)
    points.native = _native
    _flight_record.install()
    _other_backends.serve_threaded_and_fake_groups()
    _other_backends.reduce_sparse_tensors()
    _gloo_halves.install(_make_gloo_half)
    _pair_with_gloo()
    _complete_groups()
    _count_objects()


def _pair_with_gloo() -> None:
    """Let a group made without naming a backend serve host tensors too: ``cpu:gloo,sim:simccl``.

    Torch would pick the accelerator's backend alone. Groups that name ``simccl`` stay device-only.
    """

    @wrap(c10d.BackendConfig, "__init__")
    def __init__(original: Callable[..., None], self: Any, backend: Any) -> None:
        original(self, backend)
        if str(backend) == dist.Backend.UNDEFINED and set(self.device_backend_map) == {NAME}:
            self.device_backend_map = {"cpu": dist.Backend(dist.Backend.GLOO), **self.device_backend_map}


def _complete_groups() -> None:
    """Make ``simccl`` the default backend of every group that has it, as NCCL is, and give gloo's groups a device half.

    The default backend runs a group's completion hook, and torch would choose gloo, which has none. Torch also asks
    the default backend for sequence numbers, which it can read from its own backends only.
    """

    @wrap(c10d, "_new_process_group_helper")
    def _new_process_group_helper(helper: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        global _groups_made
        # Torch looks up the backend of the bound device, which a group of gloo lacks before `serve_gloo`.
        if kwargs.get("device_id") is not None and not _names_device(args[3]):
            kwargs["device_id"] = None
        with _gloo_halves.wrappers_of_a_group() as wrappers:
            made = helper(*args, **kwargs)
        _groups_made += isinstance(made[0], dist.ProcessGroup)
        if _has_simccl(made[0]):
            if BACKEND in c10d._world.pg_backend_config[made[0]]:
                made[0]._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        elif isinstance(made[0], dist.ProcessGroup):
            group, store = made
            _other_backends.serve_gloo(group, store, _make_gloo_half, wrappers)
        return made

    @wrap(dist.ProcessGroup, *((_GET_NUMBER, _SET_NUMBER) if _NUMBERS_ARE_SET else (_GET_NUMBER,)))
    def number(original: Callable[..., Any], self: dist.ProcessGroup) -> Any:
        own = self._get_backend(torch.device(NAME)) if _has_simccl(self) else None
        return getattr(own, original.__name__)() if own is not None else original(self)

    wrap(dist.ProcessGroup, "barrier")(_barrier_on_device)
    wrap(c10d, "_set_pg_timeout")(_set_limit)

    @wrap(c10d, *(name for name in ("_prepare_shrink_target_group",) if hasattr(c10d, name)))
    def bind_first(original: Callable[..., Any], group: dist.ProcessGroup | None) -> Any:
        # Torch looks for the backend of the bound device, and takes the CPU's for a group that is bound to none.
        found = original(group)
        shrunk = found["process_group"]
        if _has_simccl(shrunk) and shrunk.bound_device_id is None:
            shrunk.bound_device_id = torch.device(NAME, torch.accelerator.current_device_index())
        return found


def _count_objects() -> None:
    @wrap(c10d, *(name for name in ("_object_to_tensor", "_tensor_to_object") if hasattr(c10d, name)))
    def count_and_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        global _objects_moved
        _objects_moved += 1
        return original(*args, **kwargs)


def _names_device(backend: Any) -> bool:
    return NAME in c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()


def _has_simccl(group: object) -> bool:
    config = c10d._world.pg_backend_config.get(group, "") if isinstance(group, dist.ProcessGroup) else ""
    return not _PAIRS.isdisjoint(config.split(","))


def _set_limit(original: Callable[..., None], timeout: timedelta, group: Any = None) -> None:
    """Set the time limit of all backends: torch knows its own alone, and warns of a group without any."""
    group = group or c10d._get_default_group()
    types = group._device_types if isinstance(group, dist.ProcessGroup) else ()
    backends = [group._get_backend(each) for each in types]
    own = [each for each in backends if isinstance(each, _native.ProcessGroupSimCCL)]
    for each in own:
        each._set_default_timeout(timeout)
    if not own or len(own) < len(backends):
        original(timeout, group)


def _barrier_on_device(original: Callable[..., Any], self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
    """Meet on the device if the group has ``simccl``, as groups of NCCL do.

    Torch's method uses the CPU backend, which a group may lack. ``dist.barrier`` names the device itself.
    """
    if not _has_simccl(self):
        return original(self, *args, **kwargs)
    given = (*args, *kwargs.values())
    options: Any = next((each for each in given if isinstance(each, c10d.BarrierOptions)), c10d.BarrierOptions())
    for each in given:
        if isinstance(each, timedelta):
            options.timeout = each
    if options.device is None:
        options.device = torch.device(NAME, torch.accelerator.current_device_index())
    return original(self, options)


def _restart_prefix() -> str:
    """Return a prefix of store keys for this restart of the job: torchrun's static rendezvous keeps its store.

    Empty before the first restart, and on several hosts, whose agents count restarts separately.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{restarts}/" if restarts != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1" else ""


def _make_backend(
    store: c10d.Store,
    rank: int,
    ranks: list[int],
    timeout: timedelta,
    *,
    any_device: bool = False,
    reconfigurable: bool = False,
) -> _native.ProcessGroupSimCCL:
    """Make the backend of the next group of ``ranks`` that has this name in ``store``; a ``reconfigurable`` one has no
    members yet.

    A program that destroys its groups and makes them again gets the same names in the same store. Each generation of a
    group has its own prefix, so that no rank reads the keys of the last one.
    """
    if reconfigurable:  # its ranks need not be there, and those of later members may be the same
        store = c10d.PrefixStore(f"{BACKEND}/", store)
        return _native.ProcessGroupSimCCL(store, rank, ranks, timeout, reconfigurable=True)
    # Another group of the same name may have other ranks.
    store = c10d.PrefixStore(f"{BACKEND}/{_restart_prefix()}{ranks}/", store)
    made = store.add(_MADE, 1)
    generation = (made - 1) // len(ranks)  # each rank has counted once for every group before this one
    try:
        return _native.ProcessGroupSimCCL(
            c10d.PrefixStore(f"{generation}/", store), rank, ranks, timeout, any_device=any_device
        )
    except BaseException:
        store.add(_MADE, -1)
        raise


def _create(options: Any, backend_options: Any) -> _native.ProcessGroupSimCCL:
    """Make a group's backend. Torch calls this for every group that is not split from another."""
    _watchdog.start()
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    reconfigurable = getattr(options, "enable_reconfigure", False)  # from torch 2.15 on
    # Torch passes no ranks where a group is made without torch.distributed's own bookkeeping.
    global_ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return _make_backend(options.store, options.group_rank, global_ranks, timeout, reconfigurable=reconfigurable)


def own_backend(
    store: c10d.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    ranks: list[int] | None = None,
    *,
    reconfigurable: bool = False,
) -> _native.ProcessGroupSimCCL:
    """Make this rank's backend; each of the ``size`` ranks of ``store`` calls this.

    ``ranks``: the global ranks of the backend's group, an empty list for all; None if it has no group.
    """
    if ranks is None:
        ranks = _gloo_halves.global_ranks(c10d.PrefixStore(f"{BACKEND}/", store), rank, size)
    return _make_backend(store, rank, list(ranks) or list(range(size)), timeout, reconfigurable=reconfigurable)


def _make_gloo_half(store: c10d.Store, rank: int, ranks: list[int], timeout: timedelta) -> _native.ProcessGroupSimCCL:
    return _make_backend(store, rank, ranks, timeout, any_device=True)


def _make_gloo(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> c10d.ProcessGroupGloo:
    """Make the gloo backend that carries a group's bytes where its ranks cannot share memory."""
    gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo/", store), rank, size, timeout=timeout)
    if _NUMBERS_ARE_SET:
        gloo._set_sequence_number_for_group()
    return gloo
