"""How a test model meets FSDP and its device."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["CUDAInitMode", "DEVICEInitMode", "FSDPInitMode"]


class FSDPInitMode(Enum):
    """Which modules of a test model are wrapped with FSDP.

    ``NO_FSDP`` wraps none. ``RECURSIVE`` wraps submodules, and the root as well where the model's ``init`` says so.
    """

    NO_FSDP = auto()
    RECURSIVE = auto()


class DEVICEInitMode(Enum):
    """When a test model moves to the device: before FSDP's constructor sees it, after, or never.

    The names that begin with ``CUDA_`` are the same members under the names they had before other devices came.
    """

    DEVICE_BEFORE = auto()
    DEVICE_AFTER = auto()
    DEVICE_NEVER = auto()
    CUDA_BEFORE = DEVICE_BEFORE
    CUDA_AFTER = DEVICE_AFTER
    CUDA_NEVER = DEVICE_NEVER


CUDAInitMode = DEVICEInitMode
