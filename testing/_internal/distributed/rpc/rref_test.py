"""RRefs: creation, ownership, proxies, passing on, failure, the end of the value."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from torch_ext.compat import rpc as private
from torch_ext.testing._internal.dist_utils import (
    dist_init,
    get_num_owners_and_forks,
    start_worker,
    wait_until_owners_and_forks_on_rank,
    wait_until_pending_futures_and_users_flushed,
    worker_name,
)
from torch_ext.testing._internal.distributed.rpc import _remote_functions as remote
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    CALL_MODES,
    RpcAgentTestFixture,
)

LIMIT_S = 0.05
# Longer than any machine needs to give a call up.
GATE_S = 10.0


def rref_to(to: str, value: float) -> rpc.RRef[Tensor]:
    """Return a reference to a tensor that a third worker owns."""
    return rpc.remote(to, torch.full, args=((2,), value))


def value_of_user(rref: rpc.RRef[Any]) -> Any:
    return rref.local_value()


def forward_chain(
    rref: rpc.RRef[Tensor], hops: int, world_size: int
) -> rpc.RRef[Tensor]:
    """Pass the reference on from worker to worker; the last one returns it."""
    if hops == 0:
        return rref
    after = worker_name((rpc.get_worker_info().id + 1) % world_size)
    return rpc.rpc_sync(after, forward_chain, args=(rref, hops - 1, world_size))


_kept: list[Any] = []


def keep(rref: rpc.RRef[Any]) -> None:
    _kept.append(rref)


def fetch_and_drop_kept() -> Any:
    return _kept.pop().to_here()


class RRefTest(RpcAgentTestFixture):
    """Every worker creates values on the next one."""

    world_size = 3

    # Creation and ownership.

    @dist_init
    def test_owner_and_user_know_who_owns(self) -> None:
        rref = rpc.remote(self.peer(), remote.Accumulator)
        self.assertEqual(rref.owner(), rpc.get_worker_info(self.peer()))
        self.assertEqual(rref.owner_name(), self.peer())
        self.assertFalse(rref.is_owner())
        rref.to_here()
        wait_until_pending_futures_and_users_flushed()
        self.assertTrue(rref.confirmed_by_owner())
        local = rpc.RRef(torch.ones(1))
        self.assertTrue(local.is_owner())
        self.assertTrue(local.confirmed_by_owner())
        self.assertEqual(local.owner(), rpc.get_worker_info())

    @dist_init
    def test_local_value_is_the_object_itself_on_the_owner_only(self) -> None:
        value = remote.Accumulator(2)
        self.assertIs(rpc.RRef(value).local_value(), value)
        rref = rpc.remote(self.peer(), remote.Accumulator, args=(3,))
        value = self.call(value_of_user, rref)
        self.assertEqual(value.value(), torch.tensor(3.0))
        with self.assertRaisesRegex(RuntimeError, "can't call localValue"):
            rref.local_value()

    @dist_init
    def test_remote_on_this_worker(self) -> None:
        rref = rpc.remote(worker_name(self.rank), remote.Accumulator, args=(1,))
        self.assertTrue(rref.is_owner())
        self.assertEqual(rref.to_here().value(), torch.tensor(1.0))

    @dist_init
    def test_string_names_owner_and_ids(self) -> None:
        owner, user = rpc.RRef(1), rpc.remote(self.peer(), torch.ones, args=([1],))
        made_here = f"created_on={self.rank}"
        unique = rf"GloballyUniqueId\({made_here}, local_id=\d+\)"
        self.assertRegex(str(owner), rf"^OwnerRRef\({unique}\)$")
        ids = rf"RRefId = .*{made_here}.*ForkId = .*"
        self.assertRegex(str(user), rf"^UserRRef\({ids}\)$")

    @dist_init
    def test_type_hint_is_for_interfaces_only(self) -> None:
        why = "type_hint should only be specified when"
        with self.assertRaisesRegex(RuntimeError, why):
            rpc.RRef(1, type_hint=nn.Linear)

    @dist_init
    def test_type_of_the_remote_value(self) -> None:
        made = [rpc.remote(self.peer(), remote.Accumulator) for _ in range(2)]
        self.assertIs(made[0]._get_type(), remote.Accumulator)
        self.assertIs(made[1]._get_type(blocking=False).wait(), remote.Accumulator)

    # Proxies.

    @dist_init
    def test_proxies_call_methods_on_the_owners_object(self) -> None:
        rref = rpc.remote(self.peer(), remote.Accumulator, args=(1,))
        self.assertEqual(rref.rpc_sync().add(2), torch.tensor(3.0))
        self.assertEqual(rref.rpc_async().add(3).wait(), torch.tensor(6.0))
        self.assertEqual(rref.remote().add(4).to_here(), torch.tensor(10.0))
        # The owner's object, not a copy.
        self.assertEqual(rref.to_here().value(), torch.tensor(10.0))

    @dist_init
    def test_proxy_of_a_local_reference(self) -> None:
        rref = rpc.RRef(remote.Accumulator(1))
        self.assertEqual(rref.rpc_sync().add(1), torch.tensor(2.0))
        self.assertEqual(rref.local_value().value(), torch.tensor(2.0))

    @dist_init
    def test_one_proxy_serves_many_calls(self) -> None:
        proxy = rpc.remote(self.peer(), remote.Accumulator).rpc_async()
        for future in [proxy.add(1) for _ in range(10)]:
            future.wait()
        self.assertEqual(proxy.value().wait(), torch.tensor(10.0))

    @dist_init
    def test_proxy_refuses_missing_attributes(self) -> None:
        rref = rpc.remote(self.peer(), remote.Accumulator)
        for use in (
            lambda: rref.rpc_sync().no_such_method(),
            lambda: rref.rpc_async().no_such_method().wait(),
            lambda: rref.remote().no_such_method().to_here(),
        ):
            with self.assertRaisesRegex(AttributeError, "no_such_method"):
                use()

    @dist_init
    def test_proxy_waits_for_a_slow_creation(self) -> None:
        rref = rpc.remote(self.peer(), remote.pass_gate, args=(remote.Accumulator(5),))
        future = rref.rpc_async().value()
        self.assertFalse(future.done())
        self.call(remote.open_gate)
        self.assertEqual(future.wait(), torch.tensor(5.0))

    def _proxy_calls(
        self, rref: rpc.RRef[Any], method: str, *args: Any, **limit: float
    ) -> dict[str, Any]:
        """Return, for each kind of proxy, a function that calls ``method`` and, but for
        ``remote``, waits for its result.
        """
        return {
            "rpc_sync": lambda: getattr(rref.rpc_sync(**limit), method)(*args),
            "rpc_async": lambda: getattr(rref.rpc_async(**limit), method)(*args).wait(),
            "remote": lambda: getattr(rref.remote(**limit), method)(*args),
        }

    def _check_time_limit(self, calls: dict[str, Any]) -> None:
        for kind, call in calls.items():
            why = self.get_timeout_error_regex()
            with self.subTest(kind), self.assertRaisesRegex(RuntimeError, why):
                call()

    @dist_init
    def test_time_limit_of_a_proxys_call(self) -> None:
        """The proxy's limit holds, else the default one. A limit of zero is none.

        ``FaultyAgentRpcTest`` covers ``remote``, whose value would leak here.
        """
        rref = rpc.remote(self.peer(), remote.Accumulator, args=(5,))
        # Makes the type known.
        self.assertEqual(rref.rpc_sync().value(), torch.tensor(5.0))
        calls = self._proxy_calls(rref, "value_behind_gate", GATE_S, timeout=LIMIT_S)
        by_default = self._proxy_calls(rref, "value_behind_gate", GATE_S)
        del calls["remote"], by_default["remote"]
        self._check_time_limit(calls)
        default = rpc.get_rpc_timeout()
        unlimited = rref.rpc_async(timeout=0).value_behind_gate()
        private.set_rpc_timeout(LIMIT_S)
        self._check_time_limit(by_default)
        private.set_rpc_timeout(default)
        self.assertFalse(unlimited.done(), "a limit of zero seconds ended a call")
        self.call(remote.open_gate)
        self.assertEqual(unlimited.wait(), torch.tensor(5.0))

    @dist_init
    def test_time_limit_of_a_proxy_holds_while_the_object_is_created(self) -> None:
        """A proxy asks for the type of the object first."""
        args, rrefs = (remote.Accumulator(5), GATE_S), []
        for kind in CALL_MODES:
            rrefs.append(rpc.remote(self.peer(), remote.pass_gate, args=args))
            calls = self._proxy_calls(rrefs[-1], "value", timeout=LIMIT_S)
            self._check_time_limit({kind: calls[kind]})
        self.call(remote.open_gate)
        # Proxies of these references stay broken, since torch keeps the first answer to
        # what their type is: docs/findings/proxy_after_its_time_limit.md.
        for rref in rrefs:
            self.assertEqual(rref.to_here().value(), torch.tensor(5.0))

    # Passing references on.

    @dist_init
    def test_reference_as_argument_and_as_result(self) -> None:
        rref = rpc.remote(self.peer(), torch.ones, args=([2],))
        for to in range(self.world_size):
            wanted = torch.full((2,), 1.0 + to)
            self.check_call(wanted, remote.add_to_rref, rref, to, to=worker_name(to))
        third = self.call(rref_to, self.peer(2), 7.0)
        self.assertEqual(third.owner_name(), self.peer(2))
        self.assertEqual(third.to_here(), torch.full((2,), 7.0))

    @dist_init
    def test_reference_made_by_its_owner_is_shared(self) -> None:
        rref = self.call(rpc.RRef, torch.ones(2))
        self.assertEqual(rref.owner_name(), self.peer())
        self.assertEqual(rref.to_here(), torch.ones(2))
        mine = rpc.RRef(torch.zeros(2))
        self.check_call(torch.full((2,), 3.0), remote.add_to_rref, mine, 3)

    @dist_init
    def test_reference_inside_containers(self) -> None:
        rref = rpc.remote(self.peer(), torch.ones, args=([2],))
        holder = self.call(rpc.RRef, {"list": [rref]}, to=self.peer(2))
        self.assertEqual(holder.to_here()["list"][0].to_here(), torch.ones(2))

    @dist_init
    def test_reference_forwarded_around_the_ring_stays_the_same(self) -> None:
        mine = rpc.RRef(torch.full((1,), float(self.rank)))
        args = (mine, 2 * self.world_size, self.world_size)
        back = self.call(forward_chain, *args)
        self.assertEqual(back.owner(), rpc.get_worker_info())
        self.assertIs(back.local_value(), mine.local_value())

    @dist_init
    def test_reference_of_a_reference(self) -> None:
        outer = rpc.remote(self.peer(), rref_to, args=(self.peer(2), 4.0))
        inner = outer.to_here()
        owners = (outer.owner_name(), inner.owner_name())
        self.assertEqual(owners, (self.peer(), self.peer(2)))
        self.assertEqual(inner.to_here(), torch.full((2,), 4.0))

    @dist_init
    def test_plain_pickle_refuses_references(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "RPC"):
            pickle.dumps(rpc.RRef(1))

    # Failure.

    @dist_init
    def test_failed_creation_raises_when_the_value_is_fetched(self) -> None:
        rref = rpc.remote(self.peer(), remote.raise_value_error, args=("no value",))
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, "no value") as caught:
                rref.to_here()
            self.assertIn(self.peer(), str(caught.exception))
        with self.assertRaisesRegex(ValueError, "no value"):
            rref.rpc_sync().value()

    @dist_init
    def test_user_of_a_failed_reference_elsewhere_gets_the_error(self) -> None:
        rref = rpc.remote(self.peer(), remote.raise_value_error, args=("no value",))
        with self.assertRaisesRegex(ValueError, "no value"):
            self.call(remote.add_to_rref, rref, 1, to=self.peer(2))

    # The end of the owned value.

    @dist_init
    def test_value_lives_as_long_as_any_user(self) -> None:
        if self.rank != 0:
            return
        rref = rpc.remote(worker_name(1), torch.ones, args=([1],))
        rpc.rpc_sync(worker_name(2), keep, args=(rref,))
        wait_until_owners_and_forks_on_rank(1, 2, rank=1)
        del rref
        wait_until_owners_and_forks_on_rank(1, 1, rank=1)
        fetched = rpc.rpc_sync(worker_name(2), fetch_and_drop_kept)
        self.assertEqual(fetched, torch.ones(1))
        wait_until_owners_and_forks_on_rank(0, 0, rank=1)

    @dist_init
    def test_local_reference_that_was_never_shared_is_not_counted(self) -> None:
        rref = rpc.RRef(torch.ones(1))
        self.assertEqual(get_num_owners_and_forks(), ("0", "0"))
        self.assertEqual(rref.to_here(), torch.ones(1))

    def _leave_a_reference_behind(self) -> None:
        """Shut down with a reference that a graceful shutdown would release."""
        start_worker(self)
        rref = rpc.remote(self.peer(), torch.ones, args=([1],))
        rref.to_here()
        release = "_delete_all_user_and_unforked_owner_rrefs"
        with mock.patch.object(private.api, release):
            rpc.shutdown()
        del rref

    @dist_init(setup_rpc=False)
    def test_reference_left_at_shutdown_is_an_error(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "Leaking RRef"):
            self._leave_a_reference_behind()

    @dist_init(setup_rpc=False)
    def test_reference_left_at_shutdown_can_be_ignored(self) -> None:
        private.api._ignore_rref_leak = True
        self._leave_a_reference_behind()
