"""What a rank is told to run, and what it tells of it at its end. The standard library only: both sides load this."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Facts", "Program"]


@dataclass(frozen=True)
class Program:
    """A program, and how its ranks run it.

    Attributes:
        target: a file, a folder or archive with a ``__main__``, or the name of a module.
        is_module: whether ``target`` names a module.
        arguments: its own, behind its name in ``sys.argv``.
        path: ``sys.path`` without the entry that belongs to the program.
        simulated: it runs on the simulated accelerator.
        cuda_as_sim: CUDA means the simulated accelerator in its files.
        packages: and in these packages.
        races: what becomes of races: ``error``, ``report`` or ``off``.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    simulated: bool = True
    cuda_as_sim: bool = False
    packages: tuple[str, ...] = ()
    races: str = "off"


@dataclass(frozen=True)
class Facts:
    """What a rank tells when its program is over.

    Attributes:
        exit_code: with which the program ends its process.
        groups: how many process groups it has made.
        uses: how often it has used a simulated device, see :func:`usage.uses_of_device`.
    """

    exit_code: int
    groups: int
    uses: int
