"""``RemoteModule``: a module on another worker, used like a local one."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule

from torch_ext.compat import dist_autograd
from torch_ext.testing._internal.dist_utils import dist_init, worker_name
from torch_ext.testing._internal.distributed.rpc import _remote_functions as remote
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)


class Affine(nn.Module):
    """``scale * x + shift``, and the name of the worker that computed it if asked."""

    def __init__(self, scale: float, shift: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)))
        self.inner = nn.ParameterList([nn.Parameter(torch.tensor(float(shift)))])

    def forward(self, x: Tensor, *, tell: bool = False) -> Any:
        out = self.scale * x + self.inner[0]
        return (out, remote.my_name()) if tell else out


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this forward always fails")


def forward_of(module: RemoteModule, x: Tensor) -> Tensor:
    # Not ``module(x)``: a module that RPC rebuilds on another worker lacks the hooks
    # that a call looks up.
    return module.forward(x)


def attributes_of(module: RemoteModule) -> set[str]:
    return set(vars(module))


class RemoteModuleTest(RpcAgentTestFixture):
    """Every worker puts a module on the next one."""

    world_size = 2

    def _affine(
        self, scale: float = 2, shift: float = 1, where: str = "{}/cpu"
    ) -> RemoteModule:
        return RemoteModule(
            where.format(self.peer()), Affine, args=(scale,), kwargs={"shift": shift}
        )

    @dist_init
    def test_forward_runs_on_the_owner(self) -> None:
        out, where = self._affine()(torch.ones(2), tell=True)
        self.assertEqual((out, where), (torch.full((2,), 3.0), self.peer()))

    @dist_init
    def test_forward_async_gives_a_future(self) -> None:
        module: Any = self._affine()
        inputs = torch.arange(10.0).view(5, 2)
        futures = [module.forward_async(row) for row in inputs]
        self.assertEqual(torch.stack(torch.futures.wait_all(futures)), 2 * inputs + 1)

    @dist_init
    def test_every_way_to_name_the_owner(self) -> None:
        rank = rpc.get_worker_info(self.peer()).id
        for where in ("{}", "{}/cpu", f"rank:{rank}/cpu"):
            with self.subTest(where):
                module = self._affine(where=where)
                self.assertEqual(module(torch.ones(1), tell=True)[1], self.peer())

    @dist_init
    def test_module_on_this_worker(self) -> None:
        module = RemoteModule(worker_name(self.rank), Affine, args=(3,))
        self.assertEqual(module(torch.ones(1)), torch.full((1,), 3.0))
        self.assertIsInstance(module.get_module_rref().local_value(), Affine)

    @dist_init
    def test_bad_owners_are_refused(self) -> None:
        for where, error in (
            ("nobody/cpu", RuntimeError),
            ("a/b/c", ValueError),
            ("", (RuntimeError, ValueError)),
        ):
            with self.subTest(where), self.assertRaises(error):
                RemoteModule(where, Affine, args=(1,))

    @dist_init
    def test_non_module_is_refused_by_the_owner(self) -> None:
        why = "returns an instance of <class nn.Module>"
        with self.assertRaisesRegex(ValueError, why) as caught:
            RemoteModule(self.peer(), int)(torch.ones(1))  # type: ignore[arg-type] # the mistake under test
        self.assertIn(self.peer(), str(caught.exception))

    @dist_init
    def test_failed_constructor_and_failed_forward_name_the_owner(self) -> None:
        for broken, why in (
            (RemoteModule(self.peer(), Affine, args=("no number",)), "no number"),
            (RemoteModule(self.peer(), Fails), "this forward always fails"),
        ):
            with self.subTest(why), self.assertRaisesRegex(ValueError, why) as caught:
                broken(torch.ones(1))
            self.assertIn(self.peer(), str(caught.exception))

    @dist_init
    def test_parameters_are_the_owners(self) -> None:
        module = self._affine(2, 5)
        for recurse, values in ((True, [2, 5]), (False, [2])):
            parameters = module.remote_parameters(recurse=recurse)
            self.assertEqual([p.to_here().item() for p in parameters], values)
            self.assertEqual({p.owner_name() for p in parameters}, {self.peer()})
        self.assertEqual(module.get_module_rref().owner_name(), self.peer())

    @dist_init
    def test_gradients_reach_module_and_input(self) -> None:
        module, x = self._affine(), torch.tensor([1.0, 4.0], requires_grad=True)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [module(x).sum()])
            own = dist_autograd.get_gradients(context_id)[x]
            self.assertEqual(own, torch.full((2,), 2.0))
            grads = self.call(remote.gradients_of, module.get_module_rref(), context_id)
        self.assertEqual(grads, [torch.tensor(5.0), torch.tensor(2.0)])

    @dist_init
    def test_mode_of_training_reaches_the_owner(self) -> None:
        module = RemoteModule(self.peer(), nn.Dropout, args=(1.0,))
        self.assertEqual(module(torch.ones(3)), torch.zeros(3))
        module.eval()
        self.assertEqual(module(torch.ones(3)), torch.ones(3))
        module.train()
        self.assertEqual(module(torch.ones(3)), torch.zeros(3))

    @dist_init
    def test_methods_of_a_local_module_are_refused(self) -> None:
        module = self._affine()
        refused: list[tuple[Any, ...]] = [
            ("register_buffer", "b", torch.ones(1)),
            ("register_parameter", "p", None),
            ("add_module", "m", None),
            ("apply", print),
            ("to", "cpu"),
            ("load_state_dict", {}),
        ]
        no_arguments = "cpu double state_dict parameters buffers children modules"
        no_arguments += " requires_grad_ zero_grad share_memory"
        refused += [(name,) for name in no_arguments.split()]
        for name, *args in refused:
            why = f"``{name}`` not supported for RemoteModule"
            with self.subTest(name), self.assertRaisesRegex(ValueError, why):
                getattr(module, name)(*args)

    @dist_init
    def test_remote_module_refuses_plain_pickle(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "only be pickled when using RPC"):
            pickle.dumps(self._affine())

    @dist_init
    def test_rpc_carries_the_module_and_no_attribute_of_the_users(self) -> None:
        module: Any = self._affine()
        module.extra = "not part of a remote module"
        attributes = self.call(attributes_of, module)
        self.assertNotIn("extra", attributes)
        self.assertIn("module_rref", attributes)


class ThreeWorkersRemoteModuleTest(RpcAgentTestFixture):
    """A module on one worker, made by another, used by a third."""

    world_size = 3

    @dist_init
    def test_module_sent_to_another_worker_is_the_same_module(self) -> None:
        module = RemoteModule(self.peer(1), Affine, args=(self.rank + 2,))
        x = torch.arange(3.0)
        wanted = (self.rank + 2) * x
        self.check_call(wanted, forward_of, module, x, to=self.peer(2))
        back = self.call(remote.identity, module, to=self.peer(2))
        self.assertEqual(back.get_module_rref().owner_name(), self.peer(1))
        self.assertEqual(back.forward(x), wanted)
        on_owner = self.call(module_of, back, to=self.peer(1))
        self.assertIs(type(on_owner), Affine)

    @dist_init
    def test_gradients_through_a_third_worker(self) -> None:
        module = RemoteModule(self.peer(1), Affine, args=(3,))
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            out = self.call(forward_of, module, x, to=self.peer(2))
            dist_autograd.backward(context_id, [out.sum()])
            grad = dist_autograd.get_gradients(context_id)[x]
            self.assertEqual(grad, torch.full((2,), 3.0))


def module_of(module: RemoteModule) -> nn.Module:
    return module.get_module_rref().local_value()
