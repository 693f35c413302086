"""Every environment variable of ours that code reads is documented, and every one that is mentioned is read."""

import re

from test.torch_ext.house.source import CHECKOUT, python_files, shown

NAME = re.compile(r"TORCH_EXT_[A-Z0-9_]*[A-Z0-9]")

NATIVE = [path for path in (CHECKOUT / "torch_ext").rglob("*") if path.suffix in (".cpp", ".h")]
PACKAGE = [path for folder in ("torch_ext", "testing") for path in python_files(folder)]
OTHERS = [path for folder in ("test", "benchmarks", ".ci") for path in python_files(folder)]
PAGES = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")])

# The tables of variables.
DOCUMENTED_IN = [CHECKOUT / "docs/variables.md", CHECKOUT / "torch_ext/sim/__init__.py"]


def read_by(source):
    """Return our variables that Python code reads from the environment, by a literal or by a constant of the file."""
    constants = dict(re.findall(r'^\s*(\w+) = "(\w+)"', source, re.MULTILINE))
    keys = re.findall(r'\b(?:get|getenv|pop)\(\s*([\w"]+)|\[([\w"]+)\](?! =)|([\w"]+) (?:not )?in ', source)
    names = {constants.get(key, key.strip('"')) for found in keys for key in found}
    return {name for name in names if NAME.fullmatch(name)}


def _text(path):
    return path.read_text(encoding="utf-8")


def _read_in(files):
    """Return our variables that Python code reads, and those that are string literals of C++ sources."""
    python = {name for path in files if path.suffix == ".py" for name in read_by(_text(path))}
    native = (_text(path) for path in files if path.suffix != ".py")
    return python | {name for text in native for name in re.findall(rf'"({NAME.pattern})"', text)}


def test_variables_read_are_documented():
    read = _read_in([*PACKAGE, *NATIVE])
    assert {"TORCH_EXT_DEVICE", "TORCH_EXT_TIMEOUT", "TORCH_EXT_SIM_DEVICES", "TORCH_EXT_SIM_SANITIZE"} <= read
    documents = map(_text, [*PAGES, *DOCUMENTED_IN])
    documented = {name for document in documents for name in NAME.findall(document)}
    assert sorted(read - documented) == [], "add a line to docs/variables.md or to another page"


def test_mentioned_variables_are_read():
    read = _read_in([*PACKAGE, *NATIVE, *OTHERS])
    # Variables set for the processes of other programs, which may read them.
    lines = [line for path in DOCUMENTED_IN for line in _text(path).splitlines() if "do not set it" in line]
    read |= {name for line in lines for name in NAME.findall(line)}
    mentioned = {(name, shown(path)) for path in [*PAGES, *PACKAGE, *NATIVE] for name in NAME.findall(_text(path))}
    assert sorted((name, path) for name, path in mentioned if name not in read) == []
