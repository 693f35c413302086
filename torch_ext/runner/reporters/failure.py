"""Why a test failed, in words: made of a result's problems, and nowhere else. Pure functions."""

from __future__ import annotations

from torch_ext.runner.results import Died, Problem, Raised, RanksFailed, Status, TestResult
from torch_ext.world.render import end_of_output, render

__all__ = ["describe_failure"]


def describe_failure(result: TestResult) -> str:
    """Return what failed in ``result``, then the end of what its parent half printed; empty if there is nothing to say.

    >>> from torch_ext.runner.results import Remark, TestName
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
