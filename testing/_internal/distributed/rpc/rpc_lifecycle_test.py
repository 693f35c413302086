"""The life cycle of an agent: names, start, group operations, kinds of shutdown."""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from torch_ext.compat import rpc as private
from torch_ext.testing._internal.dist_utils import (
    dist_init,
    initialize_pg,
    start_worker,
    wait_until_node_failure,
    worker_name,
)
from torch_ext.testing._internal.distributed.rpc import _remote_functions as remote
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)

_NOT_RUNNING = "RPC has not been initialized"


class RpcLifecycleTest(RpcAgentTestFixture):
    world_size = 3

    # Names.

    @dist_init
    def test_workers_know_each_other_by_name_and_rank(self) -> None:
        own = rpc.get_worker_info()
        self.assertEqual((own.name, own.id), (worker_name(self.rank), self.rank))
        self.assertEqual(rpc.get_worker_info(own.name), own)
        for rank in range(self.world_size):
            self.assertEqual(rpc.get_worker_info(worker_name(rank)).id, rank)
        infos = private.api._get_current_rpc_agent().get_worker_infos()
        wanted = {(worker_name(rank), rank) for rank in range(self.world_size)}
        self.assertEqual({(info.name, info.id) for info in infos}, wanted)
        with self.assertRaisesRegex(RuntimeError, "nobody"):
            rpc.get_worker_info("nobody")

    @dist_init
    def test_worker_info_survives_pickle(self) -> None:
        info = rpc.get_worker_info(self.peer())
        self.assertEqual(pickle.loads(pickle.dumps(info)), info)
        self.assertEqual(self.call(rpc.get_worker_info), info)

    @dist_init(setup_rpc=False)
    def test_bad_names_are_refused(self) -> None:
        whys = dict.fromkeys(("a*b", " "), "must match")
        whys |= {"": "must be", "x" * 500: "shorter than 128"}
        for bad, why in whys.items():
            with self.subTest(bad), self.assertRaisesRegex(RuntimeError, why):
                private.WorkerInfo(bad, self.rank)

    @dist_init(setup_rpc=False)
    def test_two_workers_of_one_name_are_refused(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "is not unique|duplicate"):
            start_worker(self, "twin")
        self.assertFalse(private.api._is_current_rpc_agent_set())

    # Start.

    @dist_init
    def test_second_start_is_refused(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "is already initialized"):
            start_worker(self)
        self.assertEqual(self.call(remote.my_name), self.peer())

    @dist_init(setup_rpc=False)
    def test_calls_before_the_start_are_refused(self) -> None:
        for use in (
            lambda: rpc.rpc_sync("worker0", remote.my_name),
            lambda: rpc.rpc_async("worker0", remote.my_name),
            lambda: rpc.remote("worker0", remote.my_name),
            rpc.get_worker_info,
        ):
            with self.assertRaisesRegex(RuntimeError, _NOT_RUNNING):
                use()

    @dist_init(setup_rpc=False)
    def test_options_must_fit_the_backend(self) -> None:
        own: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size}
        with self.assertRaisesRegex(TypeError, "rpc_backend_options"):
            rpc.init_rpc("me", **own, rpc_backend_options="none")
        with self.assertRaisesRegex(TypeError, "BackendType"):
            rpc.init_rpc("me", **own, backend="none")

    @dist_init(setup_rpc=False)
    def test_time_limit_in_the_options_is_the_default_of_calls(self) -> None:
        start_worker(self, rpc_timeout=17)
        self.assertEqual(rpc.get_rpc_timeout(), 17)
        rpc.shutdown()

    @dist_init
    def test_process_group_and_agents_meet_apart(self) -> None:
        self.assertNotEqual(self.init_method, self.pg_init_method)
        for _ in range(2):  # the second call does nothing
            initialize_pg(self.pg_init_method, self.rank, self.world_size)
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, rpc.get_worker_info().name)
        self.assertEqual(gathered, [*map(worker_name, range(self.world_size))])
        dist.destroy_process_group()
        self.assertEqual(self.call(remote.my_name), self.peer())

    # Group operations.

    @dist_init
    def test_all_gather_collects_by_name(self) -> None:
        for turn in range(3):
            gathered = private.all_gather((self.rank, turn))
            ranks = range(self.world_size)
            self.assertEqual(gathered, {worker_name(r): (r, turn) for r in ranks})

    @dist_init
    def test_barrier_of_some_workers_does_not_wait_for_the_rest(self) -> None:
        """Worker 2 reaches no barrier until workers 0 and 1 have passed theirs."""
        if self.rank == 2:
            remote.pass_gate(None)
        else:
            for turn in range(3):
                self._check_barrier(turn, {0, 1})
        if self.rank == 0:
            rpc.rpc_sync(worker_name(2), remote.open_gate)
        self._check_barrier(3, set(range(self.world_size)))

    @dist_init
    def test_no_worker_passes_a_barrier_before_the_last_arrives(self) -> None:
        for turn in range(self.world_size):
            self._check_barrier(turn, set(range(self.world_size)), late=turn)

    def _check_barrier(self, turn: int, ranks: set[int], late: int = 0) -> None:
        """Pass a barrier of ``ranks``, which ``late`` reaches last, and check that all
        have reached it.
        """
        if self.rank == late:
            time.sleep(0.1)  # the peers pass long before if nothing waits
        rpc.rpc_sync(worker_name(0), remote.note_arrival, args=(turn, self.rank))
        private.barrier({worker_name(rank) for rank in ranks})
        arrived = rpc.rpc_sync(worker_name(0), remote.arrivals, args=(turn,))
        self.assertEqual(arrived, ranks, msg=f"ranks at barrier {turn}")

    # Shutdown.

    @dist_init(setup_rpc=False)
    def test_graceful_shutdown_finishes_work_in_flight(self) -> None:
        start_worker(self)
        futures = []
        if self.rank == 0:
            # Worker 1 reaches its shutdown at once, but must still serve these calls.
            # Each hop occupies a thread of its worker while it waits for the next.
            to, args = worker_name(1), (remote.my_name, (), 5, self.world_size)
            futures = [rpc.rpc_async(to, remote.relay, args=args) for _ in range(4)]
        rpc.shutdown()
        for future in futures:
            self.assertEqual(future.value(), worker_name(0))

    @dist_init(setup_rpc=False)
    def test_after_shutdown_calls_are_refused_and_another_is_harmless(self) -> None:
        start_worker(self)
        rpc.shutdown()
        with self.assertRaisesRegex(RuntimeError, _NOT_RUNNING):
            rpc.rpc_sync("worker0", remote.my_name)
        with self.assertRaisesRegex(RuntimeError, _NOT_RUNNING):
            rpc.shutdown()

    @dist_init(setup_rpc=False)
    def test_calls_to_a_worker_that_left_without_waiting_fail_as_such(self) -> None:
        initialize_pg(self.pg_init_method, self.rank, self.world_size)
        start_worker(self)
        dist.barrier()
        if self.rank == 1:
            rpc.shutdown(graceful=False)
        else:
            gone = self.get_shutdown_error_regex()
            wait_until_node_failure(1, gone)
            for _ in range(2):
                with self.assertRaisesRegex(RuntimeError, gone):
                    rpc.rpc_sync(worker_name(1), remote.my_name)
            left_over = worker_name(2 - self.rank)
            self.assertEqual(rpc.rpc_sync(left_over, remote.my_name), left_over)
        dist.barrier()
        if self.rank != 1:
            rpc.shutdown(graceful=False)
