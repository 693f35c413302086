"""``python -m torch_ext.program.as_sim SCRIPT|-m MODULE [ARGS]``: a program in whose files CUDA means the simulated
accelerator. See Note [A program that has begun].
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch_ext.cuda_as_sim import loader, spawned, visible
from torch_ext.cuda_as_sim.words import environment_as_sim, words_as_sim
from torch_ext.program.main_module import run_main
from torch_ext.program.spec import Program
from torch_ext.program.variables import packages as packages_asked_for

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Run the program as ``__main__``. Raises what it raises."""
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[1:] if is_module else arguments
    packages = packages_asked_for()
    root = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    os.environ.update(environment_as_sim(os.environ))
    visible.hide()
    spawned.install([root], (loader.HELPERS, *packages))
    import torch_ext.cuda_as_sim.runtime  # noqa: F401  # replaces Tensor.cuda and its like

    path = sys.path if getattr(sys.flags, "safe_path", False) else sys.path[1:]
    run_main(Program(target, is_module, tuple(words_as_sim(rest)), tuple(path), cuda_as_sim=True, packages=packages))


if __name__ == "__main__":
    main(sys.argv[1:])
