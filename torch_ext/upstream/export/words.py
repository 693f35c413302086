"""What a statement of ours says in upstream's words: the names that it uses, linked one by one."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch_ext.upstream.export import spelled
from torch_ext.upstream.export.edits import Edit, replace_node
from torch_ext.upstream.export.modules import Definition, Import, Module
from torch_ext.upstream.export.pieces import Target
from torch_ext.upstream.export.places import Places, import_into, is_ours, only_ours
from torch_ext.upstream.export.private_names import places_of
from torch_ext.upstream.export.references import Use, nested_imports, uses
from torch_ext.upstream.export.trees import OURS, path_of

__all__ = ["Going", "Passage", "Words"]

_COMPAT = "torch_ext.compat"


@dataclass(frozen=True)
class Passage:
    """What is being put into upstream's words.

    Attributes:
        module: the module of ours that it is from.
        target: the file of upstream's where it goes.
        taken: names that it binds itself.
        edits: the changes that it needs; grows.
        inside: the definitions of ours that it uses and that go to the same file; grows.
    """

    module: Module
    target: Target
    taken: set[str]
    edits: list[Edit] = field(default_factory=list)
    inside: list[tuple[str, str]] = field(default_factory=list)


class Going(Protocol):
    """What goes along, as the linker collects it."""

    problems: list[str]  # what cannot go, a line each; grows
    used: set[str]  # upstream's names that stand in for ours; grows

    def target_for(self, ours: str) -> Target:
        """Return the file of upstream's for a module of ours."""

    def target_at(self, theirs: str) -> Target:
        """Return the file of upstream's that is this module."""

    def add_piece(self, target: Target, home: Module, definition: Definition) -> str:
        """Have a definition go along, and return what it is called there."""


class Words:
    """Links statements. Asks ``going`` to take along what upstream lacks."""

    def __init__(self, places: Places, going: Going) -> None:
        self._places, self._going = places, going

    def link(self, statement: ast.AST, passage: Passage) -> None:
        """Add to ``passage`` what ``statement``, which is part of it, must say otherwise."""
        module = passage.module
        for each in nested_imports(statement):
            if is_ours(module.absolute(each)):
                passage.edits.append(self._nested_import(each, statement, passage))
        for use in uses(statement):
            self._link_use(use, passage)

    def _link_use(self, use: Use, passage: Passage) -> None:
        module, target = passage.module, passage.target
        if use.name in module.definitions:
            if target.whole is module:
                return
            found = self._spelled(self._places.site(module.name, use.name), use, use.node, target)
            if found is not None:
                passage.edits.append(found)
                return
            text = self._ours(module.name, use.name, passage, where=f"{module.name}:{use.node.lineno}")
            if text != use.name:
                passage.edits.append(replace_node(use.node, text))
            return
        origin = module.imports.get(use.name)
        if origin is None:
            if not hasattr(builtins, use.name) and use.name != "__file__":
                self._star(use, passage)
            return
        if not is_ours(origin.dotted):
            if target.whole is not module:
                bound = import_into(target, use.name, origin)
                if bound != use.name:
                    passage.edits.append(replace_node(use.node, bound))
            return
        where = f"{path_of(module.name)}.py:{use.node.lineno}"
        if not origin.attribute or self._places.ours.module(origin.dotted) is not None:
            self._link_attribute(use, origin.dotted, passage, where)
        else:
            found = self._spelled(f"{self._places.site(origin.module, origin.attribute)}", use, use.node, target)
            if found is not None:
                passage.edits.append(found)
                return
            text = self._named(origin.module, origin.attribute, use.name, passage, where)
            if text != use.name:
                passage.edits.append(replace_node(use.node, text))

    def _link_attribute(self, use: Use, ours: str, passage: Passage, where: str) -> None:
        """``use`` is a module of ours: link what is read off it."""
        target = passage.target
        attribute = use.attribute()
        if attribute is None:
            self._going.problems.append(f"{where}: {use.name} is a module of this project, used as a value")
            return
        module = self._places.ours.module(ours)
        if module is None:
            raise AssertionError(f"{ours} is no module")
        found = self._spelled(self._places.site(ours, attribute.attr), use, attribute, target)
        if found is not None:
            passage.edits.append(found)
            return
        if ours.startswith(f"{_COMPAT}.") and (text := self._through_module(use, module, attribute.attr, target)):
            passage.edits.append(replace_node(attribute, text))
            return
        place = self._places.place(ours)
        kept = ours.startswith(OURS) and place.rpartition(".")[2] == ours.rpartition(".")[2] and place != target.module
        text = self._named(ours, attribute.attr, attribute.attr, passage, where, through=kept)
        if kept and text == attribute.attr:
            package, _, name = place.rpartition(".")
            import_into(target, use.name, Import(package, name))
        else:
            passage.edits.append(replace_node(attribute, text))

    def _through_module(self, use: Use, module: Module, name: str, target: Target) -> str:
        """Return ``use.name`` for a name that is an attribute of the module that our own name for it tells."""
        home, _, attribute = (*places_of(module, name), ":")[0].partition(":")
        package, _, last = home.rpartition(".")
        if not last or last not in use.name.split("_") or "." in attribute:
            return ""
        bound = import_into(target, use.name, Import(package, last))
        return f"{bound}.{attribute}"

    def _spelled(self, site: str, use: Use, node: ast.expr, target: Target) -> Edit | None:
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
                import_into(target, name or home.split(".")[0], Import(home, name))
            self._going.used.add(needed)
        arguments = [ast.unparse(each) for each in replaced.args] if isinstance(replaced, ast.Call) else []
        return replace_node(replaced, words.text.format(*arguments) if arguments else words.text)

    def _named(self, module: str, name: str, local: str, passage: Passage, where: str, through: bool = False) -> str:
        """Return what ``module.name`` of ours is called in ``target``, where we call it ``local``; import it there."""
        if module == _COMPAT or module.startswith(f"{_COMPAT}."):
            return self._private(module, name, local, passage, where)
        if found := spelled.STAND_INS.get(self._places.site(module, name)):
            stand_in, _, stands = found.partition(":")
            return self.stand_in(stand_in, stands, self._places.place(module), passage.target)
        return self._ours(module, name, passage, where, local, through)

    def _private(self, module: str, name: str, local: str, passage: Passage, where: str) -> str:
        """A private name of torch, which upstream imports from where it is."""
        target = passage.target
        places = places_of(self._places.ours.module(module), name)
        if not places:
            self._going.problems.append(f"{where}: {module}.{name} is no name of torch; {spelled.advice_for(_COMPAT)}")
            return local
        known = [each for each in places if self._places.theirs.find(*each.split(":")) is not None]
        home, _, attribute = (known or list(places))[0].partition(":")
        first, _, rest = attribute.partition(".")
        # A local variable may have torch's name for it; ours may not, since it is ours.
        wanted = first if local == name else local
        if wanted in passage.taken and wanted not in target.imports and wanted != local:
            wanted = f"_{first.lstrip('_')}"
        bound = import_into(target, wanted, Import(home, first))
        return f"{bound}.{rest}" if rest else bound

    def _ours(
        self, module: str, name: str, passage: Passage, where: str, local: str = "", through: bool = False
    ) -> str:
        """A definition of ours: upstream's of that name, or our own, which then goes along."""
        target = passage.target
        local = local or name
        found = self._places.ours.find(module, name)
        here = self._places.ours.module(module)
        home = found[0].name if found else module
        place = self._places.place(home if found and is_ours(home) else module)
        front = self._places.place(module)
        listed = found is None or not name.startswith("_") or name in (found[0].all or ()) or through
        counterpart = next((each for each in dict.fromkeys((front, place)) if self._places.has(each, name)), "")
        if counterpart and listed and not (found and name not in (found[0].all or ()) and only_ours(found[0])):
            self._going.used.add(f"{counterpart}:{name}")
            return local if through else self._reach(target, counterpart, name, local)
        if found is None or not is_ours(home):
            if here is not None and (origin := here.imports.get(name)) and not is_ours(origin.dotted):
                return import_into(target, local, origin)
            self._going.problems.append(f"{where}: upstream has no {name} ({place}), and neither has this tree")
            return local
        if advice := spelled.advice_for(home):
            self._going.problems.append(f"{where} uses {name}, which upstream has not: {advice}")
            return local
        going = self._going.target_for(home)
        if going is target and going.whole is None:
            passage.inside.append((home, name))
        if going.whole is not None:
            return local if through else self._reach(target, going.module, name, local)
        called = self._going.add_piece(going, *found)
        return called if through else self._reach(target, going.module, called, local if called == name else called)

    def _reach(self, target: Target, module: str, name: str, local: str) -> str:
        return name if module == target.module else import_into(target, local, Import(module, name))

    def stand_in(self, module: str, name: str, place: str, target: Target) -> str:
        """Have what replaces one of our helpers go to ``place``, and return its name in ``target``."""
        home = self._places.ours.module(module)
        if home is None:
            raise AssertionError(f"{module} is no module")
        going = self._going.target_at(place)
        return self._reach(target, place, self._going.add_piece(going, home, home.definitions[name]), name)

    def _star(self, use: Use, passage: Passage) -> None:
        module = passage.module
        if any(self._places.ours.find(star, use.name) for star in module.stars):
            self._ours(module.name, use.name, passage, f"{path_of(module.name)}.py:{use.node.lineno}")

    def _nested_import(self, statement: ast.ImportFrom, around: ast.AST, passage: Passage) -> Edit:
        """An import inside a function: of upstream's module, or of nothing if what it names is at hand."""
        module, target = passage.module, passage.target
        where, home = f"{path_of(module.name)}.py:{statement.lineno}", module.absolute(statement)
        kept: dict[str, list[str]] = {}
        for alias in statement.names:
            local = alias.asname or alias.name
            text = self._named(home, alias.name, local, replace(passage, taken=set()), where)
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
