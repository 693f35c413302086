"""Faults that torch's code could contain, such as a patch may bring by accident, and the test that must notice each.

The text files of this folder have a row for each fault, below the test class and the function that it belongs to::

    == MODULE:CLASS              the test class, by its module below test.distributed; it may end with " on DEVICE"
    -- MODULE:FUNCTION           the function of torch that has the fault
    METHOD: EXPRESSION           the test that must fail, and a regular expression for its report
        TEXT {{OLD => NEW}} TEXT  a part of the function's source that occurs once, and its changes
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from test.torch_ext.suite_faults.mutation import Edit

_CHANGE = re.compile(r"\{\{(.*?) =>(?: |(?=\n))(.*?)\}\}(?!\})", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """A change of torch's code, and the test that must fail with it.

    Attributes:
        edit: the change.
        module: where the test is, below ``test.distributed``.
        cls: its class.
        method: its name.
        says: what the report of its failure contains, a regular expression.
        device: where it runs: some need memory apart from the host's, or accounted for.
    """

    edit: Edit
    module: str
    cls: str
    method: str
    says: str
    device: str


def parse(text):
    """Yield the faults of a text file.

    Raises:
        ValueError: a row has no change, or no test.
    """
    suite = device = function = ""
    for row in re.split(r"\n(?!    )", text.strip("\n")):
        head, _, indented = row.partition("\n")
        if head.startswith("== "):
            suite, _, device = head[3:].partition(" on ")
        elif head.startswith("-- "):
            function = head[3:]
        elif head:
            (module, _, cls), (method, _, says) = suite.partition(":"), head.partition(": ")
            source = re.sub("^    ", "", indented, flags=re.MULTILINE)
            if not (says and _CHANGE.search(source)):
                raise ValueError(f"a row of {function} that is no fault: {row}")
            edit = Edit(function, _CHANGE.sub(r"\1", source), _CHANGE.sub(r"\2", source))
            yield Fault(edit, module, cls, method, says, device or "cpu")


def _read():
    """Name each fault after its function, with a number."""
    seen = Counter[str]()
    for path in sorted(Path(__file__).parent.glob("*.txt")):
        for fault in parse(path.read_text()):
            function = re.split("[.:]", fault.edit.function)[-1]
            seen[function] += 1
            yield f"{function}_{seen[function]}", fault


FAULTS = dict(_read())


def inject(name):
    """Make the change of fault ``name`` in this process and in all that are forked from it."""
    FAULTS[name].edit.apply()
