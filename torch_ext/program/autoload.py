"""The ``torch.backends`` entry point: torch calls :func:`load` at the end of its own import, in every process.

Without ``TORCH_EXT_SIM`` it returns at once. ``TORCH_EXT_SIM=1`` registers the simulated accelerator, so that what
torchrun starts runs on it. ``TORCH_EXT_SIM=cuda`` makes CUDA mean it, too.

Note [A program that has begun]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When torch calls, the program that imports it has been compiled, with "cuda" in it. So the process starts again, as
``python -m torch_ext.program.as_sim PROGRAM``, which rewrites the program's files as they are read. What the program
did before it imported torch is done once more. Launchers (torchrun, accelerate) are no such programs, and stay as they
are.
"""

from __future__ import annotations

import os
import sys

from torch_ext.program import variables

__all__ = ["load"]

_AGAIN = "torch_ext.program.as_sim"
# Modules that are run by -m and start the program in processes of their own.
_LAUNCHERS = ("torch.distributed.", "accelerate.", "torch_ext.", "deepspeed.", "lightning.fabric.cli")


def load() -> None:
    """Do what ``TORCH_EXT_SIM`` asks for.

    Raises:
        ValueError: it asks for something unknown.
        BuildError: the simulator cannot be built.
    """
    asked = variables.wanted()
    if not asked:
        return
    if asked == variables.ON_AS_CUDA:
        from torch_ext.cuda_as_sim import visible

        visible.record_at_start()
    program = _program()
    if program and asked == variables.ON_AS_CUDA:
        from torch_ext.program.interpreter_line import run_again

        run_again(_AGAIN)
    if asked == variables.ON_AS_CUDA:
        visible.hide()
    if ranks := os.environ.get("LOCAL_WORLD_SIZE"):
        os.environ.setdefault("TORCH_EXT_SIM_DEVICES", ranks)
    import torch_ext.sim  # noqa: F401  # registers the device

    is_rewritten = asked == variables.ON_AS_CUDA and "torch_ext.program.as_sim" in _main_name()
    if (program or is_rewritten) and os.environ.get("WORLD_SIZE", "1") != "1" and "LOCAL_RANK" in os.environ:
        _look_at_the_end(cuda_as_sim=asked == variables.ON_AS_CUDA)


def _main_name() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else ""


def _program() -> bool:
    """Whether this process runs a program of the user's, and not a launcher, ``-c`` or a child of multiprocessing."""
    main = sys.modules.get("__main__")
    if _main_name().startswith(_LAUNCHERS):
        return False
    file = getattr(main, "__file__", None)
    if _main_name():
        return True
    return bool(file) and os.path.dirname(os.path.abspath(str(file))) != os.path.dirname(
        os.path.abspath(sys.executable)
    )


def _look_at_the_end(*, cuda_as_sim: bool) -> None:
    if variables.worker_above():
        return
    variables.mark_worker()
    import atexit

    from torch_ext.program.alone import look

    atexit.register(look, os.getpid(), cuda_as_sim=cuda_as_sim)
