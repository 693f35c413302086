"""The command line: from what was typed, and from the configuration below it, to options."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch_ext
from torch_ext.results import OutputError
from torch_ext.runner.config import ConfigError, Setting, from_environment, from_file, nearest_file
from torch_ext.runner.discovery import find_test_files, holds_tests
from torch_ext.runner.options import REMOVED, TABLE, Row, RunOptions, default_root

__all__ = ["parse", "parse_for_file", "write_out"]

_USAGE = 2
_EXAMPLES = """
PATTERN is a folder, a file, a module, a class or a test, spelt as a path, with dots or as an id:
  distributed/fsdp   test_a.py   TestA   TestA.test_b   distributed/test_a.py::TestA::test_b

examples:
  {command} distributed/fsdp -k "unshard and not error"
  {command} --last-failed -v --show-output
  {command} --changed=origin/main --junit report.xml
  {command} --shard 2/4 --reruns 1 --json events.jsonl
  {command} TestInput.test_input_type_dict --repeat 1000 -f

Options also come from [tool.torch_ext] of pyproject.toml, by their long names (reruns = 1), and from the environment
(TORCH_EXT_OPTIONS="--reruns 1"). Flags win over the environment, and that over the file: see --show-config.

Exit codes: 0 all passed or flaky (see --fail-on-flaky), 1 a test failed, 2 usage or nothing selected, 130 interrupted.
"""


class _CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, and not how everything is spelt."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            usage="%(prog)s [PATTERN ...] [options]",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        found = re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL)
        flag = found[1].split("=")[0].split()[0] if found and found[1].split() else ""
        if instead := REMOVED.get(flag.removeprefix("--")):
            message = f"{flag} {instead}"
        elif flag.startswith("-"):
            from torch_ext.runner.keywords import nearest

            near = nearest(flag, [known for known in self._option_string_actions if known.startswith("--")])
            message = f"there is no option {flag}" + (f"; nearest: {', '.join(near)}" if near else "")
            if any(flag in row.flags for row in TABLE):
                message = f"{flag} is no option of one file; run_test.py has it"
        raise _Mistake(message)


class _Mistake(ValueError):
    """What was typed makes no sense. The message is for users."""


def _parser(prog: str, description: str, *, alone: bool) -> _CommandParser:
    parser = _CommandParser(prog, description, "" if alone else _EXAMPLES.format(command=prog))
    metavar, text = ("TEST", "TestClass or TestClass.test_name") if alone else ("PATTERN", "what to run; see below")
    parser.add_argument("patterns", nargs="*", metavar=metavar, default=[], help=text)
    groups: dict[str, argparse._ArgumentGroup] = {}
    verbosity: argparse._ArgumentGroup | None = None
    for row in TABLE:
        if row.alone or not alone:
            group = groups.get(row.group) or groups.setdefault(row.group, parser.add_argument_group(row.group))
            if row.field == "verbosity":
                verbosity = verbosity or group.add_mutually_exclusive_group()
                group = verbosity
            _add(group, row)
    shown = f"torch_ext {torch_ext.__version__}"
    groups["more"].add_argument("--version", action="version", version=shown, help="show the version")
    return parser


def _add(group: argparse._ArgumentGroup, row: Row) -> None:
    def read(text: str) -> object:
        if not text and row.const is not True:
            return row.const
        if not text and not row.many:
            raise argparse.ArgumentTypeError("got nothing, as from a variable that is not set")
        try:
            return row.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    how: dict[str, Any] = {"dest": row.field, "help": row.help.replace("%", "%%")}
    if not row.metavar:
        how |= {"action": "store_const", "const": row.const}
    else:
        how |= {"metavar": row.metavar, "type": read}
        if row.choices:
            how["choices"] = row.choices
        if row.many:
            how |= {"action": "append"} if row.field == "keywords" else {"action": "extend", "nargs": "+"}
        elif row.const is not True:
            how |= {"nargs": "?", "const": row.const}
    group.add_argument(*row.flags, **how)


def _read(parser: _CommandParser, argv: Sequence[str]) -> dict[str, object]:
    if files := [each for each in argv if each.startswith("@")]:
        name = files[0][1:] or "FILE"
        raise _Mistake(f"{files[0]}: arguments from a file were removed; write $(cat {name})")
    given = vars(parser.parse_intermixed_args(_values_apart(argv)))
    patterns = given.pop("patterns") or []
    if patterns:
        given["include"] = [*patterns, *given.get("include", [])]
    return {field: tuple(value) if isinstance(value, list) else value for field, value in given.items()}


def _values_apart(argv: Sequence[str]) -> list[str]:
    """Give options that may stand alone their value where what follows is none: ``--changed test/a`` means a pattern.

    >>> _values_apart(["--random-order", "TestA", "--random-order", "7", "--json"])
    ['--random-order=', 'TestA', '--random-order', '7', '--json']
    """
    found = []
    for each, following in zip(argv, [*argv[1:], ""], strict=False):
        typed = following != "" and not following.startswith("-")
        if each == "--random-order":
            value = following.isdigit()
        elif each == "--json":  # the report of an earlier run may lie there
            value = not (os.path.isdir(following) or (following.endswith(".py") and os.path.exists(following)))
        else:
            value = each != "--changed" or not os.path.exists(following)
        found.append(f"{each}=" if typed and not value else each)
    return found


def parse(argv: Sequence[str]) -> RunOptions:
    """Read the arguments of ``run_test.py``.

    Raises:
        SystemExit: after ``-h``, ``--version`` or ``--show-config`` (0), or a usage error (2), with its text printed.
    """
    parser = _parser(_command().removeprefix("python "), "Run distributed tests on this machine.", alone=False)
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    try:
        settings = _settings(parser, argv)
        return _options(settings, **_places(settings))
    except (_Mistake, ConfigError) as error:
        _refuse(str(error))


def parse_for_file(path: Path, argv: Sequence[str]) -> RunOptions:
    """Read the arguments of the test file ``path`` (absolute), started by itself, in unittest's spellings.

    Raises:
        SystemExit: as :func:`parse`.
    """
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    parser = _parser(shown, "Run the tests of this file.", alone=True)
    try:
        settings = _settings(parser, argv)
    except (_Mistake, ConfigError) as error:
        _refuse(str(error))
    root = default_root() if path.is_relative_to(default_root()) else path.parent
    typed = settings["include"].value if settings.get("include", Setting((), "")).source == _FLAGS else ()
    settings = {field: one for field, one in settings.items() if field not in ("include", "exclude", "typed_root")}
    return _options(settings, root=root, include=typed, script=shown)


_FLAGS = "command line"


def _settings(parser: _CommandParser, argv: Sequence[str]) -> dict[str, Setting]:
    """Return what is set, each by the strongest that sets it: the file, then the environment, then the flags."""
    typed = _read(parser, argv)
    file = nearest_file(Path.cwd())
    settings = from_file(file) if file is not None else {}
    settings |= from_environment(os.environ, lambda flags: _read(parser, flags))
    return settings | {field: Setting(value, _FLAGS) for field, value in typed.items()}


def _places(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the root, and what depends on it."""
    include = _patterns(settings, "include")
    upstream, root = _patterns(settings, "upstream"), str(_value(settings, "typed_root", ""))
    for flag, field in (("--cuda-as-sim", "cuda_as_sim"), ("--differences", "differences")):
        if field in settings and not upstream:
            raise _Mistake(f"{flag} goes with --upstream; our own suites name no device")
    if upstream:
        if root and settings["typed_root"].source == _FLAGS:
            raise _Mistake("--upstream brings its own root, the folder that holds all it names; leave --root out")
        return _upstream_places(settings, upstream, include)
    if root:
        folder = Path(root).resolve()
        if not folder.is_dir():
            raise _Mistake(
                f"got the root {folder}, which is no folder; give the one that holds the suites with --root DIR"
            )
        return {"root": folder, "include": include}
    return _outside(include) or {"root": default_root(), "include": include}


def _upstream_places(settings: Mapping[str, Setting], typed: Sequence[str], include: Sequence[str]) -> dict[str, Any]:
    places: dict[str, Any] = {"include": include, "typed_root": ""}
    if "cuda_as_sim" in settings:
        from torch_ext.cuda_as_sim.words import DEVICE

        places["device"] = str(_value(settings, "device", "")) or os.environ.get("TORCH_EXT_DEVICE", "") or DEVICE
        if places["device"] != DEVICE:
            raise _Mistake(f"got --cuda-as-sim and the device {places['device']}; leave --device out, or give {DEVICE}")
    folders = []
    for each in typed:
        path = Path(each).resolve()
        if not path.exists():
            raise _Mistake(f"got --upstream {each}, which does not exist; give test files of a PyTorch checkout")
        if not each:
            raise _Mistake("got an empty --upstream, as from a variable that is not set; give test files or folders")
        if not path.is_dir() and (not path.is_file() or path.suffix != ".py"):
            raise _Mistake(f"got --upstream {each}, which is no Python file; give test files or folders of them")
        if not path.is_dir() and "." in path.stem:
            raise _Mistake(f"got --upstream {each}, whose name has one dot too many to import it; rename the file")
        folders.append(path if path.is_dir() else path.parent)
    return {**places, "root": Path(os.path.commonpath(folders))}


def _outside(include: Sequence[str]) -> dict[str, Any] | None:
    """Return the root that the first pattern needs if it is a path of tests that do not lie below the default one."""
    first = Path(include[0].partition("::")[0]) if include else None
    if first is None or not first.exists() or first.resolve().is_relative_to(default_root()):
        return None
    known = not first.is_absolute() and (default_root() / first).exists()
    if first.suffix != ".py" and (known or ("/" not in include[0] and not holds_tests(first))):
        return None  # a name that stands here by chance
    path = first.resolve()
    root = path if path.is_dir() else path.parent
    within = [str(Path(text.partition("::")[0]).resolve()) + text[len(text.partition("::")[0]) :] for text in include]
    return {"root": root, "include": tuple(within), "typed_root": os.path.relpath(root)}


def _patterns(settings: Mapping[str, Setting], field: str) -> tuple[str, ...]:
    value = _value(settings, field, ())
    return tuple(str(each) for each in value) if isinstance(value, tuple) else ()


def _value(settings: Mapping[str, Setting], field: str, default: object) -> object:
    found = settings.get(field)
    return default if found is None or found.typed is not None else found.value


def _options(settings: Mapping[str, Setting], **places: Any) -> RunOptions:
    values = {field: one.value for field, one in settings.items() if one.typed is None}
    if values.get("random_order") == -1:
        values["random_order"] = int.from_bytes(os.urandom(3), "big")
    options = RunOptions(**{**values, **places, "command": _command()})
    for flag, given in (("--show-output", options.show_output), ("--upstream", options.upstream)):
        if options.cluster and given:
            raise _Mistake(f"{flag} works on this machine alone; leave --cluster out")
    _check_reports(options, settings)
    if options.show_config:
        _show(options, settings)
        raise SystemExit(0)
    return options


def _check_reports(options: RunOptions, settings: Mapping[str, Setting]) -> None:
    """Refuse reports that would not be written, or not as a whole."""
    fields = ("json", "junit", "html", "trace")
    for report in fields[1:] if options.list_only else ():
        if report in settings and settings[report].source == _FLAGS:
            raise _Mistake(f"--list runs no test, and has nothing for --{report}; leave that out")
    places: dict[str, str] = {}
    for field in fields:
        file = str(getattr(options, field))
        if file.endswith(".py") or os.path.isdir(file):
            raise _Mistake(f"got --{field} {file}, which is no place for a report; write --{field}=FILE")
        place = os.path.realpath(file)
        if file in ("", "-") or (os.path.exists(place) and not os.path.isfile(place)):  # a pipe, or /dev/null
            continue
        if place in places:
            raise _Mistake(f"--{places[place]} and --{field} both name {file}; give each report a file of its own")
        places[place] = field


def _show(options: RunOptions, settings: Mapping[str, Setting]) -> None:
    """Print the value of each option and where it comes from."""
    rows = [row for row in {row.field: row for row in TABLE}.values() if row.field != "show_config"]
    names = {row.field: "verbosity" if row.field == "verbosity" else row.flags[-1].lstrip("-") for row in rows}
    names["keywords"] = "keywords"
    texts = {}
    for row in rows:
        found = settings.get(row.field)
        text = found.typed if found is not None else None
        value = options.root if row.field == "typed_root" else getattr(options, row.field)
        texts[row.field] = text if text is not None else _shown(value)
    texts["jobs"] = "auto" if options.jobs == 0 else texts["jobs"]
    texts["shard"] = texts["shard"].replace(" ", "/")
    widths = [max(map(len, column)) for column in (names.values(), texts.values())]
    lines = []
    for row in rows:
        source = settings[row.field].source if row.field in settings else "default"
        lines.append(f"{names[row.field]:<{widths[0]}}  {texts[row.field]:<{min(widths[1], 40)}}  {source}\n")
    write_out("".join(lines), "the options")


def _shown(value: object) -> str:
    if value is None or value in ("", ()):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def write_out(text: str, what: str = "the list") -> None:
    """Write ``text`` to stdout and flush it. ``what`` names the text in an error.

    Raises:
        OutputError: stdout takes no more.
        BrokenPipeError: stdout's reader has left.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"{what} cannot be written: {error}") from error


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks what may follow, and end this process; argcomplete does it."""
    import argcomplete

    for action in parser._actions:
        if action.dest in ("patterns", "include", "exclude"):
            action.completer = _patterns_below_root  # type: ignore[attr-defined]  # argcomplete looks for it
    argcomplete.autocomplete(parser, always_complete_options="long")


def _patterns_below_root(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the folders and files below the root that begin with ``prefix``."""
    root = Path(getattr(parsed_args, "typed_root", "") or default_root())
    files = [Path(file.name) for file in find_test_files(root)]
    folders = {parent.as_posix() for file in files for parent in file.parents if parent != Path(".")}
    names = [*sorted(folders), *(file.as_posix() for file in files)]
    return [name for name in names if name.startswith(prefix)]


def _refuse(text: str) -> NoReturn:
    if sys.stderr is not None:
        print(f"error: {text}; see --help", file=sys.stderr)
    raise SystemExit(_USAGE)


def _command() -> str:
    """How this process was started, for the lines that tell users what to type."""
    started = Path(sys.argv[0])
    if started.name == "run_test.py":
        return f"python {os.path.relpath(started)}"
    if started.name == "__main__.py" and started.parent.name == "torch_ext":
        return "python -m torch_ext"
    return "torch_ext" if started.name == "torch_ext" else "python run_test.py"
