"""What this machine has besides simulated devices. A zygote imports it before the simulator. Runs in zygotes."""

from __future__ import annotations

import torch

__all__ = ["ACCELERATOR"]

_found = torch.accelerator.current_accelerator(check_available=True)

# The device type that tests run on where none is asked for; empty if there is none but the simulated one.
ACCELERATOR = "" if _found is None else _found.type
