"""Fault plans for tests and programs; see docs/faults.md."""

from torch_ext.faults.points import InjectedFault, phase

__all__ = ["InjectedFault", "phase"]
