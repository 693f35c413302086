"""What goes upstream: statements of ours, and the files of upstream's that take them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from torch_ext.upstream.export.edits import Edit
from torch_ext.upstream.export.modules import Definition, Import, Module
from torch_ext.upstream.export.trees import path_of

__all__ = ["Piece", "Target"]


@dataclass
class Piece:
    """A statement of ours on its way upstream, with the changes that its new place asks for.

    Attributes:
        module: the module of ours that it is from.
        definition: the definition; for a member, that of the class around it.
        name: what it is called upstream.
        member: the member, if only this statement of a class goes.
        into: upstream's class that a member goes into.
        inside: the definitions of ours that it uses and that go along, in the order of their use.
    """

    module: Module
    definition: Definition
    name: str
    member: ast.stmt | None = None
    into: str = ""
    edits: list[Edit] = field(default_factory=list)
    inside: list[tuple[str, str]] = field(default_factory=list)

    @property
    def statements(self) -> list[ast.stmt]:
        return [self.member] if self.member else [self.definition.node, *self.definition.trailers]


@dataclass
class Target:
    """A file of upstream's that a change touches.

    Attributes:
        module: its dotted name, such as ``torch.testing._internal.common_fsdp`` or ``test.distributed.fsdp.test_x``.
        existing: what upstream has there, if anything.
        whole: our module that becomes this file, if upstream has none.
        pieces: what is merged into an existing file, in the order in which it was found.
        imports: what must be imported there, by local name.
    """

    module: str
    existing: Module | None
    whole: Module | None = None
    pieces: dict[tuple[str, str], Piece] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    replaced: list[tuple[ast.stmt, str]] = field(default_factory=list)  # statements of upstream's, and their new text

    @property
    def path(self) -> str:
        package = (self.whole or self.existing).package if (self.whole or self.existing) else False  # type: ignore[union-attr]
        return path_of(self.module) + ("/__init__.py" if package else ".py")
