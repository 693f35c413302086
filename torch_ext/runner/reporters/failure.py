"""Why a test failed, in words, and the command that runs it again. Pure functions."""

from __future__ import annotations

import shlex

from torch_ext.results import Died, Problem, Raised, RanksFailed, Status, TestName, TestResult
from torch_ext.runner.options import RunOptions
from torch_ext.world.verdict import end_of_output, render

__all__ = ["describe_failure", "rerun_command"]


def describe_failure(result: TestResult) -> str:
    """Return what failed in ``result``, then the end of what its parent half printed; empty if there is nothing to say.

    >>> from torch_ext.results import Remark
    >>> test = TestName("test_a.py", "TestA", "test_b")
    >>> print(describe_failure(TestResult(test, Status.FAILED, 0.1, (Remark("It is gone."),), output="hello\\n")))
    It is gone.
    <BLANKLINE>
    Output of the parent half:
        hello
    """
    parts = [_describe(problem) for problem in result.problems]
    if result.status is Status.UNEXPECTED_SUCCESS:
        parts.append("The test is marked as an expected failure and passed: take the mark away.")
    if lines := end_of_output(result.output, died=result.died):
        parts.append("\n".join(["Output of the parent half:", *(f"    {line}".rstrip() for line in lines)]))
    return "\n\n".join(part for part in parts if part)


def _describe(problem: Problem) -> str:
    if isinstance(problem, Raised):
        return f"in {problem.where}\n{problem.trace}" if problem.where else problem.trace
    if isinstance(problem, RanksFailed):
        text = render(problem.report)
        return f"in {problem.where}\n{text}" if problem.where else text
    if isinstance(problem, Died):
        return f"{problem.sentence}\n{problem.stacks.rstrip()}" if problem.stacks else problem.sentence
    return problem.sentence


def rerun_command(options: RunOptions, test: TestName) -> str:
    """Return what to type to run ``test`` (or its class, or its file) again under the same conditions.

    >>> from pathlib import Path
    >>> rerun_command(RunOptions(Path("test"), device="cpu"), TestName("a/test_b.py", "TestC", "test_d"))
    'python run_test.py -i a/test_b.py::TestC::test_d --device cpu'
    >>> rerun_command(RunOptions(Path("test"), memory_bytes=1 << 20), TestName("a/test_b.py", "TestC", "test_d"))
    'python run_test.py -i a/test_b.py::TestC::test_d --memory 1048576'
    >>> rerun_command(RunOptions(Path("a"), script="a/test_b.py"), TestName("test_b.py", "TestC", "test_d"))
    'python a/test_b.py TestC.test_d'
    """
    return " ".join([_start(options, test), *_conditions(options)])


def _start(options: RunOptions, test: TestName) -> str:
    if options.script:
        name = ".".join(part for part in (test.cls, test.method) if part)
        return shlex.join(["python", options.script, *([name] if name else [])])
    return f"{options.command} -i {shlex.quote(test.id)}"


def _conditions(options: RunOptions) -> list[str]:
    given = [("--root", options.typed_root), ("--device", options.device)]
    if options.timeout_s is not None:
        given.append(("--timeout", f"{options.timeout_s:g}"))
    if options.start_method != "fork":
        given.append(("--start-method", options.start_method))
    given += [("--races", options.races), ("--schedule", options.schedule)]
    if options.memory_bytes is not None:
        given.append(("--memory", str(options.memory_bytes)))
    given.append(("--cluster", options.cluster))
    upstream = [shlex.join(["--upstream", *options.upstream])] if options.upstream else []
    if options.cuda_as_sim:
        upstream.append("--cuda-as-sim")
    return [*upstream, *(shlex.join(pair) for pair in given if pair[1])]
