"""Imported by the root zygote of a run, once, so that no test file and no rank pays for it."""

from torch_ext import accelerator
from torch_ext.compat.dynamo import reset  # noqa: F401  # half a second in every rank otherwise

# Chosen here and loaded here: a device whose package registers it would otherwise be loaded by every rank.
accelerator.device_type()
