"""``python torch_ext`` and ``python -m torch_ext`` beside a clone of that name, where the folder hides the package."""

import sys
from pathlib import Path

sys.modules.pop("torch_ext", None)
sys.path[0] = str(Path(__file__).resolve().parent)

if __name__ == "__main__":
    from torch_ext.__main__ import main

    raise SystemExit(main())
