"""``docs/architecture.md`` fits the tree: every file, name and message that it mentions is there."""

import ast
import re

import pytest

from test.torch_ext.house.source import CHECKOUT, python_files, shown

TEXT = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGES = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")

CODE = [path for folder in ("torch_ext", "testing") for path in (CHECKOUT / folder).rglob("*.*")]
CODE = [path for path in CODE if path.suffix in (".py", ".cpp", ".h")]


def messages():
    """Return the names in the tables of messages, in ``world/protocol.py`` and ``runner/messages.py``."""
    found = set()
    for file in ("world/protocol.py", "runner/messages.py"):
        text = (CHECKOUT / "torch_ext" / file).read_text(encoding="utf-8")
        table = (ast.get_docstring(ast.parse(text)) or "").partition("\n====")[2]
        found |= set(re.findall(r":class:`(\w+)`", table))
    return found


def test_architecture_draws_every_message():
    assert {"Start", "Receipt", "TestEnded"} <= messages()
    picture = TEXT.partition("## Processes")[2].partition("```mermaid")[2].partition("```")[0]
    labels = re.findall(r'-- "([^"]*)" -->', picture)  # on the arrows between processes
    assert {name for label in labels for name in re.findall(r"\b[A-Z]\w+", label)} == messages()


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_have_targets(page):
    text = page.read_text(encoding="utf-8")
    headings = {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    broken = [link for link in LINK.findall(text) if not _leads_somewhere(page, link, headings)]
    assert broken == []


def _anchor(heading):
    """Return the anchor that GitHub gives a heading."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _leads_somewhere(page, link, headings):
    if link.startswith("#"):
        return link in headings
    return "://" in link or (page.parent / link.partition("#")[0]).exists()


def test_mentioned_files_exist():
    files = [*PAGES, CHECKOUT / "run_test.py", *CODE]
    files += [path for folder in ("test", "benchmarks", "docs") for path in python_files(folder)]
    known = [f"/{shown(path)}" for path in files]
    mentioned = set(re.findall(r"[\w./]*\w\.(?:py|cpp|h|md)\b", LINK.sub("", TEXT))) - {"test_file.py"}
    assert len(mentioned) > 20
    assert sorted(name for name in mentioned if not any(path.endswith(f"/{name}") for path in known)) == []


def test_mentioned_names_exist():
    words = {word for path in CODE for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    outside_code = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    mentioned = {name.split(".")[-1] for name in re.findall(r"`([A-Za-z_][\w.]*)`", outside_code)}
    mentioned -= {"py", "cpp", "h", "md"}
    assert {"TEST_SKIPS", "_spawn_processes", "Reporter"} <= mentioned
    assert sorted(mentioned - words) == []
