"""Completion by the shell: options, and the folders and files of the suites. argcomplete does it, if it is there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from torch_ext.runner.discovery import find_test_files
from torch_ext.runner.options import default_root

__all__ = ["NotInstalledError", "answer", "script"]

# What argcomplete sets where a shell asks.
_ASKED = "_ARGCOMPLETE"
_COMMANDS = ("torch_ext", "run_test.py")


class NotInstalledError(RuntimeError):
    """argcomplete is not there. The message is for users."""


def answer(parser: argparse.ArgumentParser) -> None:
    """If a shell asks what may follow, tell it and end this process; else return."""
    if _ASKED not in os.environ:
        return
    for action in parser._actions:
        if action.dest in ("patterns", "include", "exclude"):
            action.completer = _patterns  # type: ignore[attr-defined]  # argcomplete looks for it
    _argcomplete().autocomplete(parser, always_complete_options="long")


def script(shell: str) -> str:
    """Return what ``shell`` (bash, zsh or fish) evaluates so that it asks.

    Raises:
        NotInstalledError: argcomplete is not there.
    """
    return str(_argcomplete().shellcode(_COMMANDS, shell=shell))


def _argcomplete() -> Any:
    try:
        import argcomplete
    except ImportError:
        raise NotInstalledError(
            "completion needs argcomplete, which is not installed here; install it with: pip install argcomplete"
        ) from None
    return argcomplete


def _patterns(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the folders and files below the root that begin with ``prefix``."""
    root = Path(getattr(parsed_args, "typed_root", "") or default_root())
    files = [Path(file.name) for file in find_test_files(root)]
    folders = {parent.as_posix() for file in files for parent in file.parents if parent != Path(".")}
    names = [*sorted(folders), *(file.as_posix() for file in files)]
    return [name for name in names if name.startswith(prefix)]
