"""The command that runs exactly one test again, or some in this order."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from torch_ext.runner.options import Options
from torch_ext.runner.results import TestName

__all__ = ["rerun_command", "rerun_on_shared_ranks"]


def rerun_command(options: Options, test: TestName) -> str:
    """Return what to type to run ``test`` (or its class, or its file) again under the same conditions.

    >>> from pathlib import Path
    >>> rerun_command(Options(Path("test"), device="cpu"), TestName("a/test_b.py", "TestC", "test_d"))
    'python run_test.py -i a/test_b.py::TestC::test_d --device cpu'
    >>> rerun_command(Options(Path("a"), script="a/test_b.py"), TestName("test_b.py", "TestC", "test_d"))
    'python a/test_b.py TestC.test_d'
    """
    reuse = [f"--reuse {options.reuse}"] if options.reuse else []
    return " ".join([_start(options, test), *_conditions(options), *reuse])


def rerun_on_shared_ranks(options: Options, tests: Iterable[TestName]) -> str:
    """Return what to type to run ``tests`` one after another on the same ranks, under the same conditions.

    >>> from pathlib import Path
    >>> tests = [TestName("test_b.py", "TestC", "test_d"), TestName("test_b.py", "TestC", "test_e")]
    >>> rerun_on_shared_ranks(Options(Path("a"), typed_root="a", device="cpu"), tests)
    'python run_test.py -j 1 --reuse class -i test_b.py::TestC::test_d test_b.py::TestC::test_e --root a --device cpu'
    """
    names = shlex.join(test.id for test in tests)
    return " ".join([f"{options.command} -j 1 --reuse class -i {names}", *_conditions(options)])


def _start(options: Options, test: TestName) -> str:
    if options.script:
        name = ".".join(part for part in (test.cls, test.method) if part)
        return shlex.join(["python", options.script, *([name] if name else [])])
    return f"{options.command} -i {shlex.quote(test.id)}"


def _conditions(options: Options) -> list[str]:
    given = [("--root", options.typed_root), ("--device", options.device)]
    if options.timeout_s is not None:
        given.append(("--timeout", f"{options.timeout_s:g}"))
    if options.start_method != "fork":
        given.append(("--start-method", options.start_method))
    given += [("--races", options.races), ("--schedule", options.schedule)]
    if options.seed is not None:
        given.append(("--seed", str(options.seed)))
    given.append(("--cluster", options.cluster))
    upstream = [shlex.join(["--upstream", *options.upstream])] if options.upstream else []
    if options.cuda_as_sim:
        upstream.append("--cuda-as-sim")
    return [*upstream, *(shlex.join(pair) for pair in given if pair[1])]
