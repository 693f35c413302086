"""TensorPipe's own features: options, transports, channels, device maps."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import rpc

from torch_ext.compat.rpc import current_agent
from torch_ext.testing._internal.dist_utils import (
    dist_init,
    initialize_pg,
    poll_until,
    worker_name,
)
from torch_ext.testing._internal.distributed.rpc import _remote_functions as remote
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)


def carries(transports: list[str] | None, channels: list[str] | None) -> Any:
    """Return the test of tensors that travel over these."""

    @dist_init(setup_rpc=False)
    def test(self: Any) -> None:
        self._start(_transports=transports, _channels=channels)
        for size in (0, 1, 100, 1 << 18):
            tensor = torch.arange(size)
            self.assertEqual(self.call(torch.add, tensor, 1), tensor + 1)
        rpc.shutdown()

    return test


class TensorPipeAgentRpcTest(RpcAgentTestFixture):
    world_size = 2

    def _start(self, **options: Any) -> None:
        """Start with these options, from which torch infers the backend."""
        rpc.init_rpc(
            worker_name(self.rank),
            rank=self.rank,
            world_size=self.world_size,
            rpc_backend_options=self._options(**options),
        )

    def _options(self, **options: Any) -> rpc.TensorPipeRpcBackendOptions:
        where = self.init_method
        return rpc.TensorPipeRpcBackendOptions(init_method=where, **options)

    test_transports_and_channels_of_torchs_choice = carries(None, None)
    test_shared_memory_transport = carries(["shm"], ["basic"])
    test_socket_transport_with_several_lanes = carries(["uv"], ["mpt_uv", "basic"])

    @dist_init(setup_rpc=False)
    def test_unknown_transport_is_refused(self) -> None:
        for options in ({"_transports": ["pigeon"]}, {"_channels": ["pigeon"]}):
            with self.assertRaisesRegex(RuntimeError, "pigeon"):
                self._start(**options)

    @dist_init(setup_rpc=False)
    def test_number_of_threads(self) -> None:
        self._start(num_worker_threads=2, _transports=["uv"], _channels=["basic"])
        info = current_agent().get_debug_info()
        self.assertEqual(int(info["agent.thread_pool_size"]), 2)
        rpc.shutdown()

    @dist_init
    def test_time_limit_is_seconds(self) -> None:
        for bad in (timedelta(seconds=10), "10"):
            with self.assertRaises(TypeError):
                self._options(rpc_timeout=bad)
        with self.assertRaisesRegex(RuntimeError, "non-negative"):
            self._options(rpc_timeout=-1)

    @dist_init(setup_rpc=False)
    def test_device_map_to_a_device_that_is_not_there_is_refused(self) -> None:
        devices = {torch.device("cuda", 101): torch.device("cuda", 102)}
        with self.assertRaisesRegex(ValueError, "invalid indices"):
            self._start(device_maps={self.peer(): devices})

    @dist_init(setup_rpc=False)
    def test_device_map_to_an_unknown_worker_is_refused(self) -> None:
        initialize_pg(self.pg_init_method, self.rank, self.world_size)
        devices = {torch.device("cpu"): torch.device("cpu")}
        maps = {"nobody": devices} if self.rank == 0 else None
        # All workers exchange and check the maps, so all refuse.
        with self.assertRaisesRegex(ValueError, "invalid target node names"):
            self._start(device_maps=maps)

    @staticmethod
    def _active_calls() -> int:
        return int(current_agent().get_debug_info()["agent.client_active_calls"])

    @dist_init
    def test_debug_info_counts_calls_in_flight(self) -> None:
        for _ in range(3):
            self.call(remote.my_name)
        why = "answered calls are still counted as active"
        poll_until(lambda: self._active_calls() == 0, why)
        waiting = rpc.rpc_async(self.peer(), remote.pass_gate, args=(1,))
        self.assertEqual(self._active_calls(), 1)
        self.call(remote.open_gate)
        self.assertEqual(waiting.wait(), 1)
