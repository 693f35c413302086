"""Imported by the zygotes of a run with ``--cuda-as-sim``, before torch's test helpers: these find the simulated device
as CUDA's, or what they and the tests say of CUDA is rewritten.

``TORCH_EXT_CUDA_AS_SIM`` names the files and folders, joined as in ``PATH``, besides torch's test helpers.
"""

import os

from torch_ext import personality

if personality.is_cuda():
    import torch  # noqa: F401  # which installs the stand-in by itself, where this package is installed

    from torch_ext.cuda_as_sim import stand_in

    stand_in.install()
else:
    from torch_ext.cuda_as_sim import loader

    loader.install(os.environ.get("TORCH_EXT_CUDA_AS_SIM", "").split(os.pathsep))
