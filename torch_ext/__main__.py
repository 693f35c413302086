"""``python -m torch_ext``: the same command as ``python run_test.py``."""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Nothing has been started yet that would have to end, and a traceback of imports helps nobody.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

from torch_ext.runner.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
