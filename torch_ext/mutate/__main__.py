"""``python -m torch_ext.mutate``."""

import sys

from torch_ext.mutate.command import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
