"""``python -m torch_ext.upstream``: patches for PyTorch out of this tree, and how our helpers differ from upstream's.

==============================================  =====================================================
``python -m torch_ext.upstream export ...``     writes what changed here as a patch for a PyTorch checkout
``python -m torch_ext.upstream drift``          says which names of our helpers differ from upstream's
==============================================  =====================================================

Exit codes: 0 done, 1 a conflict or a check that failed, 2 a usage error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_ext.upstream import drift
from torch_ext.upstream.export.command import Request, export
from torch_ext.upstream.export.patch import NoAuthorError
from torch_ext.upstream.export.trees import CheckoutError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name, and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (CheckoutError, NoAuthorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_ext.upstream", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="export | drift")
    told = commands.add_parser("drift", help="say which names of our helpers differ from upstream's")
    told.add_argument("--against", default="installed", metavar="CHECKOUT", help="default: the installed torch")
    told.add_argument("--json", action="store_true", help="print every name, the same ones included, as JSON")
    told.set_defaults(run=_drift)
    sent = commands.add_parser("export", help="write what changed here as a patch for a PyTorch checkout")
    sent.add_argument(
        "what", nargs="+", metavar="PATH|FILE::NAME|REV..", help="files, folders, names, or what changed since REV"
    )
    sent.add_argument(
        "--onto", required=True, type=Path, metavar="CHECKOUT", help="a git checkout of PyTorch; its HEAD counts"
    )
    sent.add_argument("--output", type=Path, metavar="FILE", help="write the mail there; default: to standard output")
    sent.add_argument("--branch", metavar="NAME", help="commit on this new branch of the checkout instead")
    sent.add_argument("--subject", default="", help="the first line of the message; default: made of what changes")
    sent.add_argument("--tool", action="append", default=[], metavar="TEXT", help="what else helped to make it; repeat")
    sent.add_argument(
        "--check", action="store_true", help="apply it to a scratch copy and run it there, on cpu and on sim"
    )
    sent.add_argument("--device", action="append", choices=("cpu", "sim"), help="with --check: only there")
    sent.set_defaults(run=_export)
    return parser


def _export(options: argparse.Namespace) -> int:
    request = Request(
        what=options.what,
        onto=options.onto,
        branch=options.branch or "",
        subject=options.subject,
        tools=options.tool,
        devices=(options.device or ("cpu", "sim")) if options.check else (),
    )
    result = export(request, say=lambda line: print(line, file=sys.stderr, flush=True))
    for problem in result.problems:
        print(f"error: {problem}", file=sys.stderr)
    if result.problems:
        return 1
    if options.output:
        options.output.write_text(result.mail, encoding="utf-8")
    elif not options.branch:
        sys.stdout.write(result.mail)
    return 0


def _drift(options: argparse.Namespace) -> int:
    entries = drift.drift(options.against)
    print(drift.as_json(entries) if options.json else drift.as_text(entries))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
