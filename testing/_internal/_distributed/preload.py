"""Imported once by the root zygote of a run, so that test files and ranks need not."""

from torch_ext import accelerator
from torch_ext.compat._seeding import seed_without_stacks

# Chosen and loaded here. Every rank would otherwise import the package of an out-of-tree device.
accelerator.device_type()
seed_without_stacks()
