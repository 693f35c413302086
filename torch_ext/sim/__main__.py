"""``python -m torch_ext.sim build`` builds the simulator; ``info`` says where it is and what it shows."""

from __future__ import annotations

import argparse
import sys

import torch

from torch_ext.sim import _register, build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_ext.sim", description="The simulated accelerator.")
    parser.add_argument("command", choices=["build", "info"], help="build it now, or tell where it is")
    command = parser.parse_args().command

    try:
        _register.register()
    except build.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(build.ensure_built())
    if command == "info":
        print(f"torch {torch.__version__}, {torch.get_device_module('sim').device_count()} sim devices")
    return 0


if __name__ == "__main__":
    sys.exit(main())
