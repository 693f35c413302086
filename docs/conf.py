"""The site: ``sphinx-build -W docs site``, with what ``docs/requirements.txt`` names. The page of options is made of
the runner's own table; links to files outside of ``docs`` lead to the repository.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, os.fspath(HERE.parent))

from torch_ext.runner.options import RunOptions  # noqa: E402

project = "torch_ext"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
smartquotes = False  # options have two dashes
html_theme = "furo"
html_title = "torch_ext"
html_copy_source = False
exclude_patterns = ["requirements.txt"]
suppress_warnings = ["myst.xref_missing"]  # links out of docs, which test_architecture.py checks


def options_page() -> str:
    """Return a table of all options, by the headings of ``--help``."""
    lines = ["# Options", "", "Of `run_test.py`, `python -m torch_ext` and, where the last column says so, test files."]
    last = ""
    for field in RunOptions.__dataclass_fields__.values():
        for row in field.metadata.get("rows", ()):
            if row.group != last:
                last = row.group
                lines += ["", f"## {last.capitalize()}", "", "| option | meaning | variable | files |"]
                lines += ["| --- | --- | --- | --- |"]
            flags = ", ".join(f"`{flag}{' ' + row.metavar if row.metavar else ''}`" for flag in row.flags)
            variable = f"`{row.variable}`" if row.variable else ""
            lines.append(f"| {flags} | {row.help} | {variable} | {'yes' if row.alone else ''} |")
    return "\n".join(lines) + "\n"


(HERE / "options.md").write_text(options_page(), encoding="utf-8")
