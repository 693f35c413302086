"""What torch's transports are made to do in ranks. Touches torch only if it is loaded."""

from __future__ import annotations

import sys

from torch_ext.world import stores

__all__ = ["LOOPBACK", "listen_at", "prepare"]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_address = ""


def prepare() -> None:
    """Have stores tell what is waited for in them, and gloo listen at the world's address once :func:`listen_at` has
    named one. Idempotent: a zygote does it before it forks, so that its children need not.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return
    stores.watch_waits()
    from torch_ext.compat.c10d import bind_gloo

    bind_gloo(LOOPBACK, lambda: _address)


def listen_at(address: str) -> None:
    """Have gloo listen at ``address`` in this process; if empty, wherever torch would have it listen."""
    global _address
    _address = address
