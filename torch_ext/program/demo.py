"""``torch_ext demo``: shows a race that ruins a training run, and the report that names it, in ten seconds.

FSDP2 trains on four simulated devices, and copies each batch while the last step still computes. The second run omits a
wait between two streams: the program prints plausible losses, and the check names the missing wait. The program is
:func:`train`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence

_OPTIONS = ("-n", "4", "--output", "rank0", "--races", "error")
_VARIANTS = {
    "with-wait": "FSDP2 on four devices; batches are copied on a second stream:",
    "without-wait": "The same, without the line that makes the computation wait for the copy:",
}


def train(waits: bool) -> None:
    """Train on the device of this rank; ``waits``: wait for the copied batch."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(rank)
    device = torch.device(f"{torch.accelerator.current_accelerator()}:{rank}")
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies = torch.Stream(device)
    for step in range(3):
        with copies:
            batch = torch.randn(32, 64).pin_memory().to(device, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().wait_stream(copies)
        loss = (model(batch) - 1).square().mean()
        batch.record_stream(torch.accelerator.current_stream())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Run both variants; return 0 if the first passed and the check found the race of the second."""
    argparse.ArgumentParser("torch_ext demo", description="Show a race and its report.").parse_args(arguments)
    codes = [_show(variant, title) for variant, title in _VARIANTS.items()]
    print(f"\nThe program is train() of {__file__}. Now yours: python -m torch_ext run -n 4 --races error train.py")
    return 0 if codes == [0, 1] else 1


def _show(variant: str, title: str) -> int:
    from torch_ext.program.run import main as run

    print(f"\n{title}\n  python -m torch_ext run {' '.join(_OPTIONS)} demo.py {variant}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="torch_ext-demo-") as folder:
        shutil.copy(__file__, folder)  # reports leave out frames of this package
        child = os.fork()  # a run changes its process: signals, environment, messages printed only once
        if not child:
            os.chdir(folder)
            os._exit(run([*_OPTIONS, "demo.py", variant]) & 0xFF)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    train(waits=sys.argv[1:] != ["without-wait"])
