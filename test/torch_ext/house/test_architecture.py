"""``docs/architecture.md`` fits the tree: its generated parts, and every file, name and message that it mentions."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.house import architecture
from test.torch_ext.house.architecture import BLOCK, PAGE, PARTS, arrows, messages, messages_drawn, said_of, updated
from test.torch_ext.house.source import CHECKOUT, python_files, shown

DRAW = CHECKOUT / "docs" / "draw.py"
TEXT = PAGE.read_text(encoding="utf-8")
WRITTEN = BLOCK.sub("", TEXT)  # by hand

PAGES = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")

CODE = [path for folder in ("torch_ext", "testing") for path in (CHECKOUT / folder).rglob("*.*")]
CODE = [path for path in CODE if path.suffix in (".py", ".cpp", ".h")]


def test_the_generated_parts_are_up_to_date() -> None:
    assert updated(TEXT) == TEXT, "run: python docs/draw.py"


def test_the_page_shows_every_generated_part() -> None:
    assert [block[1] for block in BLOCK.findall(TEXT)] == ["imports", "variables", "rooms"]
    assert PARTS.keys() == {"imports", "variables", "rooms"}


def test_one_command_brings_a_page_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(BLOCK.sub(r"\1no longer true\n\3", TEXT))
    subprocess.run([sys.executable, str(DRAW), str(page)], cwd=tmp_path, check=True)
    assert page.read_text() == updated(TEXT)


def test_arrows_are_drawn_as_the_files_import() -> None:
    drawn = arrows([path for folder in ("torch_ext", "testing") for path in python_files(folder)])
    at_once = {("torch_ext.runner", "torch_ext.world"), ("torch_ext.testing", "torch_ext.accelerator")}
    on_use = {
        ("torch_ext.accelerator", "torch_ext.sim"),  # a string names it
        ("torch_ext.testing", "torch_ext.runner"),  # a function imports it
    }
    assert {arrow: drawn.get(arrow) for arrow in at_once | on_use} == {
        **dict.fromkeys(at_once, True),
        **dict.fromkeys(on_use, False),
    }
    assert ("torch_ext.world", "torch_ext.runner") not in drawn


def test_every_file_introduces_itself() -> None:
    files = [path for folder in ("torch_ext", "testing") for path in python_files(folder)]
    assert [shown(path) for path in files if path.name != "__init__.py" and not said_of(path)] == []


def test_every_native_source_or_its_header_introduces_itself() -> None:
    sources = [path for path in CODE if path.suffix == ".cpp"]
    assert sources
    introduced = {path.with_suffix("") for path in CODE if path.suffix in (".cpp", ".h") and said_of(path)}
    silent = [shown(path) for path in sources if path.with_suffix("") not in introduced]
    assert silent == [], "say in a comment on the first line what it is"


def test_every_message_is_drawn() -> None:
    assert {"Start", "Receipt", "TestEnded"} <= messages()
    assert messages_drawn(TEXT) == messages()


def test_a_life_has_ten_steps() -> None:
    life = TEXT.partition("## The life of a test, in ten steps")[2].partition("\n## ")[0]
    assert re.findall(r"^(\d+)\. ", life, re.MULTILINE) == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    broken = [link for link in LINK.findall(text) if not _leads_somewhere(page, link, headings)]
    assert broken == []


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _leads_somewhere(page: Path, link: str, headings: set[str]) -> bool:
    if link.startswith("#"):
        return link in headings
    return "://" in link or (page.parent / link.partition("#")[0]).exists()


def test_files_that_are_mentioned_exist() -> None:
    files = [*PAGES, CHECKOUT / "run_test.py", *CODE]
    files += [path for folder in ("test", "benchmarks", "docs") for path in python_files(folder)]
    known = [f"/{shown(path)}" for path in files]
    mentioned = set(re.findall(r"[\w./]*\w\.(?:py|cpp|h|md)\b", LINK.sub("", WRITTEN))) - {"test_file.py"}
    assert len(mentioned) > 20
    assert sorted(name for name in mentioned if not any(path.endswith(f"/{name}") for path in known)) == []


def test_names_that_are_mentioned_exist() -> None:
    words = {word for path in CODE for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    outside_code = re.sub(r"^```.*?^```", "", WRITTEN, flags=re.DOTALL | re.MULTILINE)
    mentioned = {name.split(".")[-1] for name in re.findall(r"`([A-Za-z_][\w.]*)`", outside_code)}
    mentioned -= {"py", "cpp", "h", "md"}
    assert {"TEST_SKIPS", "_spawn_processes", "Reporter"} <= mentioned
    assert sorted(mentioned - words) == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_page_is_linked(page: str) -> None:
    assert "docs/architecture.md" in LINK.findall((CHECKOUT / page).read_text(encoding="utf-8"))


def test_the_generators_examples_are_true() -> None:
    failed, tried = doctest.testmod(architecture)
    assert (failed, tried > 0) == (0, True)
