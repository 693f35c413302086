"""The ``torch.backends`` entry point: torch calls :func:`load` after its own import, in every process.

========================  ========================================================================================
``TORCH_EXT_SIM``         ``1``: register the simulated accelerator in every process that imports torch; ``cuda``:
                          register it as CUDA's device, see :mod:`torch_ext.personality`
``TORCH_EXT_SIM_STRICT``  ``1``: a worker that never used its device or its peers ends with code 1
``TORCH_EXT_SIM_WORKER``  set for the processes that a worker starts
========================  ========================================================================================
"""

from __future__ import annotations

import importlib
import os
import sys

from torch_ext import personality

# Launchers for ``python -m``, which start the program in other processes.
_LAUNCHERS = ("torch.distributed.", "accelerate.", "torch_ext.", "deepspeed.", "lightning.fabric.cli")

_SIM, ON = personality.VARIABLE, "1"
WORKER = "TORCH_EXT_SIM_WORKER"  # set for the processes that a worker starts, which are no workers of the job


def hide() -> None:
    """Remove the variables from the environment; a rank gets their values from its ``Program``."""
    for name in (_SIM, "TORCH_EXT_RACES", "TORCH_EXT_CLOCK", "TORCH_EXT_SIM_STRICT"):
        os.environ.pop(name, None)


def load() -> None:
    """Register the device that ``TORCH_EXT_SIM`` requests. Raises ValueError for an unknown value."""
    value = os.environ.get("TORCH_EXT_SIM", "")
    if value in ("", "0"):
        return
    as_cuda = value == personality.AS_CUDA
    if not as_cuda and value != ON:
        raise ValueError(f"{_SIM}={value}: expected 1, or cuda to have CUDA mean the simulated accelerator.")
    if as_cuda:
        from torch_ext.cuda_as_sim import visible

        visible.record_at_start()
        visible.hide_unless_set()
    if ranks := os.environ.get("LOCAL_WORLD_SIZE"):
        os.environ.setdefault("TORCH_EXT_SIM_DEVICES", ranks)
    # If torch_ext.sim imports torch, that package is only partly imported now.
    importlib.import_module("torch_ext.sim._register").register()
    if as_cuda:
        importlib.import_module("torch_ext.cuda_as_sim.stand_in")
    is_worker = os.environ.get("WORLD_SIZE", "1") != "1" and "LOCAL_RANK" in os.environ
    is_below_worker = bool(os.environ.get("TORCH_EXT_SIM_WORKER"))
    if is_worker and not is_below_worker and _is_program():
        import atexit
        from contextlib import ExitStack

        from torch_ext.program.rank import report_at_end
        from torch_ext.world.rank import planned_faults

        os.environ[WORKER] = str(os.getpid())
        faults = ExitStack()
        faults.enter_context(planned_faults(int(os.environ["RANK"])))
        atexit.register(faults.close)
        atexit.register(report_at_end, os.getpid(), cuda_as_sim=as_cuda)


def _is_program() -> bool:
    """Whether this process runs a user's program rather than a launcher, ``-c`` or a child of multiprocessing."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return not spec.name.startswith(_LAUNCHERS)
    programs = os.path.dirname(os.path.abspath(sys.executable))  # with console scripts
    return bool(file) and os.path.dirname(os.path.abspath(str(file))) != programs
