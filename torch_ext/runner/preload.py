"""Imported by the root zygote of a run, once, so that no test file and no rank pays for it.

Runs in zygotes, where importing torch is the purpose; the runner's other modules name this one and never import it.
"""

import torch_ext.testing._internal.common_distributed  # noqa: F401
from torch_ext import accelerator

# Chosen here and loaded here: a device whose package registers it would otherwise be loaded by every rank.
accelerator.device_type()
