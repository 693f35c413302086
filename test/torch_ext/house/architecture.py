"""The generated parts of ``docs/architecture.md``: the picture of imports, a line per file, the world's variables.

``python docs/draw.py`` writes them; ``test_architecture.py`` fails while they differ from the tree. Imports no torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from test.torch_ext.house.source import CHECKOUT, imports, module_name, python_files, shown

PAGE = CHECKOUT / "docs" / "architecture.md"

_PACKAGES = ("torch_ext", "testing")
_NATIVE = (".h", ".cpp")
_NAMED_MODULE = re.compile(r"(torch_ext(?:\.\w+)+)(?::\w+)?")
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def main(page: Path = PAGE) -> None:
    """Write the generated parts of ``page``."""
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")


def updated(page: str) -> str:
    """Return ``page`` with each generated part as the tree has it now.

    Raises:
        KeyError: the page asks for a part that nobody generates.
    """
    return BLOCK.sub(lambda block: f"{block[1]}{PARTS[block[2]]()}{block[3]}", page)


# Imports


def arrows(files: list[Path]) -> dict[tuple[str, str], bool]:
    """Return who imports whom among the boxes of the picture, and whether that happens when the file is loaded.

    False stands for an import on use: inside a function, or of a module that a string names.
    """
    known = {module_name(path) for path in files}
    found: dict[tuple[str, str], bool] = {}
    for path in files:
        name = module_name(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = [(each.name, not each.lazy) for each in imports(tree, package)]
        targets += [(each, False) for each in _modules_in_strings(tree)]
        for target, at_once in targets:
            arrow = box_of(name), box_of(_module_in(target, known))
            if all(arrow) and arrow[0] != arrow[1]:
                found[arrow] = found.get(arrow, False) or at_once
    return found


def box_of(module: str) -> str:
    """Return the box that ``module`` is drawn in; empty if it is not drawn.

    >>> box_of("torch_ext.world.tree"), box_of("test.distributed.fsdp.test_fsdp_core"), box_of("torch_ext")
    ('torch_ext.world', 'test.distributed', '')
    """
    parts = module.split(".")
    if parts[0] == "run_test":
        return parts[0]
    drawn = parts[0] == "torch_ext" or parts[:2] == ["test", "distributed"]
    return ".".join(parts[:2]) if drawn and len(parts) > 1 else ""


def _modules_in_strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (named := _NAMED_MODULE.fullmatch(node.value))
        ):
            yield named[1]


def _module_in(name: str, known: set[str]) -> str:
    """Return the module that an imported name is or belongs to; empty if it is not one of ours."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _picture_of_imports() -> str:
    files = [path for folder in (*_PACKAGES, "test/distributed") for path in python_files(folder)]
    drawn = arrows([*files, CHECKOUT / "run_test.py"])
    boxes = sorted({box for arrow in drawn for box in arrow})
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {_identifier(box)}["{_place(box)}"]' for box in boxes]
    lines += [
        f"    {_identifier(source)} {'-->' if at_once else '-.->'} {_identifier(target)}"
        for (source, target), at_once in sorted(drawn.items())
    ]
    return "\n".join([*lines, "```", ""])


def _identifier(box: str) -> str:
    return box.replace(".", "_").strip("_")


def _place(box: str) -> str:
    path = box.replace(".", "/")
    if (CHECKOUT / f"{path}.py").is_file():
        return f"{path}.py"
    return "testing/" if path == "torch_ext/testing" else f"{path}/"


# One line per file


def _rooms() -> str:
    files = [path for folder in _PACKAGES for path in python_files(folder)]
    files += [path for path in (CHECKOUT / "torch_ext").rglob("*") if path.suffix in _NATIVE]
    by_folder: dict[str, list[Path]] = {}
    for path in files:
        by_folder.setdefault(shown(path.parent), []).append(path)
    order = sorted(by_folder, key=lambda folder: (not folder.startswith("torch_ext"), folder))
    return "".join(_folder(folder, by_folder[folder]) for folder in order)


def _folder(folder: str, files: list[Path]) -> str:
    doors = [path for path in files if path.name == "__init__.py"]
    introduction = "".join(f"{said}\n\n" for path in doors if (said := said_of(path)))
    lines = [f"- [`{name}`](../{shown(path)}): {said_of(path)}\n" for name, path in rooms_among(files)]
    return f"\n### `{folder}/`\n\n{introduction}{''.join(lines)}" if introduction or lines else ""


def rooms_among(files: list[Path]) -> list[tuple[str, Path]]:
    """Return the name of each room among a folder's files, and the file that introduces it.

    A native source and its header are one room, which the header introduces.
    """
    native = {path.stem: path for path in sorted(files) if path.suffix == ".cpp"}
    native |= {path.stem: path for path in files if path.suffix == ".h"}
    python = [(path.name, path) for path in files if path.suffix == ".py" and path.name != "__init__.py"]
    return sorted([*python, *native.items()])


def said_of(path: Path) -> str:
    """Return the first sentence in which ``path`` introduces itself; empty if it does not."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    comment = re.match(r"(//.*\n)*", text)
    said = re.sub(r"^// ?", "", comment[0] if comment else "", flags=re.MULTILINE)
    return re.sub(rf": see {re.escape(path.stem)}\.cpp\.$", ".", first_sentence(said))


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring or comment, in Markdown.

    >>> first_sentence("Starts ``ranks`` by :func:`~a.b.start`, once.\\n\\nMore.")
    'Starts `ranks` by `start`, once.'
    >>> first_sentence("Who calls\\nwhom. Imports no torch.")
    'Who calls whom.'
    """
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`:])", paragraph)[0]
    sentence = re.sub(r":\w+:`(?:~[\w.]*\.)?([\w.]+)`", r"`\1`", sentence)
    return sentence.replace("``", "`")


# Variables


def _variables() -> str:
    lines = ["| variable | what it does |", "| --- | --- |"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in variables_of_the_world().items()]
    return "\n".join([*lines, ""])


def variables_of_the_world() -> dict[str, str]:
    """Return the table in the docstring of ``world/settings.py``, each note followed by the file that holds it."""
    text = (CHECKOUT / "torch_ext" / "world" / "settings.py").read_text(encoding="utf-8")
    rows: dict[str, str] = {}
    name = ""
    for line in (ast.get_docstring(ast.parse(text)) or "").splitlines():
        if row := re.match(r"``(TORCH_EXT_\w+)``\s+(.*)", line):
            name = row[1]
            rows[name] = row[2]
        elif name and line.startswith(" "):
            rows[name] += f" {line.strip()}"
    return {name: _with_places(meaning).replace("``", "`") for name, meaning in rows.items()}


def _with_places(meaning: str) -> str:
    return re.sub(r"Note \[[^]]+\]", lambda note: f"[{note[0]}]({_place_of(note[0])})", meaning)


def _place_of(note: str) -> str:
    titled = re.compile(rf"^{re.escape(note)}\n~+$", re.MULTILINE)
    holders = [path for path in python_files("torch_ext") if titled.search(path.read_text(encoding="utf-8"))]
    if len(holders) != 1:
        raise LookupError(f"world/settings.py points to {note}, which {len(holders)} files hold; exactly one must")
    return f"../{shown(holders[0])}"


PARTS: dict[str, Callable[[], str]] = {"imports": _picture_of_imports, "rooms": _rooms, "variables": _variables}


# Messages


def messages() -> set[str]:
    """Return the names in the tables of messages, in ``world/protocol.py`` and ``runner/messages.py``."""
    found: set[str] = set()
    for file in ("world/protocol.py", "runner/messages.py"):
        text = (CHECKOUT / "torch_ext" / file).read_text(encoding="utf-8")
        table = (ast.get_docstring(ast.parse(text)) or "").partition("\n====")[2]
        found |= set(re.findall(r":class:`(\w+)`", table))
    return found


def messages_drawn(page: str) -> set[str]:
    """Return the names of messages on the arrows between processes."""
    picture = page.partition("## Processes")[2].partition("```mermaid")[2].partition("```")[0]
    labels = re.findall(r'-- "([^"]*)" -->', picture)
    return {name for label in labels for name in re.findall(r"\b[A-Z]\w+", label)}
