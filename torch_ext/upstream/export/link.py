"""Resolves the names that a change uses, as a linker does: each is upstream's, or its definition is exported too.

Note [Where definitions go]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A module of ours whose counterpart upstream has is merged into it, definition by definition; a module of ``_fsdp`` is
merged into ``common_fsdp``. A module that upstream lacks goes whole, as a file.

A name that upstream's counterpart has is upstream's: its definition wins, and ours stays here. A name that it lacks
is exported with all names that it uses. A method that a test calls on itself, and that upstream's class lacks, goes
into that class.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ext.upstream.export import tables
from torch_ext.upstream.export.modules import OURS, THEIRS, Definition, Import, Module, Tree, members_of, path_of, span
from torch_ext.upstream.export.scopes import Edit, Use, own_attributes, replace_lines, replace_node, uses
from torch_ext.upstream.export.targets import Piece, Target

_COMPAT, _FSDP_ROOMS = "torch_ext.compat", f"{OURS}._fsdp."


def _is_ours(dotted: str) -> bool:
    return dotted.split(".")[0] == "torch_ext"


@dataclass(frozen=True)
class _Reference:
    """A use in line ``line`` of our ``module.name`` as ``local``. ``through``: as an attribute of its module."""

    module: str
    name: str
    local: str
    line: int
    through: bool = False


class Linker:
    """Collects ``targets``, by upstream's module, and ``problems``, a line for each name or file that cannot go."""

    def __init__(self, ours: Tree, theirs: Tree) -> None:
        self.ours, self.theirs = ours, theirs
        self.targets: dict[str, Target] = {}
        self.problems: list[str] = []

    # Definitions to export

    def add_file(self, name: str) -> None:
        """Export module ``name``: as a file or, if upstream has that file, the names that upstream's lacks."""
        module = self.ours.module(name)
        if module is None:
            self.problems.append(f"{name}: there is no such module")
        elif advice := tables.advice_for(name):
            self.problems.append(f"{path_of(name)}.py: {advice}")
        elif (target := self._target_for(name)).whole is None:
            for each, definition in module.definitions.items():
                if self._has(target.module, each):
                    self._add_tests(target, module, definition)
                elif each in module.all if module.all is not None else not each.startswith("_"):
                    self.add_name(name, each)

    def add_name(self, module: str, name: str) -> None:
        """Export a definition, unless upstream has it."""
        found = self.ours.find(module, name)
        if found is not None and (target := self._target_for(found[0].name)).whole is None:
            self._add_definition(target, *found)

    def _add_tests(self, target: Target, module: Module, definition: Definition) -> None:
        theirs = self.theirs.find(target.module, definition.name)
        if theirs is not None and definition.is_class and theirs[1].is_class:
            known = members_of(self.theirs, *theirs)
            for name in definition.members():
                if name.startswith("test_") and name not in known:
                    self._add_member(target, module, definition, name, definition.name)

    def _add_definition(self, target: Target, home: Module, definition: Definition) -> None:
        key, name = (home.name, definition.name), definition.name
        if key in target.pieces:
            return
        others = {piece.name for each, piece in target.pieces.items() if each[0] != home.name and not piece.into}
        if name in others or self._has(target.module, name):
            self.problems.append(f"{path_of(home.name)}.py: rename {name}: {target.path} has another of that name")
        piece = target.pieces[key] = Piece(home, target, [definition.node, *definition.trailers], name)
        self._link(piece)
        self._need_members(home, definition, definition.node)

    def _add_member(self, target: Target, home: Module, definition: Definition, name: str, into: str) -> None:
        members, key = definition.members(), (home.name, f"{into}.{name}")
        if key not in target.pieces:
            # The names of the class's body that the member's decorators and defaults use.
            for each in sorted({use.name for use in uses(members[name])} & members.keys() - {name}):
                self._add_member(target, home, definition, each, into)
            piece = target.pieces[key] = Piece(home, target, [members[name]], name, into)
            self._link(piece)
            self._need_members(home, definition, members[name])

    def _need_members(self, module: Module, definition: Definition, node: ast.stmt) -> None:
        """Export the methods that ``node`` calls on ``self`` and that upstream's class of that name lacks."""
        if not definition.is_class:
            return
        mine, lines = members_of(self.ours, module, definition), list(self.ours.lineage(module, definition))
        for name in sorted(own_attributes(node)):
            if name not in mine or name.startswith("__") or not _is_ours(mine[name][0].name):
                continue
            home, statement = mine[name]
            if isinstance(statement, ast.AnnAssign) and statement.value is None:
                continue  # set on the instance, by upstream's class too
            shared = (each for each in lines if self._is_shared(*each) and name in members_of(self.ours, *each))
            own = next(shared, None)
            theirs = own and self.theirs.find(self.place(own[0].name), own[1].name)
            if own and theirs and name not in members_of(self.theirs, *theirs):
                self._add_needed(name, home, statement, self._target_at(theirs[0].name), own[1].name)

    def _add_needed(self, name: str, home: Module, statement: ast.stmt, target: Target, into: str) -> None:
        if advice := tables.advice_for(home.name):
            self.problems.append(f"{into}.{name}, which a test calls, is not in upstream's class: {advice}")
        else:
            owner = next(each for each in home.definitions.values() if statement in each.members().values())
            self._add_member(target, home, owner, name, into)

    # Their place upstream

    def place(self, module: str) -> str:
        """Return upstream's name for a module of ours, whether or not upstream has it."""
        for rooms, front in (("_fsdp", "common_fsdp"), ("_distributed", "common_distributed")):
            if f"{module}.".startswith(f"{OURS}.{rooms}."):
                return f"{THEIRS}.{front}"
        return module.replace(OURS, THEIRS, 1) if module.startswith(OURS) else module

    def _has(self, module: str, name: str) -> bool:
        """Whether upstream's ``module`` defines or imports ``name``."""
        there = self.theirs.module(module)
        return there is not None and (name in there.imports or self.theirs.find(module, name) is not None)

    def _is_shared(self, module: Module, definition: Definition) -> bool:
        return _is_ours(module.name) and self._has(self.place(module.name), definition.name)

    def _target_for(self, ours: str) -> Target:
        name, module = self.place(ours), self.ours.module(ours)
        if name not in self.targets and self._target_at(name).existing is None and module is not None:
            self._add_whole(self.targets[name], module)
        return self.targets[name]

    def _target_at(self, theirs: str) -> Target:
        return self.targets.setdefault(theirs, Target(theirs, self.theirs.module(theirs)))

    def _add_whole(self, target: Target, module: Module) -> None:
        piece = target.whole = Piece(module, target, module.tree.body)
        for statement in module.tree.body:
            if isinstance(statement, ast.ClassDef):
                self._need_members(module, Definition(statement.name, statement), statement)
        self._link(piece)

    # Their text there

    def _link(self, piece: Piece) -> None:
        """Add to ``piece`` the edits that turn our names into upstream's."""
        for statement in piece.statements:
            for node in ast.walk(statement):
                if isinstance(node, (ast.Import, ast.ImportFrom)) and _imports_ours(node, piece.module):
                    # In a block for type checkers leave `pass`: the file imports the block's names at its top.
                    piece.edits.append(replace_lines(*span(node)) if node is statement else replace_node(node, "pass"))
            if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                for use in uses(statement):
                    self._link_use(use, piece)

    def _link_use(self, use: Use, piece: Piece) -> None:
        module, target, name, spine = piece.module, piece.target, use.name, use.spine
        origin = module.imports.get(name)
        if name in module.definitions:
            if target.whole is None or target.whole.module is not module:
                self._link_name(module.name, name, use, spine, piece)
        elif origin is None:
            if any(self.ours.find(star, name) for star in module.stars):
                self._link_name(module.name, name, use, spine, piece)
        elif not _is_ours(origin.dotted):
            if target.whole is not piece and (text := target.import_name(name, origin)) != name:
                piece.edits.append(replace_node(spine[0], text))
        elif origin.attribute and self.ours.module(origin.dotted) is None:
            self._link_name(origin.module, origin.attribute, use, spine, piece)
        elif len(spine) > 1 and isinstance(attribute := spine[1], ast.Attribute):
            self._link_name(origin.dotted, attribute.attr, use, spine[1:], piece)
        else:
            self.problems.append(f"{_place(use, piece)}: {name} is a module of this project, used as a value")

    def _link_name(self, home: str, name: str, use: Use, spine: Sequence[ast.expr], piece: Piece) -> None:
        """Link our name ``home.name``, with which ``spine`` begins; ``use`` names it, or the module that has it."""
        target = piece.target
        if edit := self._expression_edit(home, name, spine, target):
            piece.edits.append(edit)
            return
        place, on_module = self.place(home), spine is not use.spine
        package, _, last = place.rpartition(".")
        # Upstream has a module of that name: keep the attribute of the module.
        kept = on_module and home.startswith(OURS) and home.endswith(f".{last}") and place != target.module
        text = self._through_compat(home, name, use.name, target) if on_module else ""
        local = name if on_module else use.name
        text = text or self._upstream_name(_Reference(home, name, local, use.line, kept), piece)
        if kept and text == name:
            target.import_name(use.name, Import(package, last))
        elif on_module or text != use.name:
            piece.edits.append(replace_node(spine[0], text))

    def _expression_edit(self, module: str, name: str, spine: Sequence[ast.expr], target: Target) -> Edit | None:
        """Return the edit that spells our name as an expression of upstream's, which lacks the name."""
        found = self.ours.find(module, name)
        called = spine[1] if len(spine) > 1 and isinstance(spine[1], ast.Call) else None
        words = f"{found[0].name if found else module}.{name}{'()' if called else ''}"
        if words not in tables.EXPRESSIONS:
            return None
        text, needed = tables.EXPRESSIONS[words]
        home, _, attribute = needed.partition(":")
        if home and home != target.module:
            target.import_name(attribute or home, Import(home, attribute))
        arguments = called.args if called else ()
        return replace_node(called or spine[0], text.format(*map(ast.unparse, arguments)) if arguments else text)

    def _upstream_name(self, use: _Reference, piece: Piece) -> str:
        """Return upstream's name for ours, and import it into the file."""
        module, name, local, target = use.module, use.name, use.local, piece.target
        if f"{module}.".startswith(f"{_COMPAT}."):
            return self._private_torch_name(use, piece)
        found = self.ours.find(module, name)
        home = found[0].name if found and _is_ours(found[0].name) else module
        for front in (self.place(module), self.place(home)):
            if self._has(front, name) and not _is_private(found, use):
                return local if use.through else self._import_name(target, front, name, local)
        if found is not None and not home.startswith("torch.") and found[0].name == home:
            return self._export_definition(found, use, piece)
        our_module = self.ours.module(module)
        if our_module is not None and (origin := our_module.imports.get(name)) and not _is_ours(origin.dotted):
            return target.import_name(local, origin)
        self.problems.append(f"{_place(use, piece)}: neither upstream nor this tree has {name} ({self.place(module)})")
        return local

    def _export_definition(self, found: tuple[Module, Definition], use: _Reference, piece: Piece) -> str:
        """Export a definition that upstream lacks, and return its name there."""
        home, name, local, target = found[0].name, use.name, use.local, piece.target
        if advice := tables.advice_for(home):
            self.problems.append(f"{_place(use, piece)} uses {name}, which upstream lacks: {advice}")
            return local
        destination = self._target_for(home)
        if destination.whole is None:
            self._add_definition(destination, *found)
        return local if use.through else self._import_name(target, destination.module, name, local)

    def _import_name(self, target: Target, module: str, name: str, local: str) -> str:
        return name if module == target.module else target.import_name(local, Import(module, name))

    def _private_torch_name(self, use: _Reference, piece: Piece) -> str:
        """Import a private name of torch from its place in torch."""
        places = self._places(use.module, use.name)
        if not places:
            self.problems.append(f"{_place(use, piece)}: {use.module}.{use.name} is no name of torch")
            return use.local
        home, _, attribute = places[0].partition(":")
        first, dot, rest = attribute.partition(".")
        wanted = first if use.local == use.name else use.local
        return piece.target.import_name(wanted, Import(home, first)) + dot + rest

    def _through_compat(self, module: str, name: str, alias: str, target: Target) -> str:
        """Return ``alias.name`` for a name of compat if our ``alias`` contains the name of torch's module."""
        if not module.startswith(f"{_COMPAT}."):
            return ""
        home, _, attribute = (*self._places(module, name), ":")[0].partition(":")
        package, _, last = home.rpartition(".")
        if not last or last not in alias.split("_") or "." in attribute:
            return ""
        return f"{target.import_name(alias, Import(package, last))}.{attribute}"

    def _places(self, module: str, name: str) -> list[str]:
        """Return torch's places of a name of compat; places that upstream has come first."""
        places = vars(importlib.import_module(module))["__getattr__"].places.get(name, ())
        return sorted(places, key=lambda each: self.theirs.find(*each.split(":")) is None)


def _imports_ours(node: ast.Import | ast.ImportFrom, module: Module) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [module.absolute(node)]
    return any(map(_is_ours, names))


def _place(use: _Reference | Use, piece: Piece) -> str:
    return f"{path_of(piece.module.name)}.py:{use.line}"


def _is_private(found: tuple[Module, Definition] | None, use: _Reference) -> bool:
    """Whether the name is private to our module, so that upstream's equal name is another one."""
    if found is None or use.name in (found[0].all or ()):
        return False
    return found[0].name.startswith(_FSDP_ROOMS) or (use.name.startswith("_") and not use.through)
