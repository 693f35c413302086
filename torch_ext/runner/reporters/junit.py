"""Writes JUnit XML for Jenkins, GitLab, Azure and Maven's tools, with the ending of each rank. docs/events.md maps
endings to elements.
"""

from __future__ import annotations

import datetime
import platform
import re
from collections import defaultdict
from collections.abc import Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from torch_ext.results import Died, Raised, RanksFailed, Status, TestName, TestResult
from torch_ext.runner.options import RunOptions
from torch_ext.runner.reporters.tally import ReportFile, Tally
from torch_ext.runner.reporters.text import describe_failure
from torch_ext.world.outcome import Ending
from torch_ext.world.wording import printable

# Replacements for a test's name if a class or a file failed.
_CLASS, _FILE = "setUpClass or tearDownClass", "import"
_COLUMNS = {"failures": "failure", "errors": "error"}
# Characters that XML 1.0 forbids and ``printable`` keeps.
_NO_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")
# Endings of a rank that JUnit counts as errors rather than failed assertions.
_ERRORS = (Ending.KILLED, Ending.EXITED, Ending.SILENT, Ending.TIMED_OUT, Ending.HUNG)


def write_junit(tally: Tally, interrupted: bool, *, options: RunOptions, file: ReportFile, start_s: float) -> None:
    """Write the report of a run that began at ``start_s``, with one ``testsuite`` per class and round."""
    stopped = interrupted or options.failfast
    cases: dict[tuple[int, str, str], list[Element]] = defaultdict(list)
    for result in tally.results:
        cases[result.round, result.test.file, result.test.cls].append(_case(result))
    last = max((result.round for result in tally.results), default=1)
    for test in tally.missing():
        cases[last, test.file, test.cls].append(_missing(test, stopped))
    root = Element("testsuites", name="torch_ext")
    started = datetime.datetime.fromtimestamp(start_s, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    for (number, path, cls), found in cases.items():
        name = "::".join(filter(None, (path, cls))) + (f" (round {number})" if number > 1 else "")
        attributes = {"name": _clean(name), "timestamp": started, "hostname": _clean(platform.node())}
        suite = SubElement(root, "testsuite", attributes)
        suite.extend(found)
        _count(suite, found, {**_COLUMNS, "skipped": "skipped"})
    _count(root, [case for found in cases.values() for case in found], _COLUMNS)
    ElementTree.indent(root)
    file.write(ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n")
    file.close()


def _count(element: Element, cases: list[Element], columns: Mapping[str, str]) -> None:
    element.set("tests", str(len(cases)))
    for column, tag in columns.items():
        element.set(column, str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")


def _case(result: TestResult) -> Element:
    attempts = (*result.earlier, result)
    case = _named(result.test, sum(each.duration_s for each in attempts))
    if result.status is Status.PASSED and result.ranks:
        lines = [f"rank {one.rank} {one.describe()}" for one in sorted(result.ranks, key=lambda one: one.rank)]
        SubElement(case, "system-out").text = _clean("\n".join(lines))
    elif result.status is Status.SKIPPED:
        SubElement(case, "skipped", message=_clean(result.reason or "no reason given"))
    elif result.status is Status.XFAIL:
        SubElement(case, "skipped", type="expected failure", message="failed, as it is expected to")
    elif result.status is Status.FLAKY:
        for earlier in result.earlier:
            _failure(case, earlier, "flaky")
    elif result.status.counted is Status.FAILED:
        _failure(case, attempts[0])
        for later in attempts[1:]:
            _failure(case, later, "rerun")
        for text in _outputs(attempts[0]):
            SubElement(case, "system-out").text = text
    return case


def _named(test: TestName, duration_s: float) -> Element:
    module = test.file.removesuffix(".py").replace("/", ".")
    classname = f"{module}.{test.cls}" if test.cls else module
    name = test.method or (_CLASS if test.cls else _FILE)
    return Element("testcase", classname=_clean(classname), name=_clean(name), time=f"{duration_s:.3f}")


def _missing(test: TestName, stopped: bool) -> Element:
    case = _named(test, 0.0)
    if stopped:
        SubElement(case, "skipped", message="not run: the run was stopped before it")
    else:
        SubElement(case, "error", type="not run", message="planned, but has no result")
    return case


def _failure(case: Element, result: TestResult, kind: str = "") -> None:
    """Add the failure of an attempt; ``kind``: tag prefix for an attempt that does not decide the result."""
    ended = result.died or any(outcome.ending in _ERRORS for outcome in result.failed_ranks)
    tag = "error" if ended or not result.test.method else "failure"
    tag = f"{kind}{tag.capitalize()}" if kind else tag
    message = "; ".join(problem.sentence for problem in result.problems) or result.status.value
    element = SubElement(case, tag, type=_type(result), message=_clean(message))
    text = _clean(describe_failure(result))
    if not kind:
        element.text = text
        return
    SubElement(element, "stackTrace").text = text
    if outputs := _outputs(result):
        SubElement(element, "system-out").text = "\n".join(outputs)


def _type(result: TestResult) -> str:
    problem = next(iter(result.problems), None)
    if isinstance(problem, Raised):
        return _clean(problem.sentence.partition(":")[0])
    if isinstance(problem, RanksFailed):
        culprits = problem.report.verdict.culprits
        endings = [each.ending.value for each in problem.report.outcomes if each.rank in culprits[:1]]
        return f"rank {endings[0]}" if endings else "ranks failed"
    return "process died" if isinstance(problem, Died) else result.status.value


def _outputs(result: TestResult) -> list[str]:
    """Return the ending and output of each rank, then the output of the parent half."""
    texts = [f"{outcome.label} {outcome.describe()}\n{outcome.output}" for outcome in result.failed_ranks]
    if result.output:
        texts.append(f"parent half\n{result.output}")
    return [_clean(text) for text in texts]


def _clean(text: str) -> str:
    r"""Escape characters that XML forbids.

    >>> _clean("\x1b[1m \ud800 \uffff")
    '\\x1b[1m \\ud800 \\uffff'
    """
    return _NO_XML.sub(lambda found: f"\\u{ord(found[0]):04x}", printable(text))
