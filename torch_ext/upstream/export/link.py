"""Finds what a change needs upstream, as a linker does: each name that it uses is upstream's, or goes along.

Note [What goes where]
~~~~~~~~~~~~~~~~~~~~~~
A module of ours whose counterpart upstream has is merged into it, definition by definition; a module of ``_fsdp`` is
merged into ``common_fsdp``. A module that upstream lacks goes whole, as a file.

A name that upstream's counterpart has is upstream's: its definition wins, and ours stays here. A name that it lacks
goes along with all that it uses. A method that a test calls on itself, and that upstream's class lacks, goes into that
class.
"""

from __future__ import annotations

import ast

from torch_ext.upstream.export import spelled
from torch_ext.upstream.export.edits import Edit, renamed, without
from torch_ext.upstream.export.modules import Definition, Module, Tree, members_of
from torch_ext.upstream.export.pieces import Piece, Target
from torch_ext.upstream.export.places import Places, is_ours, lineage
from torch_ext.upstream.export.references import bound_anywhere, own_attributes, uses
from torch_ext.upstream.export.trees import path_of
from torch_ext.upstream.export.words import Passage, Words

__all__ = ["Linker"]


class Linker:
    """Collects targets. ``problems`` says what cannot go upstream, a line each."""

    def __init__(self, ours: Tree, theirs: Tree) -> None:
        self.ours, self.theirs = ours, theirs
        self.places = Places(ours, theirs)
        self.targets: dict[str, Target] = {}
        self.problems: list[str] = []
        self.used: set[str] = set()  # upstream's names that stand in for ours
        self._words = Words(self.places, self)

    # What is to go.

    def add_file(self, name: str) -> None:
        """Export module ``name``: as a file, or, if upstream has that file, what upstream's lacks."""
        module = self.ours.module(name)
        if module is None:
            self.problems.append(f"{name}: there is no such module")
            return
        if replaced := [each for each in module.all or () if f"{name}.{each}" in spelled.STAND_INS]:
            for each in replaced:
                stand_in, _, stands = spelled.STAND_INS[f"{name}.{each}"].partition(":")
                self._words.stand_in(stand_in, stands, self.places.place(name), self.target_at(self.places.place(name)))
            return
        if advice := spelled.advice_for(name):
            self.problems.append(f"{path_of(name)}.py: {advice}")
            return
        target = self.target_for(name)
        if target.whole is not None:
            return
        shared = [each for each in module.definitions if self.places.has(target.module, each)]
        for each, definition in module.definitions.items():
            if each in shared:
                self._add_tests(target, module, definition)
            elif each in module.all if module.all is not None else not each.startswith("_"):
                self.add_name(name, each)

    def add_name(self, module: str, name: str) -> str:
        """Export a definition, unless upstream has it, and return what it is called upstream."""
        found = self.ours.find(module, name)
        if found is None:
            self.problems.append(f"{module} has no {name}")
            return name
        home, definition = found
        target = self.target_for(home.name)
        if target.whole is not None:
            return name
        return self.add_piece(target, home, definition)

    def _add_tests(self, target: Target, module: Module, definition: Definition) -> None:
        theirs = self.theirs.find(target.module, definition.name)
        if theirs is None or not (definition.is_class and theirs[1].is_class):
            return
        known = members_of(self.theirs, *theirs)
        for name, statement in definition.members().items():
            if name.startswith("test_") and name not in known:
                self._add_member(target, module, definition, name, statement, into=definition.name)

    def changed(self, module: Module, definition: Definition, member: ast.stmt | None = None) -> tuple[Target, Piece]:
        """Return a definition, or a member of a class, in upstream's words, although upstream has one of its name."""
        target = self.target_for(module.name)
        piece = Piece(module, definition, definition.name, member)
        self._link_piece(piece, target)
        return target, piece

    def add_member(self, module: Module, definition: Definition, name: str) -> None:
        """Export one member of a class that upstream has, into that class."""
        target = self.target_for(module.name)
        self._add_member(target, module, definition, name, definition.members()[name], into=definition.name)

    # Where it goes, and how it is said there.

    def target_for(self, ours: str) -> Target:
        name = self.places.place(ours)
        if name not in self.targets:
            existing = self.theirs.module(name)
            target = self.targets[name] = Target(name, existing)
            if existing is None:
                target.whole = self.ours.module(ours)
                self._link_whole(target)
        return self.targets[name]

    def _link_whole(self, target: Target) -> None:
        module = target.whole
        if module is None:
            raise AssertionError(f"{target.module} is no new file")
        top = [each for each in module.tree.body if not isinstance(each, (ast.Import, ast.ImportFrom))]
        taken = bound_anywhere(module.tree.body) | set(module.imports)
        for statement in top:
            if isinstance(statement, ast.ClassDef):
                self._need_members(module, Definition(statement.name, statement))
        for statement in module.tree.body:
            if isinstance(statement, ast.ImportFrom):
                if is_ours(module.absolute(statement)):
                    target.edits.append(without(statement))
            elif isinstance(statement, ast.Import):
                if any(is_ours(alias.name) for alias in statement.names):
                    target.edits.append(without(statement))
            else:
                edits: list[Edit] = []
                self._words.link(statement, Passage(module, target, taken, edits))
                target.edits += edits

    def add_piece(self, target: Target, home: Module, definition: Definition) -> str:
        key = (home.name, definition.name)
        if key in target.pieces:
            return target.pieces[key].name
        piece = Piece(home, definition, self._free_name(target, home, definition.name))
        target.pieces[key] = piece
        if piece.name != definition.name:
            piece.edits += renamed(definition, piece.name)
        self._link_piece(piece, target)
        if definition.is_class:
            self._need_members(home, definition)
        return piece.name

    def _add_member(
        self, target: Target, home: Module, definition: Definition, name: str, statement: ast.stmt, into: str
    ) -> None:
        key = (home.name, f"{into}.{name}")
        if key not in target.pieces:
            # What the class's body defines for its decorators and defaults.
            beside = definition.members()
            for each in {use.name for use in uses(statement)} & beside.keys() - {name}:
                self._add_member(target, home, definition, each, beside[each], into)
            piece = target.pieces[key] = Piece(home, definition, name, member=statement, into=into)
            self._link_piece(piece, target)
            self._need_members(home, definition, only=statement)

    def _free_name(self, target: Target, home: Module, name: str) -> str:
        """Return ``name``, or another one if upstream's file, or what else goes there, uses it for something else."""
        others = {piece.name for key, piece in target.pieces.items() if key[0] != home.name and not piece.member}
        if name not in others and not self.places.has(target.module, name):
            return name
        room = home.name.rpartition(".")[2]
        return f"{name}_of_{room}"

    def _link_piece(self, piece: Piece, target: Target) -> None:
        taken = bound_anywhere(piece.statements)
        for statement in piece.statements:
            self._words.link(statement, Passage(piece.module, target, taken, piece.edits, piece.inside))

    # What a class is expected to have.

    def _need_members(self, module: Module, definition: Definition, only: ast.stmt | None = None) -> None:
        """Export the methods that a class calls on itself and that upstream's class of that name lacks."""
        mine = members_of(self.ours, module, definition)
        lines = list(lineage(self.ours, module, definition))
        for name in sorted(own_attributes(only or definition.node)):
            if name not in mine or name.startswith("__"):
                continue
            home, statement = mine[name]
            if isinstance(statement, ast.AnnAssign) and statement.value is None:
                continue  # set on the instance, by upstream's class too
            shared = next(
                (each for each in lines if self.places.shared(*each) and name in members_of(self.ours, *each)), None
            )
            if shared is None or not is_ours(home.name):
                continue
            place = self.places.place(shared[0].name)
            theirs = self.theirs.find(place, shared[1].name)
            if theirs is None or name in members_of(self.theirs, *theirs):
                continue
            # A class below, which goes along, may define it itself.
            if any(name in each.members() for _, each in lines[: lines.index(shared)]):
                continue
            self._member_for(name, home, statement, self.target_at(theirs[0].name), shared[1].name)

    def _member_for(self, name: str, home: Module, statement: ast.stmt, target: Target, into: str) -> None:
        if stand_in := spelled.MEMBERS.get(name):
            module, _, owner = stand_in.partition(":")
            there = self.ours.module(module)
            if there is None:
                raise AssertionError(f"{module} is no module")
            definition = there.definitions[owner]
            self._add_member(target, there, definition, name, definition.members()[name], into)
        elif advice := spelled.advice_for(home.name):
            self.problems.append(f"{into}.{name}, which a test calls, is not in upstream's class: {advice}")
        else:
            owner_definition = next(
                each for each in home.definitions.values() if statement in getattr(each.node, "body", ())
            )
            self._add_member(target, home, owner_definition, name, statement, into)

    def target_at(self, theirs: str) -> Target:
        return self.targets.setdefault(theirs, Target(theirs, self.theirs.module(theirs)))
