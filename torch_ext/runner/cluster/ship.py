"""What of the user's files every machine of a cluster gets: the folder that holds the suites, and torch_ext."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch_ext
from torch_ext.runner.cluster.messages import ShippedFile
from torch_ext.runner.discovery import TestFile

__all__ = ["folder_of", "runtime_environment", "shipped"]

_PACKAGE = Path(torch_ext.__file__).resolve().parent


def folder_of(root: Path, files: Iterable[TestFile]) -> Path:
    """Return the folder that is shipped: our checkout if the suites lie in it, else the smallest that holds the root
    and every folder that a file is imported from.
    """
    folder = Path(os.path.commonpath([root, *(file.import_root for file in files)]))
    checkout = _PACKAGE.parent
    return checkout if folder.is_relative_to(checkout) and (checkout / "run_test.py").is_file() else folder


def runtime_environment(folder: Path) -> dict[str, Any]:
    """Return Ray's ``runtime_env``: workers run in a copy of ``folder``, and import this torch_ext.

    Ray leaves out what ``.gitignore`` names, and refuses more than 500 MiB.
    """
    found: dict[str, Any] = {"working_dir": str(folder), "excludes": [".git"]}
    if not _PACKAGE.is_relative_to(folder):
        found["py_modules"] = [str(_PACKAGE)]
    return found


def shipped(file: TestFile, folder: Path) -> ShippedFile:
    """Return ``file`` as a machine finds it below its copy of ``folder``."""
    path, import_root = (each.relative_to(folder).as_posix() for each in (file.path, file.import_root))
    return ShippedFile(file.name, path, file.module, import_root)
