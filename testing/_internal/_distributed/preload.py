"""Imported once by the root zygote of a run, so that test files and ranks need not."""

import contextlib
import importlib

from torch_ext import accelerator
from torch_ext.compat.testing import seed_without_stacks

# Choose and load the device here. Every rank would otherwise import the package of an out-of-tree device.
accelerator.device_type()
# Libraries that torch's test helpers import. Not the helpers: they change settings of torch
# (torch.backends.disable_global_flags), and test files that do not import them must not see that.
for name in ("expecttest", "hypothesis", "pytest", "torch.utils.cpp_extension"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
seed_without_stacks()
