"""Imported by the zygotes of a run with ``--cuda-as-sim``, before torch's test helpers: rewrites what they import.

``TORCH_EXT_CUDA_AS_SIM`` names the files and folders, joined as in ``PATH``, besides torch's test helpers.
"""

import os

from torch_ext.cuda_as_sim import loader

loader.install(os.environ.get("TORCH_EXT_CUDA_AS_SIM", "").split(os.pathsep))
