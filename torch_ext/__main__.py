"""``python -m torch_ext``: the same command as ``python run_test.py``."""

from torch_ext.runner.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
