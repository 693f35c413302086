"""A reserved port is nobody else's, and the store that was meant to have it gets it."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from torch_ext.testing._internal._distributed.helpers import reserved_port


def test_nobody_else_gets_a_reserved_port() -> None:
    with reserved_port() as port:
        taken = [socket.socket() for _ in range(2000)]
        try:
            for each in taken:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("127.0.0.1", 0))
            assert port not in {each.getsockname()[1] for each in taken}
        finally:
            for each in taken:
                each.close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


def test_a_store_binds_a_reserved_port() -> None:
    with reserved_port() as port:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
        client = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60), wait_for_workers=False)
        store.set("key", "value")
        assert client.get("key") == b"value"
