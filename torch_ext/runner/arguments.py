"""Turns the command line and the configuration into options.

An option has the same meaning in ``[tool.torch_ext]`` of a ``pyproject.toml``, in ``TORCH_EXT_OPTIONS``, in its own
variable and on the command line: all four become flags for one parser, and the last one wins.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch_ext
from torch_ext.personality import AS_CUDA, SIM
from torch_ext.results import SetupError
from torch_ext.runner.names import find_test_files
from torch_ext.runner.options import TABLE, Row, RunOptions, default_root, typed
from torch_ext.runner.selection import advice

_EXAMPLES = """
PATTERN is a folder, a file, a module, a class or a test, spelt as a path, with dots or as an id:
  distributed/fsdp   test_a.py   TestA   TestA.test_b   distributed/test_a.py::TestA::test_b

examples:
  {command} distributed/fsdp -k "unshard and not error"
  {command} --last-failed -v --show-output
  {command} --changed origin/main --junit report.xml
  {command} --shard 2/4 --reruns 1 --json events.jsonl
  {command} TestInput.test_input_type_dict --repeat 1000 -f

Options also come from [tool.torch_ext] of pyproject.toml, by their long names (reruns = 1), and from the environment
(TORCH_EXT_OPTIONS="--reruns 1"). Flags win over the environment, and that over the file: see --show-config.

Exit codes: 0 all passed or flaky (see --fail-on-flaky), 1 a test failed, 2 usage or nothing selected, 130 interrupted.
"""
# Holds flags that precede the typed ones.
_VARIABLE = "TORCH_EXT_OPTIONS"
_SECTION = "[tool.torch_ext]"


class _Parser(argparse.ArgumentParser):
    """Parses flags. Raises SetupError, with one sentence, for a usage error."""

    def __init__(self, prog: str, *, alone: bool = False) -> None:
        super().__init__(
            prog=prog,
            usage="%(prog)s [PATTERN ...] [options]",
            description="Run the tests of this file." if alone else "Run distributed tests on this machine.",
            epilog="" if alone else _EXAMPLES.format(command=prog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        name, text = ("TEST", "TestClass or TestClass.test_name") if alone else ("PATTERN", "tests to run; see below")
        self.add_argument("patterns", nargs="*", metavar=name, default=[], help=text)
        groups: dict[str, argparse._ArgumentGroup] = {}
        either = None
        for row in TABLE:
            if row.alone or not alone:
                group = groups.get(row.group) or groups.setdefault(row.group, self.add_argument_group(row.group))
                if row.field == "verbosity":
                    group = either = either or group.add_mutually_exclusive_group()
                _add(group, row)
        version = f"torch_ext {torch_ext.__version__}"
        groups["more"].add_argument("--version", action="version", version=version, help="show the version")

    def error(self, message: str) -> NoReturn:
        if found := re.fullmatch(r"unrecognized arguments: (-[^=\s]*).*", message, re.DOTALL):
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            message = f"there is no option {found[1]}{advice(found[1], known)}"
        raise SetupError(message)

    def read(self, flags: Sequence[str]) -> dict[str, Any]:
        """Return the values that ``flags`` set, by field of :class:`RunOptions`."""
        given = vars(self.parse_intermixed_args(list(flags)))
        if patterns := given.pop("patterns"):
            given["include"] = [*_qualified(patterns), *given.get("include", [])]
        return {field: tuple(value) if isinstance(value, list) else value for field, value in given.items()}


def _qualified(patterns: Sequence[str]) -> list[str]:
    """Return ``patterns`` with classes and tests that follow a file as names in that file.

    >>> _qualified(["a/test_a.py", "TestA.test_b", "TestC", "test_b.py"])
    ['a/test_a.py::TestA.test_b', 'a/test_a.py::TestC', 'test_b.py']
    """
    found, file = list[str](), ""
    for text in patterns:
        if file and re.fullmatch(r"[A-Z]\w*(?:\.\w+)?", text):
            found[-1:] = [*found[-1:]] * (found[-1] != file) + [f"{file}::{text}"]
        else:
            found.append(text)
            file = text if text.endswith(".py") else ""
    return found


def _add(group: argparse._ArgumentGroup, row: Row) -> None:
    how: dict[str, Any] = {"dest": row.field, "help": row.help.replace("%", "%%")}
    if not row.metavar:
        how |= {"action": "store_const", "const": row.const}
    else:
        how |= {"metavar": row.metavar, "type": typed(row.read), "choices": row.choices or None}
        if row.many:
            how |= {"action": "append"} if row.field in ("keywords", "exclude") else {"action": "extend", "nargs": "+"}
    group.add_argument(*row.flags, **how)


def parse(argv: Sequence[str], file: Path | None = None) -> RunOptions:
    """Parse the arguments of ``run_test.py``, or of the test file ``file`` (absolute) if that was started itself.
    Raises SystemExit after printing the text of ``-h``, ``--version`` or ``--show-config``.
    """
    full = parser = _Parser(_command())
    shown = ""
    if file is not None:
        shown = os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
        parser = _Parser(shown, alone=True)
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    try:
        typed = parser.read(argv)
        settings = _settings(full) | {field: (value, "command line") for field, value in typed.items()}
        given = {field: value for field, (value, _) in settings.items()}
        places = _places(given) if file is None else _of_file(file, shown, typed)
        options = RunOptions(**{**given, **places, "command": _command()})
        debugs = options.pdb is not None
        if debugs:
            _refuse_without_terminal()
        here = {"--show-output": options.show_output, "--upstream": options.upstream, "--pdb": debugs}
        for flag, is_set in here.items():
            if options.cluster and is_set:
                raise SetupError(f"{flag} works on this machine alone; leave --cluster out")
    except SetupError as error:
        raise SetupError(f"{error}; see --help") from None
    if options.show_config:
        _show(options, settings)
        raise SystemExit(0)
    return options


def _refuse_without_terminal() -> None:
    from torch_ext.world.settings import why_no_terminal  # on use: a list of cached names must not load the world

    if why := why_no_terminal():
        raise SetupError(why)


def _settings(parser: _Parser) -> dict[str, tuple[Any, str]]:
    """Return value and source of each option that is set outside the command line, from its strongest source."""
    settings: dict[str, tuple[Any, str]] = {}
    for source, flags in _sources():
        try:
            settings |= {field: (value, source) for field, value in parser.read(flags).items()}
        except SetupError as error:
            raise SetupError(f"{source}: {error}") from None
    return settings


def _sources() -> Iterator[tuple[str, list[str]]]:
    """Yield source and flags of the nearest ``pyproject.toml`` and of each variable, the strongest last."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        path = folder / "pyproject.toml"
        if os.access(path, os.R_OK) and "tool.torch_ext" in path.read_text(encoding="utf-8", errors="replace"):
            yield str(path), _flags_of(path)
            break
    try:
        yield _VARIABLE, shlex.split(os.environ.get(_VARIABLE, ""))
    except ValueError as error:
        raise SetupError(f"{_VARIABLE}: {error}") from None
    for row in TABLE:
        if row.variable and (text := os.environ.get(row.variable)):
            yield row.variable, [f"{row.flags[-1]}={text}"] if row.metavar else [row.flags[-1]] * (text == "1")


def _flags_of(path: Path) -> list[str]:
    """Return the section ``[tool.torch_ext]`` of ``path`` as flags."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("torch_ext", {})
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from None
    rows = {row.name: row for row in TABLE}
    flags = []
    for key, value in section.items():
        if (row := rows.get(key.replace("_", "-"))) is None:
            near = advice(key.replace("_", "-"), rows)
            raise SetupError(f"{path}: {_SECTION} has the unknown key {key!r}{near}")
        if isinstance(value, bool) == bool(row.metavar):
            expected = "a value" if row.metavar else "true or false"
            raise SetupError(f"{path}: {key} of {_SECTION}: got {str(value).lower()}, expected {expected}")
        if row.field == "typed_root":
            value = str(path.parent / value)
        values = value if isinstance(value, list) else [value]
        flags += [f"{row.flags[-1]}={each}" for each in values] if row.metavar else [row.flags[-1]] * value
    return flags


def _of_file(file: Path, shown: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the places for a file that was started itself. Only the command line selects its tests."""
    suites = default_root(file.parent)
    root = suites if file.is_relative_to(suites) else file.parent
    nothing = {row.field: getattr(RunOptions(root), row.field) for row in TABLE if not row.alone}
    return {**nothing, "root": root, "include": typed.get("include", ()), "script": shown}


def _places(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the root, and the fields that depend on it."""
    if upstream := given.get("upstream"):
        return _upstream_places(given, upstream)
    for flag, field in (("--cuda-as-sim", "cuda_as_sim"), ("--differences", "differences")):
        if field in given:
            raise SetupError(f"{flag} needs --upstream; our own suites name no device")
    if root := given.get("typed_root"):
        folder = Path(root).resolve()
        if not folder.is_dir():
            hint = "give the folder of the suites with --root DIR"
            raise SetupError(f"got the root {folder}, which is not a folder; {hint}")
        return {"root": folder}
    return _outside(given.get("include", ())) or {"root": default_root()}


def _upstream_places(given: Mapping[str, Any], upstream: Sequence[str]) -> dict[str, Any]:
    places: dict[str, Any] = {"typed_root": ""}
    if given.get("cuda_as_sim"):
        if (device := given.get("device", SIM)) != SIM:
            raise SetupError(f"got --cuda-as-sim and the device {device}; leave --device out, or give {SIM}")
        places["device"] = AS_CUDA
    folders = []
    for path in map(Path, upstream):
        if not path.is_dir() and (path.suffix != ".py" or "." in path.stem or not path.is_file()):
            what = "is not a Python module" if path.exists() else "does not exist"
            raise SetupError(f"got --upstream {path}, which {what}; give test files or folders")
        folders.append((path if path.is_dir() else path.parent).resolve())
    return {**places, "root": Path(os.path.commonpath(folders))}


def _outside(include: Sequence[str]) -> dict[str, Any] | None:
    """Return a root for the first pattern if it is a path of tests outside the default root; else None."""
    first = Path(include[0].partition("::")[0]) if include else None
    if first is None or not first.exists() or first.resolve().is_relative_to(default_root()):
        return None
    known = not first.is_absolute() and (default_root() / first).exists()
    if first.suffix != ".py" and (known or ("/" not in include[0] and not find_test_files(first))):
        return None  # the working directory has an unrelated file or folder of that name
    path = first.resolve()
    root = path if path.is_dir() else path.parent
    parts = (text.partition("::") for text in include)
    within = tuple("".join([str(Path(path).resolve()), *names]) for path, *names in parts)
    return {"root": root, "include": within, "typed_root": os.path.relpath(root)}


def _show(options: RunOptions, settings: Mapping[str, tuple[Any, str]]) -> None:
    """Print the value and the source of each option."""
    from torch_ext.runner.reporters.tally import ReportFile

    lines = []
    for field, name in ({row.field: row.name for row in TABLE} | {"verbosity": "verbosity"}).items():
        value = options.root if field == "typed_root" else getattr(options, field)
        text = "-" if value is None or value in ("", ()) else str(value)
        if isinstance(value, tuple) and value:
            text = ("/" if field == "shard" else " ").join(map(str, value))
        _, source = settings.get(field, (None, "default"))
        lines.append(f"{name:<14}  {text:<24}  {source}\n")
    ReportFile("-", "the list of options").write("".join(lines))


def _complete(parser: argparse.ArgumentParser) -> None:
    """If a shell requests completions, print them with argcomplete and end this process."""
    import argcomplete

    for action in parser._actions:
        if action.dest in ("patterns", "include", "exclude"):
            action.completer = _patterns_below_root  # type: ignore[attr-defined]  # argcomplete looks for it
    argcomplete.autocomplete(parser, always_complete_options="long")


def _patterns_below_root(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the folders and files below the root whose paths begin with ``prefix``."""
    root = Path(getattr(parsed_args, "typed_root", "") or default_root())
    files = [Path(file.name) for file in find_test_files(root)]
    folders = {parent.as_posix() for file in files for parent in file.parents if parent != Path(".")}
    names = [*sorted(folders), *(file.as_posix() for file in files)]
    return [name for name in names if name.startswith(prefix)]


def _command() -> str:
    """Return the command that started this process, for lines that users can copy."""
    started = Path(sys.argv[0])
    if started.name == "run_test.py":
        return f"python {os.path.relpath(started)}"
    if started.name == "__main__.py" and started.parent.name == "torch_ext":
        return "python -m torch_ext"
    return "torch_ext" if started.name == "torch_ext" else "python run_test.py"
