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

from torch_ext.upstream import drift
from torch_ext.upstream.export.trees import CheckoutError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name, and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except CheckoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_ext.upstream", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="export | drift")
    told = commands.add_parser("drift", help="say which names of our helpers differ from upstream's")
    told.add_argument("--against", default="installed", metavar="CHECKOUT", help="default: the installed torch")
    told.add_argument("--json", action="store_true", help="print every name, the same ones included, as JSON")
    told.set_defaults(run=_drift)
    return parser


def _drift(options: argparse.Namespace) -> int:
    entries = drift.drift(options.against)
    print(drift.as_json(entries) if options.json else drift.as_text(entries))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
