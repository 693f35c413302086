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
import builtins

from torch_ext.upstream.export import spelled
from torch_ext.upstream.export.edits import Edit, renamed, replace_node, without
from torch_ext.upstream.export.modules import Definition, Import, Module, Tree, members_of
from torch_ext.upstream.export.pieces import Piece, Target
from torch_ext.upstream.export.private_names import places_of
from torch_ext.upstream.export.references import Use, bound_anywhere, nested_imports, own_attributes, uses
from torch_ext.upstream.export.trees import OURS, THEIRS, path_of

__all__ = ["Linker"]

_FSDP_ROOMS = f"{OURS}._fsdp"
_COMPAT = "torch_ext.compat"


class Linker:
    """Collects targets. ``problems`` says what cannot go upstream, a line each."""

    def __init__(self, ours: Tree, theirs: Tree) -> None:
        self.ours, self.theirs = ours, theirs
        self.targets: dict[str, Target] = {}
        self.problems: list[str] = []
        self.used: set[str] = set()  # upstream's names that stand in for ours

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
                self._stand_in(stand_in, stands, self.place(name), self._target_of(self.place(name)))
            return
        if advice := spelled.advice_for(name):
            self.problems.append(f"{path_of(name)}.py: {advice}")
            return
        target = self._target(name)
        if target.whole is not None:
            return
        shared = [each for each in module.definitions if self._upstream_has(target.module, each)]
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
        target = self._target(home.name)
        if target.whole is not None:
            return name
        return self._add_piece(target, home, definition)

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
        target = self._target(module.name)
        piece = Piece(module, definition, definition.name, member)
        self._link_piece(piece, target)
        return target, piece

    def add_member(self, module: Module, definition: Definition, name: str) -> None:
        """Export one member of a class that upstream has, into that class."""
        target = self._target(module.name)
        self._add_member(target, module, definition, name, definition.members()[name], into=definition.name)

    # Where it goes.

    def place(self, module: str) -> str:
        """Return the module of upstream's that corresponds to ours, whether or not it exists there."""
        if module == _FSDP_ROOMS or module.startswith(f"{_FSDP_ROOMS}."):
            return f"{THEIRS}.common_fsdp"
        if module == f"{OURS}._distributed" or module.startswith(f"{OURS}._distributed."):
            return f"{THEIRS}.common_distributed"
        return module.replace(OURS, THEIRS, 1) if module.startswith(OURS) else module

    def _target(self, ours: str) -> Target:
        name = self.place(ours)
        if name not in self.targets:
            existing = self.theirs.module(name)
            target = self.targets[name] = Target(name, existing)
            if existing is None:
                target.whole = self.ours.module(ours)
                self._link_whole(target)
        return self.targets[name]

    def _upstream_has(self, module: str, name: str) -> bool:
        there = self.theirs.module(module)
        return there is not None and (
            name in there.definitions or name in there.imports or self.theirs.find(module, name) is not None
        )

    # How it is said there.

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
                if _is_ours(module.absolute(statement)):
                    target.edits.append(without(statement))
            elif isinstance(statement, ast.Import):
                if any(_is_ours(alias.name) for alias in statement.names):
                    target.edits.append(without(statement))
            else:
                edits: list[Edit] = []
                self._link(statement, module, target, taken, edits, [])
                target.edits += edits

    def _add_piece(self, target: Target, home: Module, definition: Definition) -> str:
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
        if name not in others and not self._upstream_has(target.module, name):
            return name
        room = home.name.rpartition(".")[2]
        return f"{name}_of_{room}"

    def _link_piece(self, piece: Piece, target: Target) -> None:
        taken = bound_anywhere(piece.statements)
        for statement in piece.statements:
            self._link(statement, piece.module, target, taken, piece.edits, piece.inside)

    def _link(
        self,
        statement: ast.AST,
        module: Module,
        target: Target,
        taken: set[str],
        edits: list[Edit],
        inside: list[tuple[str, str]],
    ) -> None:
        for each in nested_imports(statement):
            if _is_ours(module.absolute(each)):
                edits.append(self._nested_import(each, statement, module, target, inside))
        for use in uses(statement):
            self._link_use(use, module, target, taken, edits, inside)

    def _link_use(
        self,
        use: Use,
        module: Module,
        target: Target,
        taken: set[str],
        edits: list[Edit],
        inside: list[tuple[str, str]],
    ) -> None:
        if use.name in module.definitions:
            if target.whole is module:
                return
            found = self._spelled(self._site(module.name, use.name), use, use.node, module, target)
            if found is not None:
                edits.append(found)
                return
            text = self._ours(module.name, use.name, target, inside, where=f"{module.name}:{use.node.lineno}")
            if text != use.name:
                edits.append(replace_node(use.node, text))
            return
        origin = module.imports.get(use.name)
        if origin is None:
            if not hasattr(builtins, use.name) and use.name != "__file__":
                self._star(use, module, target, inside)
            return
        if not _is_ours(origin.dotted):
            if target.whole is not module:
                bound = self._import(target, use.name, origin)
                if bound != use.name:
                    edits.append(replace_node(use.node, bound))
            return
        where = f"{path_of(module.name)}.py:{use.node.lineno}"
        if not origin.attribute or self.ours.module(origin.dotted) is not None:
            self._link_attribute(use, origin.dotted, target, taken, edits, inside, where)
        else:
            found = self._spelled(f"{self._site(origin.module, origin.attribute)}", use, use.node, module, target)
            if found is not None:
                edits.append(found)
                return
            text = self._named(origin.module, origin.attribute, use.name, target, taken, inside, where)
            if text != use.name:
                edits.append(replace_node(use.node, text))

    def _link_attribute(
        self,
        use: Use,
        ours: str,
        target: Target,
        taken: set[str],
        edits: list[Edit],
        inside: list[tuple[str, str]],
        where: str,
    ) -> None:
        """``use`` is a module of ours: link what is read off it."""
        attribute = use.attribute()
        if attribute is None:
            self.problems.append(f"{where}: {use.name} is a module of this project, used as a value")
            return
        module = self.ours.module(ours)
        if module is None:
            raise AssertionError(f"{ours} is no module")
        found = self._spelled(self._site(ours, attribute.attr), use, attribute, module, target)
        if found is not None:
            edits.append(found)
            return
        if ours.startswith(f"{_COMPAT}.") and (text := self._through_module(use, module, attribute.attr, target)):
            edits.append(replace_node(attribute, text))
            return
        place = self.place(ours)
        kept = ours.startswith(OURS) and place.rpartition(".")[2] == ours.rpartition(".")[2] and place != target.module
        text = self._named(ours, attribute.attr, attribute.attr, target, taken, inside, where, through=kept)
        if kept and text == attribute.attr:
            package, _, name = place.rpartition(".")
            self._import(target, use.name, Import(package, name))
        else:
            edits.append(replace_node(attribute, text))

    def _through_module(self, use: Use, module: Module, name: str, target: Target) -> str:
        """Return ``use.name`` for a name that is an attribute of the module that our own name for it tells."""
        home, _, attribute = (*places_of(module, name), ":")[0].partition(":")
        package, _, last = home.rpartition(".")
        if not last or last not in use.name.split("_") or "." in attribute:
            return ""
        bound = self._import(target, use.name, Import(package, last))
        return f"{bound}.{attribute}"

    def _site(self, module: str, name: str) -> str:
        found = self.ours.find(module, name)
        return f"{found[0].name}.{name}" if found else f"{module}.{name}"

    def _spelled(self, site: str, use: Use, node: ast.expr, module: Module, target: Target) -> Edit | None:
        """Return the change to upstream's own words, where they are not a name."""
        call = use.call_of(node)
        parents = [use.node, *use.parents]
        after = (
            parents[parents.index(call) + 1] if call is not None and parents.index(call) + 1 < len(parents) else None
        )
        replaced: ast.expr
        if isinstance(after, ast.Attribute) and f"{site}().{after.attr}" in spelled.EXPRESSIONS:
            words, replaced = spelled.EXPRESSIONS[f"{site}().{after.attr}"], after
        elif call is not None and f"{site}()" in spelled.EXPRESSIONS:
            words, replaced = spelled.EXPRESSIONS[f"{site}()"], call
        elif site in spelled.EXPRESSIONS:
            words, replaced = spelled.EXPRESSIONS[site], node
        else:
            return None
        for needed in words.names:
            home, _, name = needed.partition(":")
            if home != target.module:
                self._import(target, name or home.split(".")[0], Import(home, name))
            self.used.add(needed)
        arguments = [ast.unparse(each) for each in replaced.args] if isinstance(replaced, ast.Call) else []
        return replace_node(replaced, words.text.format(*arguments) if arguments else words.text)

    def _named(
        self,
        module: str,
        name: str,
        local: str,
        target: Target,
        taken: set[str],
        inside: list[tuple[str, str]],
        where: str,
        through: bool = False,
    ) -> str:
        """Return what ``module.name`` of ours is called in ``target``, where we call it ``local``; import it there."""
        if module == _COMPAT or module.startswith(f"{_COMPAT}."):
            return self._private(module, name, local, target, taken, where)
        if found := spelled.STAND_INS.get(self._site(module, name)):
            stand_in, _, stands = found.partition(":")
            return self._stand_in(stand_in, stands, self.place(module), target)
        return self._ours(module, name, target, inside, where, local, through)

    def _private(self, module: str, name: str, local: str, target: Target, taken: set[str], where: str) -> str:
        """A private name of torch, which upstream imports from where it is."""
        places = places_of(self.ours.module(module), name)
        if not places:
            self.problems.append(f"{where}: {module}.{name} is no name of torch; {spelled.advice_for(_COMPAT)}")
            return local
        known = [each for each in places if self.theirs.find(*each.split(":")) is not None]
        home, _, attribute = (known or list(places))[0].partition(":")
        first, _, rest = attribute.partition(".")
        # A local variable may have torch's name for it; ours may not, since it is ours.
        wanted = first if local == name else local
        if wanted in taken and wanted not in target.imports and wanted != local:
            wanted = f"_{first.lstrip('_')}"
        bound = self._import(target, wanted, Import(home, first))
        return f"{bound}.{rest}" if rest else bound

    def _ours(
        self,
        module: str,
        name: str,
        target: Target,
        inside: list[tuple[str, str]],
        where: str,
        local: str = "",
        through: bool = False,
    ) -> str:
        """A definition of ours: upstream's of that name, or our own, which then goes along."""
        local = local or name
        found = self.ours.find(module, name)
        here = self.ours.module(module)
        home = found[0].name if found else module
        place = self.place(home if found and _is_ours(home) else module)
        front = self.place(module)
        listed = found is None or not name.startswith("_") or name in (found[0].all or ()) or through
        counterpart = next((each for each in dict.fromkeys((front, place)) if self._upstream_has(each, name)), "")
        if counterpart and listed and not (found and name not in (found[0].all or ()) and self._only_ours(found[0])):
            self.used.add(f"{counterpart}:{name}")
            return local if through else self._reach(target, counterpart, name, local)
        if found is None or not _is_ours(home):
            if here is not None and (origin := here.imports.get(name)) and not _is_ours(origin.dotted):
                return self._import(target, local, origin)
            self.problems.append(f"{where}: upstream has no {name} ({place}), and neither has this tree")
            return local
        if advice := spelled.advice_for(home):
            self.problems.append(f"{where} uses {name}, which upstream has not: {advice}")
            return local
        going = self._target(home)
        if going is target and going.whole is None:
            inside.append((home, name))
        if going.whole is not None:
            return local if through else self._reach(target, going.module, name, local)
        called = self._add_piece(going, *found)
        return called if through else self._reach(target, going.module, called, local if called == name else called)

    def _only_ours(self, module: Module) -> bool:
        """Whether names that ``module`` does not list are its own affair: it is a room behind a front door."""
        return module.name.startswith(f"{_FSDP_ROOMS}.")

    def _reach(self, target: Target, module: str, name: str, local: str) -> str:
        return name if module == target.module else self._import(target, local, Import(module, name))

    def _stand_in(self, module: str, name: str, place: str, target: Target) -> str:
        home = self.ours.module(module)
        if home is None:
            raise AssertionError(f"{module} is no module")
        going = self.targets.setdefault(place, Target(place, self.theirs.module(place)))
        return self._reach(target, place, self._add_piece(going, home, home.definitions[name]), name)

    def _import(self, target: Target, local: str, origin: Import) -> str:
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

    def _star(self, use: Use, module: Module, target: Target, inside: list[tuple[str, str]]) -> None:
        if any(self.ours.find(star, use.name) for star in module.stars):
            self._ours(module.name, use.name, target, inside, f"{path_of(module.name)}.py:{use.node.lineno}")

    def _nested_import(
        self, statement: ast.ImportFrom, around: ast.AST, module: Module, target: Target, inside: list[tuple[str, str]]
    ) -> Edit:
        """An import inside a function: of upstream's module, or of nothing if what it names is at hand."""
        where, home = f"{path_of(module.name)}.py:{statement.lineno}", module.absolute(statement)
        kept: dict[str, list[str]] = {}
        for alias in statement.names:
            local = alias.asname or alias.name
            text = self._named(home, alias.name, local, target, set(), inside, where)
            imported = target.imports.pop(text, None)
            if imported is not None:
                name = imported.attribute + (f" as {local}" if local != imported.attribute else "")
                kept.setdefault(imported.module, []).append(name)
        lines = [f"from {origin} import {', '.join(names)}" for origin, names in kept.items()]
        indent = "\n" + " " * statement.col_offset
        if not lines and any(
            statement in body and len(body) > 1
            for node in ast.walk(around)
            for body in (getattr(node, "body", None), getattr(node, "orelse", None))
            if isinstance(body, list)
        ):
            return Edit((statement.lineno, 0), ((statement.end_lineno or statement.lineno) + 1, 0), "")
        return replace_node(statement, indent.join(lines) or "pass")

    # What a class is expected to have.

    def _need_members(self, module: Module, definition: Definition, only: ast.stmt | None = None) -> None:
        """Export the methods that a class calls on itself and that upstream's class of that name lacks."""
        mine = members_of(self.ours, module, definition)
        lines = list(_lineage(self.ours, module, definition))
        for name in sorted(own_attributes(only or definition.node)):
            if name not in mine or name.startswith("__"):
                continue
            home, statement = mine[name]
            if isinstance(statement, ast.AnnAssign) and statement.value is None:
                continue  # set on the instance, by upstream's class too
            shared = next(
                (each for each in lines if self._shared(*each) and name in members_of(self.ours, *each)), None
            )
            if shared is None or not _is_ours(home.name):
                continue
            place = self.place(shared[0].name)
            theirs = self.theirs.find(place, shared[1].name)
            if theirs is None or name in members_of(self.theirs, *theirs):
                continue
            # A class below, which goes along, may define it itself.
            if any(name in each.members() for _, each in lines[: lines.index(shared)]):
                continue
            self._member_for(name, home, statement, self._target_of(theirs[0].name), shared[1].name)

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

    def _target_of(self, theirs: str) -> Target:
        return self.targets.setdefault(theirs, Target(theirs, self.theirs.module(theirs)))

    def _shared(self, module: Module, definition: Definition) -> bool:
        return self._upstream_has(self.place(module.name), definition.name) and _is_ours(module.name)


def _lineage(tree: Tree, module: Module, definition: Definition) -> list[tuple[Module, Definition]]:
    """Return a class and its bases, as far as they are in ``tree``, nearest first."""
    found = [(module, definition)]
    for base in getattr(definition.node, "bases", ()):
        if isinstance(base, ast.Name) and (home := tree.find(module.name, base.id)) and home[1] is not definition:
            found += _lineage(tree, *home)
    return found


def _is_ours(dotted: str) -> bool:
    return dotted.split(".")[0] == "torch_ext"


def _alike(one: Import, other: Import) -> bool:
    """Whether two imports give the same thing: packages re-export names of their own modules."""
    if one.dotted == other.dotted:
        return True
    if one.attribute != other.attribute:
        return False
    return one.module == other.module or bool(one.attribute and one.module.split(".")[0] == other.module.split(".")[0])
