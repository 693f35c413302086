"""``python -m torch_ext.sim build`` builds the simulator; ``info`` says where it is and what it shows."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_ext.sim", description="The simulated accelerator.")
    parser.add_argument("command", choices=["build", "info"], help="build it now, or tell where it is")
    command = parser.parse_args().command

    # The package has registered the device by the time this runs (`-m` imports it first), and so has built the library.
    import torch

    from torch_ext.sim import build

    print(f"{build.ensure_built(verbose=True)}")
    if command == "info":
        print(f"torch {torch.__version__}, {torch.get_device_module('sim').device_count()} sim devices")
    return 0


if __name__ == "__main__":
    sys.exit(main())
