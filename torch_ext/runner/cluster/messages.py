"""Every message between the driver, a machine's actor and its supervisor. Standard library and own layer only.

======================  =============================================================
from -> to              messages
======================  =============================================================
actor -> supervisor     :class:`Settings` first, then :class:`RunClass`
supervisor -> actor     :class:`Ready` first, then :class:`Told`
======================  =============================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_ext.runner.options import Options
from torch_ext.runner.results import Began, Over, TestResult, Tick
from torch_ext.runner.schedule import Need

__all__ = ["Ready", "RunClass", "Settings", "ShippedFile", "Told"]


@dataclass(frozen=True)
class Settings:
    """What the supervisor of a machine runs by.

    Attributes:
        options: what the user asked for.
        environment: variables that it adds to its own.
        cache: folder for what is kept between runs; empty: the machine's own.
    """

    options: Options
    environment: dict[str, str]
    cache: str = ""


@dataclass(frozen=True)
class Ready:
    """A supervisor takes classes. ``devices`` is how many devices its ranks must share, 0 where they need not."""

    devices: int


@dataclass(frozen=True)
class ShippedFile:
    """A test file, wherever a machine has unpacked what was shipped: paths are relative to that folder."""

    name: str
    path: str
    module: str
    import_root: str


@dataclass(frozen=True)
class RunClass:
    """Run these tests of one class. ``number`` tells this order from all others."""

    number: int
    file: ShippedFile
    cls: str
    methods: tuple[str, ...]
    need: Need


@dataclass(frozen=True)
class Told:
    """Something happened in the class of order ``number``; ``event`` is None when nothing more comes of it.

    ``now_s`` is the machine's ``time.monotonic``, whose zero is its own.
    """

    number: int
    event: Began | Over | TestResult | Tick | None
    now_s: float
