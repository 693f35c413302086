"""Rows: tests whose comments state their expected ending, run by one run of the runner."""

import re
import textwrap

from test.torch_ext.world.suites import WORDS, endings, suite_of


def class_of(name, base, table, on="self.rank == 1", end=""):
    """Return the source of a class with ending ``end``, with a test for each row of ``table``: its ending, and the
    statement that rank 1 runs, or every rank for which the condition ``on`` holds.
    """
    tests = [
        f"    def test_{row}(self):  # {end}\n        if {on}:\n{textwrap.indent(statement, ' ' * 12)}\n"
        for row, (end, statement) in table.items()
    ]
    return "\n".join([f"\n\nclass {name}({base}):{end and '  # '}{end}", *tests])


def _rows_of(name, source):
    """Yield the id of each test, class and file of ``source`` that must have a result, and its expected ending."""
    cls = ""
    if source.startswith("# "):
        yield name, source.partition("\n")[0][2:]
    for line in source.splitlines():
        head, _, end = line.partition(":  # ")
        if found := re.match(r"class (\w+)\(", head):
            cls = f"{name}::{found[1]}"
            if end:
                yield cls, end
        elif (found := re.match(r"    (?:async )?def (test_\w+)\(self[^)]*\)", head)) and end != "none":
            yield f"{cls}::{found[1]}", end or "passed"


def _wrong_in(expected, status, text):
    """Return the difference of a row's ending from ``expected``; empty if there is none."""
    wanted = re.fullmatch(rf"({WORDS}|hangs)(?: by ([\d, ]+))?(?:: (.+))?", expected)
    assert wanted, f"no way to end: {expected}"
    ranks = {int(rank) for rank in re.findall(r"\d+", wanted[2] or "")}
    first = re.search(r"^  rank (\d+) .*<- (?:first|too early)$", text, re.MULTILINE)
    if status != wanted[1].replace("hangs", "failed"):
        return f"it {status}"
    if wanted[1] == "hangs" and not reports_hang(text):
        return "it tells of no hang"
    if ranks and (ranks_in_first_line(text) != ranks or (first and int(first[1]) not in ranks)):
        return "it blames other ranks"
    words = wanted[3] or ""
    text = first_line(text) if words.startswith("^") else text
    found = any(all(part in text for part in way.split("...")) for way in words.removeprefix("^").split("|"))
    return "" if found else "the words are missing"


def check_rows(folder, source, *arguments, deadline_s=0.0, **how):
    """Run one file, or several by name, by ``run_test.py``; assert that every ending is as the comments in it say.

    Such a comment follows the line of a test or class, or is the first line of a file: ``# failed by 1: words``.
    ``# hangs`` is a failure whose report proves a hang instead of a time limit. The report begins with the given ranks.
    The words occur in the report, or after ``^`` in its first line. ``|`` means "or", and ``...`` means "and". A test
    without a comment passes; a class or file without one has no error; ``# none`` marks a test that has no result.
    """
    files = {"test_suite.py": source} if isinstance(source, str) else source
    (name, first), *others = files.items()
    with suite_of(folder, first, name) as suite:
        for other, text in others:
            suite.add(other, text)
        run = suite.finish(suite.start_runner(*arguments, served=True, **how), deadline_s=deadline_s)
        expected = dict(row for name, text in files.items() for row in _rows_of(name, text))
        ended = endings(run)
        wrong = [
            f"{row}: {why}; expected: {end}\n{text}"
            for row, end in expected.items()
            for status, text in [ended.get(row, ("never ran", ""))]
            if (why := _wrong_in(end, status, text))
        ]
        assert not wrong, "\n\n".join([*wrong, run.out[-2000:], run.err[-5000:]])
        assert ended.keys() == expected.keys(), f"{ended.keys() - expected.keys()}\n{run}"
        number = [status for status, _ in ended.values()]
        passed = number.count("passed") + number.count("expected failure")
        counts = f"{passed} passed, {number.count('failed')} failed, {number.count('skipped')} skipped"
        assert run.out.splitlines()[-1].startswith(counts), run
        assert run.code == (1 if "failed" in number else 0), run
        assert not [text for _, text in ended.values() if "receipt" in first_line(text)], "this is a word of ours"
        raw = {character for character in run.out + run.err if not character.isprintable()} - {"\t", "\n"}
        assert not raw, f"a terminal would obey these: {raw}"
    return run


def first_line(text):
    """Return the line of a report that states the failure."""
    return text.strip().partition("\n")[0]


def ranks_in_first_line(text):
    """Return the ranks that a report blames, which are the ranks in its first line.

    >>> ranks_in_first_line("rank 1 never called barrier, which ranks 0, 2 waited in (test_a.py:7)")
    {1}
    >>> ranks_in_first_line("ranks 0-2, 4 raised ValueError; rank 3 failed in another way") == {0, 1, 2, 4}
    True
    """
    line = first_line(text)
    number = r"(\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)"
    found = re.match(rf"ranks? {number}", line)
    ranks = set()
    for part in found[1].split(", ") if found else []:
        low, _, high = part.partition("-")
        ranks |= set(range(int(low), int(high or low) + 1))
    return ranks


def reports_hang(text):
    """Whether a report says that the ranks hang, and not that a time limit passed."""
    return bool(re.search(r"\bhang|\bhung\b|deadlock", text)) and "timed out" not in first_line(text)
