"""``python -m torch_ext.mutate``."""

import sys

from torch_ext.mutate.command import main

raise SystemExit(main(sys.argv[1:]))
