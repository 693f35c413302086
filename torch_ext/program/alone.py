"""What a worker of torchrun says at its end if it never used its device or its peers. See Note [Silent fakes]."""

from __future__ import annotations

import os
import sys

from torch_ext.program import fake, usage, variables
from torch_ext.program.spec import Facts

__all__ = ["look"]


def look(owner: int, *, cuda_as_sim: bool) -> None:
    """Tell of what this process has not used; with ``TORCH_EXT_SIM_STRICT=1``, end it with code 1.

    Does nothing in another process than ``owner``.
    """
    if os.getpid() != owner:
        return
    told = Facts(0, usage.groups_made(), usage.uses_of_device())
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    strict = variables.is_strict()
    facts = [told if number == rank else None for number in range(size)]
    unused = fake.what_was_never_used(facts, cuda_as_sim=cuda_as_sim)
    for sentence in unused:
        print(f"torch_ext: {'error' if strict else 'warning'}: {sentence}", file=sys.stderr, flush=True)
    if unused and strict:
        sys.stdout.flush()
        os._exit(1)  # an exit function has no other way to change the exit code
