"""The name of the simulated accelerator's device type, for every other file of this package."""

from __future__ import annotations

__all__ = ["NAME"]

NAME = "sim"
