"""``python -m torch_ext.upstream``: patches for PyTorch out of this tree, and how our helpers differ from upstream's.

==============================================  =====================================================
``python -m torch_ext.upstream export ...``     writes what changed here as a patch for a PyTorch checkout
``python -m torch_ext.upstream drift``          says which names of our helpers differ from upstream's
==============================================  =====================================================

Exit codes: 0 done, 1 a conflict, a check that failed or a result that could not be written, 2 a usage error, 130
interrupted, by the keyboard or by a reader that closed the pipe; 143 or 129 by SIGTERM or SIGHUP.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch_ext.upstream import drift
from torch_ext.upstream.export.command import export
from torch_ext.upstream.export.git import CheckoutError

__all__ = ["main"]

_ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name, and return its exit code."""
    options = _parser().parse_args(arguments)
    if sys.stdout is None:
        return _failed("stdout is closed, and the result goes there; give one, such as > /dev/null", 2)
    before = {number: signal.getsignal(number) for number in _ENDED_BY}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup, or a shell's background
            signal.signal(number, _interrupt)
    try:
        return int(options.run(options))
    except CheckoutError as error:
        return _failed(str(error), 2)
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        return 128 + int(interrupt.args[0])
    except _OutputError as error:
        if error.closed:
            return 128 + signal.SIGINT
        return _failed(f"{error.file} cannot be written: {error}", 1)
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _interrupt:  # after an interrupt, further signals stay ignored
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    for each in _ENDED_BY:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


class _OutputError(Exception):
    """What was found cannot be written."""

    def __init__(self, file: str, error: OSError) -> None:
        super().__init__(error.strerror)
        self.file, self.closed = file, isinstance(error, BrokenPipeError)


def _failed(what: str, code: int) -> int:
    print(f"error: {what}", file=sys.stderr)
    return code


def _print(text: str) -> None:
    """Print ``text`` in UTF-8, whatever the terminal speaks: mails are."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains once more
        raise _OutputError("stdout", error) from None


def _given(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("got an empty text, as from a variable that is not set")
    return text


def _path(text: str) -> Path:
    return Path(_given(text))


def _new_file(text: str) -> Path:
    path = _path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text}; give a file in a folder that exists")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_ext.upstream", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="export | drift")
    told = commands.add_parser("drift", help="say which names of our helpers differ from upstream's")
    told.add_argument(
        "--against", type=_given, default="installed", metavar="CHECKOUT", help="default: the installed torch"
    )
    told.add_argument("--json", action="store_true", help="print every name, the same ones included, as JSON")
    told.set_defaults(run=_drift)
    sent = commands.add_parser("export", help="write what changed here as a patch for a PyTorch checkout")
    sent.add_argument(
        "what",
        nargs="+",
        type=_given,
        metavar="PATH|FILE::NAME|REV..",
        help="files, folders, names, or what changed since REV",
    )
    sent.add_argument(
        "--onto", required=True, type=_path, metavar="CHECKOUT", help="a git checkout of PyTorch; its HEAD counts"
    )
    sent.add_argument(
        "--output", type=_new_file, metavar="FILE", help="write the mail there; default: to standard output"
    )
    sent.add_argument("--branch", type=_given, metavar="NAME", help="commit on this new branch of the checkout instead")
    sent.add_argument("--subject", default="", help="the first line of the message; default: made of what changes")
    sent.add_argument("--tool", action="append", default=[], metavar="TEXT", help="what else helped to make it; repeat")
    sent.add_argument(
        "--check", action="store_true", help="apply it to a scratch copy and run it there, on cpu and on sim"
    )
    sent.add_argument("--device", action="append", choices=("cpu", "sim"), help="with --check: only there")
    sent.set_defaults(run=_export)
    return parser


def _export(options: argparse.Namespace) -> int:
    result = export(
        options.what,
        options.onto,
        branch=options.branch or "",
        subject=options.subject,
        tools=options.tool,
        devices=(options.device or ("cpu", "sim")) if options.check else (),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    for problem in result.problems:
        print(f"error: {problem}", file=sys.stderr)
    if result.problems:
        return 1
    if options.output:
        try:
            options.output.write_bytes(result.mail.encode())
        except OSError as error:
            raise _OutputError(str(options.output), error) from None
    elif not options.branch:
        _print(result.mail)
    return 0


def _drift(options: argparse.Namespace) -> int:
    entries = drift.drift(options.against)
    _print((drift.as_json(entries) if options.json else drift.as_text(entries)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
