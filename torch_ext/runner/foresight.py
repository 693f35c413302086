"""What a run's first zygote imports because a test file looks as if its tests needed it. Reads files, imports nothing.

See Note [Imports at first use].
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["modules_ahead"]

# What makes a test import one of torch's own modules: a comparison of tensors; an optimizer, a checkpoint, a wrapper
# around a module, or a tensor subclass.
_FIRST_USES = {
    "torch.distributed.tensor": re.compile(r"assertEqual|assertNotEqual|assert_close"),
    "torch._dynamo": re.compile(
        r"optim|fsdp|fully_shard|replicate|parallel|DDP|DTensor|distribute_|device_mesh|checkpoint|compile|dynamo|pipelin"
        r"|autograd",
        re.IGNORECASE,
    ),
}
# torch's helpers for tests, and the libraries that they import first of all. The helpers themselves change settings of
# torch (torch.backends.disable_global_flags), which a file that does without them must not see.
_HELPERS = re.compile(r"\b(?:torch|torch_ext)\.testing\b")
_LIBRARIES = ("expecttest", "hypothesis", "pytest", "torch.utils.cpp_extension")


def modules_ahead(file: Path) -> tuple[str, ...]:
    """Return the modules that tests of ``file`` will probably import; none if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return (
        *(_LIBRARIES if _HELPERS.search(text) else ()),
        *(module for module, words in _FIRST_USES.items() if words.search(text)),
    )
