"""Random numbers of the simulated accelerator, a generator for each device: see Note [Random numbers] in
csrc/generator.h.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_ext.sim import _native
from torch_ext.sim._devices import Device, checked_index, index_of
from torch_ext.sim._name import NAME


def generator_of(device: Device = None) -> torch.Generator:
    """Return the generator of ``device``."""
    return _native.default_generator(index_of(device))


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    generator_of().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(_native.device_count()):
        generator_of(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the generator of the current device with a number that differs from run to run."""
    generator_of().seed()


def seed_all() -> None:
    """Seed the generators of all devices with one number that differs from run to run."""
    manual_seed_all(generator_of().seed())


def initial_seed() -> int:
    """Return the seed of the current device's generator."""
    return generator_of().initial_seed()


def get_rng_state(device: Device = NAME) -> torch.Tensor:
    """Return the state of ``device``'s generator: 16 bytes, seed and offset."""
    return generator_of(checked_index(index_of(device))).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = NAME) -> None:
    """Set the state of ``device``'s generator to a result of :func:`get_rng_state`."""
    generator_of(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of every device's generator."""
    return [get_rng_state(index) for index in range(_native.device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the state of every device's generator."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
