"""Threads of the simulator's own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def start_beside(name: str, body: Callable[[], None]) -> None:
    """Run ``body`` in a daemon thread. In a rank of ours, a hang is proven although this thread could act."""

    def run() -> None:
        if (threads := sys.modules.get("torch_ext.world.threads")) is not None:
            threads.leave_out()
        body()

    threading.Thread(target=run, name=name, daemon=True).start()
