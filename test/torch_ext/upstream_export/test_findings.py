"""Each page of docs/findings describes torch correctly: its program still prints the output on the page."""

import re

import pytest
import torch

from test.torch_ext import tiers
from test.torch_ext.interpreter import CHECKOUT, python
from test.torch_ext.program.commands import run

FOLDER = CHECKOUT / "docs" / "findings"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")

_PROGRAM = re.compile(r"<!-- program -->\n```python\n(.*?)```\n\n<!-- prints -->\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_torch_still_behaves_as_the_page_says(page, tmp_path):
    found = _PROGRAM.search(page.read_text(encoding="utf-8"))
    assert found is not None, f"{page.name} has no program"
    program, printed = found.groups()
    # If CI is set, torch's run_tests() imports a package that writes XML. In a rank, torch is loaded already.
    if tiers.is_long:
        (tmp_path / "program.py").write_text(program, encoding="utf-8")
        done = python("-W", "ignore", "program.py", folder=tmp_path, CI=None)
    else:
        done = run("-n 1 --device cpu --output rank0", program, folder=tmp_path, CI="")
    shown = [line for line in [*done.stdout.splitlines(), *done.stderr.splitlines()] if line in printed.splitlines()]
    assert shown == printed.splitlines(), (
        f"torch {torch.__version__} no longer behaves as docs/findings/{page.name} says. If torch has fixed it, remove "
        f"the page and its workaround.\nIt printed:\n{done.stdout}{done.stderr}"
    )


def test_index_lists_every_page_and_every_page_is_complete():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(PAGES) >= 4
    assert [page.name for page in PAGES if f"]({page.name})" not in index] == []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert all(part in text for part in ("**Seen on**: torch 2.", "## Cause", "## Fix and workaround")), page.name
        program = (_PROGRAM.search(text) or [""])[0]
        assert "torch.sim" in program or "torch_ext" not in program, (
            f"{page.name}: the program is for people with torch alone"
        )
