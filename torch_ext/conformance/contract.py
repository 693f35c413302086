"""Upstream's contract files for c10d backends, ``test/distributed/test_c10d_*.py`` of a checkout, for any backend: each
file is imported as it is, and its own functions make the test classes of the backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import shutil
import sys
import tempfile
import unittest
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_ext import accelerator
from torch_ext.accelerator import HOST
from torch_ext.conformance import suites
from torch_ext.conformance.distributed import as_cuda, counted
from torch_ext.conformance.forks import DONE, Finding, Status
from torch_ext.testing._internal.distributed.backend_conformance import Capabilities, capabilities_of

# The backend whose ranks are threads of one process.
OF_THREADS = "threaded"
# The module that the contract files share, and what every one of them defines: an abstract class of tests.
_COMMON, _ABSTRACT = "c10d_backend_common", "Abstract"
# The owners' line marks a file of PyTorch's. More devices than any contract has ranks.
_SUITE = """\
# Owner(s): ["oncall: distributed"]
from torch_ext.conformance.contract import add_classes
WORLD_SIZE = 4
add_classes(globals(), {folder!r}, {module!r}, {backend!r})
"""
_SUFFIX = "_of_backend"
# What the files call a backend, by what torch calls it: 2.15 takes the first for NCCL.
_ALIASES = {"nccl": ("nccl2", "nccl-legacy")}
# Float8 collectives ask for it.
_CAPABILITY = {"TORCH_EXT_SIM_CAPABILITY": "9.0"}


def groups(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the contract files of the checkout, none without one, or if ranks are threads: the files start processes.
    Their tests are known when they have run.
    """
    tests = Path(options.checkout, "test", "distributed")
    if not options.checkout or options.backend == OF_THREADS or not (tests / f"{_COMMON}.py").is_file():
        return {}
    found = (path for path in tests.glob("test_c10d_*.py") if f"class {_ABSTRACT}" in path.read_text(encoding="utf-8"))
    return {path.name: [DONE] for path in sorted(found)}


def findings(groups: Mapping[str, Sequence[str]], options: argparse.Namespace) -> Iterator[Finding]:
    """Run the files of ``groups`` for the backend of ``options``."""
    left = {name: f"{Path(name).stem}{_SUFFIX}.py" for name, cases in groups.items() if cases}
    if not left:
        return
    with tempfile.TemporaryDirectory(prefix="torch_ext-contract-") as folder:
        root = Path(folder)
        (root / "torch").mkdir()  # with version.txt a checkout, whose release messages name
        if (version := Path(options.checkout, "version.txt")).is_file():
            shutil.copy(version, root)
        tests = str(Path(options.checkout, "test", "distributed").resolve())
        for name, file in left.items():
            suite = _SUITE.format(folder=tests, module=Path(name).stem, backend=options.backend)
            (root / file).write_text(suite, encoding="utf-8")
        arguments = ["--upstream", *(str(root / file) for file in left.values()), *as_cuda(options)]
        arguments += ["--timeout", str(options.timeout), "-j", str(options.slots)]
        of_file = {file: name for name, file in left.items()}
        for each in suites.run(arguments, {**_CAPABILITY, **os.environ}):
            each = dataclasses.replace(each, group=of_file.get(Path(each.group).name, each.group))
            of_cuda = each.status is Status.REFUSED and options.device == HOST and "CUDA" in each.text
            yield dataclasses.replace(each, text=f"needs CUDA: {each.text}") if of_cuda else counted(each)
    yield from (Finding(name, DONE, Status.AGREES) for name in left)


def add_classes(namespace: MutableMapping[str, Any], folder: str, module: str, backend: str) -> None:
    """Add to the ``namespace`` of a test file the classes that contract file ``module`` has for ``backend``, by default
    the device's, and those that are of no backend.
    """
    sys.path.insert(0, folder)
    common, contract = importlib.import_module(_COMMON), vars(importlib.import_module(module))
    device = accelerator.device_type()
    if device == HOST and "CUDA_BACKENDS" in contract:
        return  # the file is of graphs
    backend = _as_listed(common, backend or accelerator.backend())
    tests = {name: each for name, each in contract.items() if isinstance(each, type) and each.__module__ == module}
    abstract = {name: each for name, each in tests.items() if name.startswith(_ABSTRACT)}
    for name, base in abstract.items():
        suite = name.removeprefix(_ABSTRACT).removesuffix("Test")
        if instantiate := contract.get("instantiate_backend_tests"):
            instantiate(namespace, suite, base, [_config(common, backend, device)])
        else:
            (make,) = (each for key, each in contract.items() if key.startswith("_make_") and key.endswith("_class"))
            made = make(backend, device)
            made.__module__ = namespace["__name__"]
            namespace[made.__name__] = made
    for name, cls in tests.items():
        if not issubclass(cls, unittest.TestCase) or issubclass(cls, tuple(abstract.values())):
            continue
        if getattr(cls, "device_type", device) == device:
            own = {"backend_name": backend} if hasattr(cls, "backend_name") else {}
            namespace[name] = type(name, (cls,), {"__module__": namespace["__name__"], **own})


def _as_listed(common: Any, backend: str) -> str:
    listed = [each.name for each in common.C10D_BACKENDS if dist.is_backend_available(each.name)]
    return next((name for name in _ALIASES.get(backend, ()) if name in listed), backend)


def _config(common: Any, backend: str, device: str) -> Any:
    """Return the file's own entry for ``backend``, or one of what this project knows of it."""
    if own := next((each for each in common.C10D_BACKENDS if each.name == backend), None):
        return own
    known = config_of(capabilities_of(backend, device))
    fields = {each.name for each in dataclasses.fields(common.BackendConfig)}
    return common.BackendConfig(backend, device, **{name: value for name, value in known.items() if name in fields})


def config_of(capabilities: Capabilities) -> dict[str, Any]:
    """Return the fields of upstream's ``BackendConfig`` that ``capabilities`` answers."""
    lacks = {*capabilities.lacks, *capabilities.avoids}
    return {
        "supports_coalescing": "coalescing" not in lacks,
        "supports_bitwise_reductions": "BAND" in capabilities.reductions,
        "supports_collectives_timing": "collective timing" not in lacks,
        "supports_sequence_numbers": "sequence numbers" not in lacks,
        "supports_work_sequence_number": "sequence numbers" not in lacks,
        "supports_uneven_all_gather": "lists of unequal sizes" not in lacks,
        **capabilities.contract,
    }
