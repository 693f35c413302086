"""What a rewritten program finds as ``torch.cuda``, its submodules included: the simulated accelerator by the table."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch_ext.cuda_as_sim import table
from torch_ext.cuda_as_sim.errors import NeedsCudaError
from torch_ext.cuda_as_sim.words import FACADE
from torch_ext.sim import _module as sim

__all__ = ["Refused", "find"]


class Refused:
    """Stands for a name that is CUDA's alone: it can be imported and passed on, and says so when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _error(self) -> NeedsCudaError:
        return table.refuse(self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __or__(self, other: object) -> object:
        """In an annotation, as in ``torch.cuda.CUDAGraph | None``, it is no use of the class."""
        return Any

    __ror__ = __or__


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a hint that the simulated accelerator has no use for."""


def find(name: str, submodule: str = "") -> Any:
    """Return what ``torch.cuda.<name>`` means, or ``torch.cuda.<submodule>.<name>``.

    Raises:
        AttributeError: neither the table nor ``torch.sim`` has the name.
    """
    part = submodule.partition(".")[0]
    if part in table.OF_SUBMODULES and name in table.OF_SUBMODULES[part]:
        return table.OF_SUBMODULES[part][name]
    for named in (table.CONSTANTS, table.FUNCTIONS):
        if name in named:
            return named[name]
    if name in table.REFUSED:
        return Refused(name)
    if part in table.REFUSED:
        return Refused(part)
    if name in table.DOES_NOTHING:
        return _nothing
    for holder in (getattr(sim, part, None) if part else None, sim):
        if hasattr(holder, name):
            return getattr(holder, name)
    dotted = f"{submodule}.{name}" if submodule else name
    raise AttributeError(
        f"torch.cuda.{dotted} has no counterpart on the simulated accelerator; "
        "torch_ext/cuda_as_sim/table.py says what each name means"
    )


class _Submodule(ModuleType):
    """A submodule, such as ``torch.cuda.amp``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(name, self.__name__.removeprefix(f"{FACADE}."))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return find(name)


# Imports find them by name, and `cuda.amp` as an attribute. This module is their package.
__path__: list[str] = []
for _dotted in table.SUBMODULES:
    _made = sys.modules.setdefault(f"{FACADE}.{_dotted}", _Submodule(f"{FACADE}.{_dotted}"))
    _made.__path__ = []
    _parent, _, _last = f"{FACADE}.{_dotted}".rpartition(".")
    setattr(sys.modules[_parent], _last, _made)
