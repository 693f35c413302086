"""Where things of ours are upstream, and what upstream has there."""

from __future__ import annotations

import ast

from torch_ext.upstream.export.modules import Definition, Import, Module, Tree
from torch_ext.upstream.export.pieces import Target
from torch_ext.upstream.export.trees import OURS, THEIRS

__all__ = ["Places", "import_into", "is_ours", "lineage", "only_ours"]

_FSDP_ROOMS = f"{OURS}._fsdp"


class Places:
    """Our tree beside upstream's."""

    def __init__(self, ours: Tree, theirs: Tree) -> None:
        self.ours, self.theirs = ours, theirs

    def place(self, module: str) -> str:
        """Return the module of upstream's that corresponds to ours, whether or not it exists there."""
        if module == _FSDP_ROOMS or module.startswith(f"{_FSDP_ROOMS}."):
            return f"{THEIRS}.common_fsdp"
        if module == f"{OURS}._distributed" or module.startswith(f"{OURS}._distributed."):
            return f"{THEIRS}.common_distributed"
        return module.replace(OURS, THEIRS, 1) if module.startswith(OURS) else module

    def has(self, module: str, name: str) -> bool:
        """Whether upstream's ``module`` defines or imports ``name``."""
        there = self.theirs.module(module)
        return there is not None and (
            name in there.definitions or name in there.imports or self.theirs.find(module, name) is not None
        )

    def site(self, module: str, name: str) -> str:
        """Return where our ``module.name`` is defined, dotted."""
        found = self.ours.find(module, name)
        return f"{found[0].name}.{name}" if found else f"{module}.{name}"

    def shared(self, module: Module, definition: Definition) -> bool:
        """Whether upstream has a definition of that name where this one of ours would go."""
        return self.has(self.place(module.name), definition.name) and is_ours(module.name)


def lineage(tree: Tree, module: Module, definition: Definition) -> list[tuple[Module, Definition]]:
    """Return a class and its bases, as far as they are in ``tree``, nearest first."""
    found = [(module, definition)]
    for base in getattr(definition.node, "bases", ()):
        if isinstance(base, ast.Name) and (home := tree.find(module.name, base.id)) and home[1] is not definition:
            found += lineage(tree, *home)
    return found


def is_ours(dotted: str) -> bool:
    return dotted.split(".")[0] == "torch_ext"


def _alike(one: Import, other: Import) -> bool:
    """Whether two imports give the same thing: packages re-export names of their own modules."""
    if one.dotted == other.dotted:
        return True
    if one.attribute != other.attribute:
        return False
    return one.module == other.module or bool(one.attribute and one.module.split(".")[0] == other.module.split(".")[0])


def only_ours(module: Module) -> bool:
    """Whether names that ``module`` does not list are its own affair: it is a room behind a front door."""
    return module.name.startswith(f"{_FSDP_ROOMS}.")


def import_into(target: Target, local: str, origin: Import) -> str:
    """Have ``target`` import ``origin`` and return the name under which it has it."""
    existing = target.existing
    for bound in dict.fromkeys((local, origin.attribute)):
        known = target.imports.get(bound) or (existing.imports.get(bound) if existing else None)
        if bound and known and _alike(known, origin):
            if existing is None or bound not in existing.imports:
                target.imports[bound] = Import(known.module, known.attribute)
            return bound
    if existing is not None and origin.attribute:
        for bound, known in existing.imports.items():
            if known.attribute == origin.attribute and _alike(known, origin):
                return bound
    clash = existing is not None and (local in existing.imports or local in existing.definitions)
    bound = f"_{local.lstrip('_')}_" if clash or local in target.imports else local
    target.imports[bound] = Import(origin.module, origin.attribute)
    return bound
