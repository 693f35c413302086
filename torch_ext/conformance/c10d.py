"""The tier ``c10d``: what ``BackendConformance`` asks of a process group's backend, a test for each feature, on three
ranks; and with ``--checkout`` upstream's contract files.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_ext import accelerator
from torch_ext.conformance import contract, distributed, suites
from torch_ext.conformance.forks import Finding, Status
from torch_ext.results import SetupError
from torch_ext.testing._internal.distributed.backend_conformance import FEATURES, capabilities_of

_SUITE = """\
from torch_ext.testing._internal.common_distributed import DistributedTestBase, MultiThreadedTestCase
from torch_ext.testing._internal.distributed.backend_conformance import BackendConformance


class OfThreads(MultiThreadedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_threads()


class TestBackend(BackendConformance, {base}):
    device_type, backend_name, world_size = "{device}", "{backend}", 3
"""


def key(options: argparse.Namespace) -> tuple[object, ...]:
    """Return what findings depend on: the backend and what is known of it."""
    of_checkout = distributed.key(options) if options.checkout else ()
    return _backend(options), repr(capabilities_of(_backend(options), options.device)), *of_checkout


def groups(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the features, in one group by the backend's name, and the contract files."""
    return {_backend(options): list(FEATURES.values()), **contract.groups(options)}


def findings(groups: Mapping[str, Sequence[str]], options: argparse.Namespace) -> Iterator[Finding]:
    """Run a test for each of the features in ``groups``, then the contract files."""
    files = {name: cases for name, cases in groups.items() if name in contract.groups(options)}
    for backend, features in groups.items():
        if not features or backend in files:
            continue
        base = "OfThreads" if backend == contract.OF_THREADS else "DistributedTestBase"
        names = {f"TestBackend::{test}": feature for test, feature in FEATURES.items()}
        capabilities = capabilities_of(backend, options.device)
        known = {**capabilities.lacks, **capabilities.avoids}
        with tempfile.TemporaryDirectory(prefix="torch_ext-c10d-") as folder:
            file = Path(folder, "test_c10d.py")
            file.write_text(_SUITE.format(base=base, device=options.device, backend=backend), encoding="utf-8")
            arguments = [str(file), "--device", options.device, "--timeout", str(options.timeout), "-j", "1"]
            for each in suites.run(arguments, os.environ):
                feature = names.get(each.case)
                if feature is None:
                    raise AssertionError(f"{each.case} of the suite has failed: {each.text}")
                why = known.get(feature, "") if each.status is Status.AGREES else ""
                status = Status.DIFFERS if why else each.status
                yield dataclasses.replace(each, group=backend, case=feature, status=status, known=why)
    yield from contract.findings(files, options)


def _backend(options: argparse.Namespace) -> str:
    try:
        return options.backend or accelerator.backend()
    except ValueError as error:
        raise SetupError(f"torch knows no backend for {options.device} ({error}); name yours with --backend") from error
