"""Imported once by the root zygote of a run, so that test files and ranks need not."""

from torch_ext import accelerator
from torch_ext.compat.dynamo import reset  # noqa: F401  # otherwise half a second in every rank

# Chosen and loaded here. Every rank would otherwise import the package of an out-of-tree device.
accelerator.device_type()
