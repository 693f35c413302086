"""The simulated accelerator: a multi-device accelerator on any CPU.

Importing this package, in any process, builds the native half if no finished build fits (see
:mod:`torch_ext.sim.build`), names torch's PrivateUse1 device ``sim``, makes :mod:`torch_ext.sim._module` available as
``torch.sim`` and registers the c10d backend ``simccl`` as the default for ``sim`` tensors. It starts no thread and
initialises no device, so a process may import it and fork. ``TORCH_EXT_SIM_DEVICES`` says how many devices there are
(default 4, or as many as ``torch.sim.request_devices`` asked for); the first use of a device reads it. In groups made
under ``TORCH_EXT_SIM_BLOCKING_WAIT=1``, ``work.wait()`` blocks the host; by default only the current stream waits, as
with NCCL.

Note [One accelerator]
~~~~~~~~~~~~~~~~~~~~~~
Torch has one accelerator per process and prefers PrivateUse1 over CUDA. So the simulator is imported only in processes
that are meant to run on it, and never through torch's backend autoload.
"""

import torch  # noqa: F401  # first: with TORCH_EXT_SIM its autoload, too, registers the device

from torch_ext.sim import _register

_register.register()
