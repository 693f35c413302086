"""Whether an exception comes from what connects the ranks, or from a test's own code. Runs in the rank; touches torch
only if it is loaded.
"""

from __future__ import annotations

import dis
import os
import re
import sys
from collections.abc import Iterator
from types import TracebackType

__all__ = ["disagreement", "raised_by_transport", "ran_out_of_time"]

# Folders of torch whose Python code raises in the name of a process group, a store or RPC.
_THREADED_GROUP = "/multi_threaded_pg.py"
_FOLDERS = ("/torch/distributed/", "/torch/futures/", "/torch_ext/compat/", _THREADED_GROUP)
# How transports say that nobody came in time; such a failure shows who waited, not who is to blame.
_LIMIT = re.compile(r"tim(e|ed)[ -]?out|wait timeout|deadline|failed to pass monitoredBarrier", re.IGNORECASE)
# How backends say that ranks called different collectives: `simccl`, and torch's threaded group as we complete it.
_DISAGREE = re.compile(r"ranks (?:disagree in|differ in a collective)")
_CALLED = re.compile(
    r"\brank (\d+)(?: \([^)]*\))? called (.+?)(?: at (\S+:\d+))?(?=; |\.(?: |$)|$)",
)


def disagreement(reason: str) -> Iterator[tuple[int, str, str]]:
    """Yield the rank, the call and the line of each that ``reason`` names, if it says that ranks disagree.

    >>> list(disagreement("ranks disagree in the root: rank 0 called b, root 0 at /a/t.py:3; rank 1 called b, root 1."))
    [(0, 'b, root 0', 't.py:3'), (1, 'b, root 1', '')]
    """
    if _DISAGREE.search(reason):
        for rank, call, line in _CALLED.findall(reason):
            yield int(rank), call, os.path.basename(line)


def ran_out_of_time(reason: str) -> bool:
    """Whether the transport raised with ``reason`` because a limit of its own ended: the peers did not come."""
    return bool(_LIMIT.search(reason))


def raised_by_transport(error: BaseException) -> bool:
    """Whether ``error`` was raised by torch's C++ or by ``torch.distributed``, rather than by a test's own ``raise``.

    Words cannot tell: a test may raise ``ValueError("unexpected EOF")`` of its own. Where it was raised can.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    innermost = _innermost(error.__traceback__)
    if innermost is None:
        return False
    if isinstance(error, SystemExit):  # how torch's threaded group tells a rank that another one has failed
        return innermost.tb_frame.f_code.co_filename.endswith(_THREADED_GROUP)
    if not isinstance(error, (RuntimeError, ConnectionError, EOFError, TimeoutError)):
        return False
    in_torch = any(folder in innermost.tb_frame.f_code.co_filename for folder in _FOLDERS)
    return in_torch or not _is_raise(innermost)


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_raise(trace: TracebackType) -> bool:
    """Whether the exception was raised by a ``raise`` statement in this frame, not by what it called."""
    code = trace.tb_frame.f_code.co_code
    if not 0 <= trace.tb_lasti < len(code):
        return False
    return dis.opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
