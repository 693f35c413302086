"""Ranks on several hosts: their store and their variables. See Note [Several hosts] in ``world/settings.py``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as c10d

from torch_ext.world import files, settings
from torch_ext.world.start import RankTask


def assign_hosts(tasks: Sequence[RankTask], number: int) -> tuple[list[RankTask], c10d.TCPStore]:
    """Divide ``tasks`` among ``number`` hosts; return them with each rank's settings, and the store they meet at, which
    the parent half serves as long as it holds it.

    Raises:
        ValueError: ``tasks`` cannot be divided among the hosts.
    """
    share = settings.ranks_per_host(len(tasks), number)
    address = settings.address()
    store = c10d.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    common = settings.interface_variables(address, os.environ)
    folders = [_folder_of(host) for host in range(number)]
    return [
        replace(
            task,
            environment={
                **task.environment,
                **common,
                **settings.launcher_variables(rank, len(tasks), store.port, number, address),
                settings.NUMBER_VARIABLE: str(rank // share),
                **folders[rank // share],
            },
            host=f"host {rank // share}",
        )
        for rank, task in enumerate(tasks)
    ], store


def _folder_of(host: int) -> dict[str, str]:
    """Return the folder for temporary files of ranks on ``host``; host 0 is this one."""
    if not host:
        return {}
    folder = os.path.join(files.folder(), f"h{host}")
    os.makedirs(folder, exist_ok=True)
    return {"TMPDIR": folder}


def meeting_point(file_name: str, world_size: int) -> dict[str, Any]:
    """Return the arguments of ``init_process_group`` that say where the ranks of a test meet."""
    return {"init_method": "env://"} if settings.is_multi_host() else {"store": c10d.FileStore(file_name, world_size)}
