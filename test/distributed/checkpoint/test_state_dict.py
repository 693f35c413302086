# Owner(s): ["oncall: distributed"]
"""Checkpoints of optimizers with several parameter groups, of other world sizes, and
saved while training goes on; and the state of models of one process.
"""

import copy
import functools
import gc
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    first_ranks_mesh,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import TestCase, run_tests, slowTest
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def full_tensor(tensor):
    """Return the whole of a parameter, detached, or of a state, which may be no
    DTensor. Collective for a DTensor.
    """
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class TestStateDict(FSDPTest):
    """Two parameter groups with different hyperparameters, in an order that is not the
    model's.
    """

    @property
    def world_size(self):
        return 2

    def _trained(self, seed, steps, lrs=(0.1, 0.2)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(self.device)
        for layer in model:
            fully_shard(layer, mesh=world_mesh(2))
        fully_shard(model, mesh=world_mesh(2))
        groups = [
            {"params": list(model[1].parameters()), "lr": lrs[0], "weight_decay": 0.5},
            {"params": list(model[0].parameters()), "lr": lrs[1], "betas": (0.5, 0.6)},
        ]
        optimizer = torch.optim.Adam(groups)
        self._train(model, optimizer, range(steps))
        return model, optimizer

    def _train(self, model, optimizer, steps):
        for step in steps:
            model(self.rows(4, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def _check_same(self, found, expected, label):
        def content(model, optimizer):
            keys = ("step", "exp_avg", "exp_avg_sq"), ("lr", "weight_decay", "betas")
            content = {}
            for name, each in model.named_parameters():
                content[name] = full_tensor(each)
                for key in keys[0]:
                    content[name, key] = full_tensor(optimizer.state[each][key])
            for index, group in enumerate(optimizer.param_groups):
                content |= {(index, key): group[key] for key in keys[1]}
            return content

        self.assertEqual(content(*found), content(*expected), label, atol=0, rtol=0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_multiple_param_groups(self):
        """Sharded, full or flattened; then training continues as without a load."""
        flat = {"flatten_optimizer_state_dict": True}
        self.run_subtests(
            {"options": [{}, {"full_state_dict": True}, flat]},
            self._test_multiple_param_groups,
        )

    def _test_multiple_param_groups(self, options):
        source, target = self._trained(0, 2), self._trained(1, 0, lrs=(0.7, 0.8))
        # Sharded state is not copied, so copy it, as a file would.
        model_state, optimizer_state = copy.deepcopy(
            get_state_dict(*source, options=StateDictOptions(**options))
        )
        if "flatten_optimizer_state_dict" in options:
            self.assertEqual(
                optimizer_state["param_groups.1.weight.lr"], 0.1, "flat learning rate"
            )
        set_state_dict(
            *target,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=StateDictOptions(**options),
        )
        self._check_same(target, source, "loaded")
        for each in (source, target):
            self._train(*each, range(2, 3))
        self._check_same(target, source, "trained on")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_of_a_fresh_optimizer_changes_nothing(self):
        """Asking for the state makes one for every parameter, but neither trains nor
        changes hyperparameters.
        """
        model, optimizer = self._trained(0, 0)
        before = [full_tensor(each).clone() for each in model.parameters()]
        _, state = get_state_dict(model, optimizer)
        after = [full_tensor(each) for each in model.parameters()]
        self.assertEqual(after, before, "parameters", atol=0, rtol=0)
        for groups in (optimizer.param_groups, state["param_groups"]):
            self.assertEqual([group["lr"] for group in groups], [0.1, 0.2], "rates")
        self.assertEqual([each.grad for each in model.parameters()], [None] * 4)
        names = ["0.bias", "0.weight", "1.bias", "1.weight"]
        self.assertEqual(sorted(state["state"]), names, "parameters with state")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_optimizer_state_of_fsdp1_is_on_rank_0(self):
        """Offloaded, the full state of a flat parameter is only on rank 0, and serves
        all ranks from there.
        """
        # If the "copy" to the host is not a copy, the next one overwrites it: see
        # test_fsdp_optim_state.py.
        skip_without_accelerator(
            "offloading a full state of original parameters needs a device's own memory"
        )

        def trained(seed, steps):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(self.device)
            model = FSDP(model, device_id=self.device, use_orig_params=True)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
            self._train(model, optimizer, range(steps))
            return model, optimizer

        (model, optimizer), (other, loaded) = trained(0, 2), trained(1, 1)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        names = ["0.bias", "0.weight", "1.bias", "1.weight"]
        names_here = names if self.rank == 0 else []
        self.assertEqual(sorted(state.get("state", {})), names_here, "full state")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(other, loaded, state, options=options)
        self.assertEqual(loaded.param_groups[0]["lr"], 0.1, "learning rate")
        whole = [
            get_optimizer_state_dict(
                *each, options=StateDictOptions(full_state_dict=True)
            )
            for each in ((model, optimizer), (other, loaded))
        ]
        for name in names:
            for key in ("step", "exp_avg", "exp_avg_sq"):
                found, expected = (each["state"][name][key] for each in reversed(whole))
                self.assertEqual(found, expected, f"{key} of {name}", atol=0, rtol=0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_patched_state_dicts(self):
        """``state_dict()`` and ``load_state_dict()`` of a model and its optimizer speak
        in names of the model.
        """
        source, target = self._trained(0, 2), self._trained(1, 1, lrs=(0.7, 0.8))
        for model, optimizer in (source, target):
            _patch_model_state_dict(model)
            _patch_optimizer_state_dict(model, optimizers=optimizer)
        state = copy.deepcopy([each.state_dict() for each in source])
        self.assertEqual(sorted(state[1]["state"]), sorted(state[0]), "names of state")
        for each, saved in zip(target, state, strict=True):
            each.load_state_dict(saved)
        self._check_same(target, source, "loaded")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_of_submodules(self):
        model, _ = self._trained(0, 0)
        for keeps, names in (
            (True, ["0.bias", "0.weight"]),
            (False, ["bias", "weight"]),
        ):
            options = StateDictOptions(keep_submodule_prefixes=keeps)
            with self.assertWarnsRegex(FutureWarning, "submodules only"):
                state = get_model_state_dict(
                    model, submodules={model[0]}, options=options
                )
            self.assertEqual(sorted(state), names, f"names, {keeps}")
            weight = full_tensor(state[names[1]])
            self.assertEqual(
                weight, full_tensor(model[0].weight), "weight", atol=0, rtol=0
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_missing_state_is_named(self):
        model, optimizer = self._trained(0, 1)
        model_state, state = get_state_dict(model, optimizer)
        del state["state"]["0.bias"]
        with self.assertRaisesRegex(
            RuntimeError, "Missing optimizer state for parameter '0.bias' in checkpoint"
        ):
            set_state_dict(
                model, optimizer, model_state_dict=model_state, optim_state_dict=state
            )

    def _overwrite(self, model, values):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.to_local()[:] = value

    def _check_saved(self, folder, expected, when):
        state = {
            name: distribute_tensor(torch.zeros_like(each), world_mesh(2))
            for name, each in expected.items()
        }
        dcp.load(state, checkpoint_id=folder)
        for name, each in expected.items():
            self.assertEqual(
                full_tensor(state[name]), each, f"{when}saved {name}", atol=0, rtol=0
            )

    @slowTest
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_async_save_keeps_the_moment_of_the_call(self):
        """Changes by training after the copy are not in the checkpoint, if the call
        copies or a thread does, and a second copy is not the first. A thread writes, or
        another process, which writes again after an error.
        """
        group = dist.new_group(backend="cpu:gloo")
        staging = StagingOptions(False, False, True, use_non_blocking_copy=False)
        source, stager = self._trained(0, 1), DefaultStager(staging)
        kind = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        in_background = {"async_stager": stager}
        for step, options in enumerate((in_background, in_background, {}, kind, kind)):
            self._train(*source, range(step, step + 1))
            state, _ = get_state_dict(*source)
            expected = {name: full_tensor(each).clone() for name, each in state.items()}
            more, folder = {"process_group": group, **options}, self.shared_folder()
            saving = dcp.async_save(state, checkpoint_id=folder, **more)
            if options is in_background:
                saving.staging_completion.result()
                saving = saving.upload_completion
            before = [each.to_local().clone() for each in source[0].parameters()]
            self._overwrite(source[0], [-1] * len(before))
            saving.result()
            self._check_saved(folder, expected, f"save {step}: ")
            self._overwrite(source[0], before)
            if options is not in_background:  # an error comes out of the future
                writer = dcp.FileSystemWriter(folder, overwrite=False)
                wrong = dcp.async_save(state, storage_writer=writer, **more)
                with self.assertRaisesRegex(CheckpointException, "already exists"):
                    wrong.result()
        stager.close()


class TestDTensorReshardMeshChange(FSDPTest):
    """Checkpoints written by one world size and read by another. Row counts divide by
    neither.
    """

    TENSORS = {"uneven": (7, 3), "few": (2, 3), "one": (1,), "even": (12, 2)}

    @property
    def world_size(self):
        return 4

    def _state(self, mesh, dim, scale):
        state = {}
        for name, sizes in self.TENSORS.items():
            values = torch.arange(1.0, 1 + torch.Size(sizes).numel()) * scale
            values = values.to(self.device).view(sizes)
            placement = [Shard(min(dim, values.ndim - 1))]
            state[name] = distribute_tensor(values, mesh, placement, src_data_rank=None)
        return state

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_dtensor_checkpoint_resharding_with_empty_shard(self):
        self.run_subtests(
            {"sizes": [(4, 3), (3, 4), (2, 4), (1, 3)], "dims": [(0, 0), (0, 1)]},
            self._test_resharding,
        )

    def _test_resharding(self, sizes, dims):
        folder = self.shared_folder()
        for run, size, dim in zip((dcp.save, dcp.load), sizes, dims, strict=True):
            mesh = first_ranks_mesh(size)
            if self.rank < size:
                state = self._state(mesh, dim, run is dcp.save)
                run(state, checkpoint_id=folder, process_group=mesh.get_group())
                for name, each in self._state(mesh, dim, 1).items():
                    pair = state[name].full_tensor(), each.full_tensor()
                    self.assertEqual(*pair, f"loaded {name}", atol=0, rtol=0)
            dist.barrier()


class Nested(torch.optim.SGD):
    """Keeps dictionaries in the state of a parameter, as Shampoo does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for each in (each for each in group["params"] if each.grad is not None):
                state = self.state[each]
                if not state:
                    parts = {"0": {"sum": torch.zeros_like(each)}, "1": {"count": 0.0}}
                    state |= {"parts": parts, "scale": 1.0}
                state["parts"]["0"]["sum"] += each.grad
                state["parts"]["1"]["count"] += 1.0
                each.data -= group["lr"] * state["parts"]["0"]["sum"]


class Layer(nn.Linear):
    """Has extra state, a buffer, and one that no state dict has."""

    def __init__(self, seed):
        super().__init__(3, 3)
        self.extra = {"seed": seed}
        self.register_buffer("kept", torch.full((2,), float(seed)))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def shorten(_, state, prefix, *more):
    for name in ("weight", "bias"):
        state[f"{prefix}{name}"] = state.pop(f"{prefix}inner.{name}")


def lengthen(_, state, prefix, *more):
    for name in ("weight", "bias"):
        state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}{name}")


class Renaming(nn.Module):
    """Has the names of its layer without a prefix, which ``method`` tells."""

    def __init__(self, method):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        setattr(self, method, lambda: {"weight": "inner", "bias": "inner"})
        self.register_state_dict_post_hook(shorten)
        self.register_load_state_dict_pre_hook(lengthen)


class TestNoComm(TestCase):
    """Models and optimizers of one process."""

    NAMES = [f"{i}.{name}" for i in range(3) for name in ("bias", "kept", "weight")]
    OPTIMIZERS = {
        "adam": torch.optim.Adam,
        "lr in a tensor": lambda groups, lr: torch.optim.Adam(groups, torch.tensor(lr)),
        "momentum": lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.5),
        "nested": Nested,
    }

    def _trained(self, kind, seed, steps):
        """The weight of the last layer is that of the first; the middle one trains
        only its bias. One optimizer has the last bias, the other two groups.
        """
        torch.manual_seed(seed)
        model = nn.Sequential(*(Layer(seed) for _ in range(3)))
        model[2].weight = model[0].weight
        model[1].weight.requires_grad_(False)
        groups = [{"params": [*model[1].parameters()], "weight_decay": 0.1 * seed}]
        groups.append({"params": [*model[0].parameters()], "lr": 0.3 * (1 + seed)})
        made = self.OPTIMIZERS[kind]
        optimizers = made(groups, 0.1 * (1 + seed)), made([model[2].bias], 0.2)
        self._train(model, optimizers, range(steps))
        return model, optimizers

    def _train(self, model, optimizers, steps):
        for step in steps:
            rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            model(rows).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def _content(self, model, optimizers):
        found = {"model": model.state_dict()}
        for index, optimizer in enumerate(optimizers):
            found[f"{index}"] = copy.deepcopy(optimizer.state_dict())
        return found

    def test_no_dist(self):
        """Tied and frozen weights, buffers, extra state and two optimizers load in any
        form: nested, flattened, full or on the host.
        """
        names = ("flatten_optimizer_state_dict", "full_state_dict", "cpu_offload")
        options = dict.fromkeys(names, (False, True))
        # Torch 2.13 cannot load a state that is flattened and full.
        rows = pairwise(
            {"kind": tuple(self.OPTIMIZERS), **options},
            lambda row: not all(row.get(name) for name in names[:2]),
        )
        for row in rows:
            kind, label = row.pop("kind"), f"{row}"
            source, target = self._trained(kind, 0, 2), self._trained(kind, 1, 0)
            options = StateDictOptions(**row)
            before = self._content(*source)
            state, optimizer_state = get_state_dict(*source, options=options)
            names = [*self.NAMES, *(f"{i}._extra_state" for i in range(3))]
            self.assertEqual(sorted(state), sorted(names), label)
            if not row["flatten_optimizer_state_dict"]:
                groups = [group["params"] for group in optimizer_state["param_groups"]]
                expected = [["1.weight", "1.bias"], ["0.weight", "0.bias"], ["2.bias"]]
                self.assertEqual(groups, expected, f"names of parameters, {kind}")
            saved = copy.deepcopy((state, optimizer_state))
            self.assertEqual(self._content(*source), before, f"asked, {kind}, {label}")
            set_state_dict(
                *target,
                model_state_dict=saved[0],
                optim_state_dict=saved[1],
                options=options,
            )
            self.assertEqual(self._content(*target), before, f"loaded, {kind}, {label}")
            self.assertIs(target[0][2].weight, target[0][0].weight)
            self.assertEqual(target[0][0].scratch, torch.ones(2), "not in the state")
            for each in (source, target):
                self._train(*each, range(2, 4))
            trained = (self._content(*each) for each in (target, source))
            self.assertEqual(*trained, f"trained on, {kind}, {label}")

    def test_optimizer_without_state(self):
        """Hyperparameters load into the right groups, and asking for the state leaves
        gradients alone.
        """
        model = nn.Sequential(Layer(0), Layer(1))
        one, other = (
            torch.optim.SGD([{"params": model[i].parameters()} for i in order], lr)
            for order, lr in (((0, 1), 0.1), ((1, 0), 0.2))
        )
        before = copy.deepcopy([*model.parameters()])
        state = get_optimizer_state_dict(model, one)
        model(torch.ones(2, 3)).sum().backward()
        gradients = copy.deepcopy([each.grad for each in model.parameters()])
        get_optimizer_state_dict(model, other)
        self.assertEqual([each.grad for each in model.parameters()], gradients)
        self.assertEqual([*model.parameters()], before, "asking trains nothing")
        with self.assertRaisesRegex(RuntimeError, "Optimizers are not passed in"):
            get_optimizer_state_dict(model, [])
        state["state"]["0.weight"] = {}  # So the keys say that they are names.
        for index, group in enumerate(state["param_groups"]):
            group["lr"] = index
        set_optimizer_state_dict(
            model, other, state, options=StateDictOptions(strict=False)
        )
        self.assertEqual([group["lr"] for group in other.param_groups], [1, 0])

    def test_parameter_group_without_parameters(self):
        """It loads from the only empty group of a state; two, or a second optimizer,
        are an error.
        """
        model = Layer(0)
        made = [
            torch.optim.SGD(
                [{"params": [*model.parameters()]}, *({"params": []},) * count],
                lr=0.1 * (1 + count),
                momentum=0.5,
            )
            for count in (1, 1, 2)
        ]
        state = get_optimizer_state_dict(model, made[0])
        state["param_groups"][1]["lr"] = 7.0
        set_optimizer_state_dict(model, made[1], state)
        self.assertEqual([each["lr"] for each in made[1].param_groups], [0.2, 7.0])
        wrong = get_optimizer_state_dict(model, made[2])
        text = "only support exactly one param group with zero"
        with self.assertRaisesRegex(ValueError, text):
            set_optimizer_state_dict(model, made[1], wrong)
        state["param_groups"].append({**state["param_groups"][0], "params": ["other"]})
        with self.assertRaisesRegex(ValueError, "multiple optimizers are not"):
            set_optimizer_state_dict(model, made[1], state)

    def test_state_by_module(self):
        """A state by module loads into this part, and leaves the rest alone."""
        (source, _), (target, _) = (self._trained("adam", seed, 1) for seed in range(2))
        rest = copy.deepcopy(target[1].state_dict())
        strict = StateDictOptions(strict=False)
        with self.assertWarnsRegex(FutureWarning, "is deprecated"):
            found = set_model_state_dict(
                target, {target[0]: source[0].state_dict()}, options=strict
            )
        missing = [name for name in target.state_dict() if name[0] != "0"]
        self.assertEqual(sorted(found.missing_keys), sorted(missing))
        self.assertEqual(found.unexpected_keys, [])
        states = [target[0].state_dict(), source[0].state_dict()]
        self.assertEqual(*states, "part")
        self.assertEqual(target[1].state_dict(), rest, "rest")

    def test_garbage_is_not_collected_meanwhile(self):
        """Nor after an error; collection goes on after a call if it was on before."""
        model, (optimizer, _) = self._trained("adam", 0, 1)
        noted, fails = [], []

        def note(*_):
            noted.append(gc.isenabled())
            if fails:
                raise KeyError("of a hook")

        for each in (model, optimizer):
            each.register_state_dict_pre_hook(note)
            each.register_load_state_dict_pre_hook(note)
        one, both = (model, optimizer), get_state_dict(model, optimizer)
        states = {"model_state_dict": both[0], "optim_state_dict": both[1]}
        calls = (
            functools.partial(get_model_state_dict, model),
            functools.partial(get_optimizer_state_dict, *one),
            functools.partial(get_state_dict, *one),
            functools.partial(set_model_state_dict, model, both[0]),
            functools.partial(set_optimizer_state_dict, *one, both[1]),
            functools.partial(set_state_dict, *one, **states),
        )
        self.addCleanup(gc.enable)
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            for call in calls:
                noted.clear()
                call()
                self.assertEqual({*noted}, {False}, f"{call.func}")
                self.assertEqual(gc.isenabled(), enabled)
                fails.append(True)
                with self.assertRaisesRegex(KeyError, "of a hook"):
                    call()
                self.assertEqual(gc.isenabled(), enabled, "after an error")
                fails.clear()

    def test_names_without_a_prefix(self):
        """A module tells which prefix its hooks remove, by a method of any name."""
        for method in ("_fqn_modifiers", "renamed"):
            source, target = (
                nn.Sequential(Renaming(method), nn.Linear(3, 1)) for _ in range(2)
            )
            state = copy.deepcopy(source.state_dict())
            names = [f"{i}.{name}" for i in range(2) for name in ("bias", "weight")]
            self.assertEqual(sorted(state), names)
            options = StateDictOptions(full_state_dict=True, dsd_fqn_modifiers=method)
            set_model_state_dict(target, dict(state), options=options)
            self.assertEqual(target.state_dict(), state)
        model = nn.Sequential(Renaming("_fqn_modifiers"))
        self.assertEqual(get_model_state_dict(model), model.state_dict())

    def test_layers_without_memory(self):
        """A full state makes the parameters of these layers, and of the rest."""
        source, target = (nn.Sequential(Layer(i), Layer(2 + i)) for i in range(2))
        target[1].to("meta")
        full = StateDictOptions(full_state_dict=True)
        state = copy.deepcopy(source.state_dict())
        set_model_state_dict(target, dict(state), options=full)
        self.assertEqual(target.state_dict(), state)

    def test_options_of_calls(self):
        """Options of patched objects hold for what they return and load; a state of a
        part has its names, and a state that cannot be loaded says so.
        """
        model, optimizers = self._trained("momentum", 0, 1)
        other, others = self._trained("momentum", 1, 1)
        for kind, found in (
            ("model", get_model_state_dict),
            ("both", lambda *args, **kwargs: get_state_dict(model, (), **kwargs)[0]),
        ):
            with self.assertWarnsRegex(FutureWarning, "submodules only"):
                state = found(model, submodules={model[0]})
            names = ["0._extra_state", "0.bias", "0.kept", "0.weight"]
            self.assertEqual(sorted(state), names, kind)
        with self.assertWarnsRegex(FutureWarning, "submodules only"):
            get_optimizer_state_dict(model, optimizers, submodules={model[0]})
        own = copy.deepcopy(optimizers[0].state_dict())
        set_optimizer_state_dict(other, others[0], copy.deepcopy(own))
        self.assertEqual(others[0].state_dict(), own, "a state with numbers")
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        _patch_optimizer_state_dict(model, optimizers=optimizers, options=flat)
        states = [each.state_dict() for each in optimizers]
        self.assertEqual(states[0], states[1])
        self.assertEqual(
            {name.split(".")[0] for name in states[0]}, {"state", "param_groups"}
        )
        both = {"optim_state_dict": get_optimizer_state_dict(other, others)}
        both = copy.deepcopy(both)
        lax = StateDictOptions(strict=False, ignore_frozen_params=True)
        _patch_model_state_dict(model, options=lax)
        _patch_optimizer_state_dict(other, optimizers=others[0], options=lax)
        part = get_optimizer_state_dict(other, others[0])
        del part["state"]["0.weight"]
        others[0].load_state_dict(part)
        self.assertNotIn("1.weight", model.state_dict())
        self.assertIn("1.bias", model.state_dict())
        model.load_state_dict({"1.bias": torch.full((3,), 7.0)})
        self.assertEqual(model[1].bias, torch.full((3,), 7.0))
        state = {"1.bias": torch.full((3,), 8.0), "more": torch.ones(1)}
        found = set_state_dict(
            other, others, model_state_dict=state, options=lax, **both
        )
        self.assertEqual(found.unexpected_keys, ["more"])
        self.assertNotIn("1.bias", found.missing_keys)
        self.assertIn("1.kept", found.missing_keys)
        with self.assertRaisesRegex(RuntimeError, 'Unexpected key.*"more"'):
            set_state_dict(other, others, model_state_dict=state, **both)
        found = set_state_dict(other, others, model_state_dict={}, **both)
        self.assertEqual([*found.missing_keys, *found.unexpected_keys], [])
        with self.assertRaisesRegex(RuntimeError, "contains _flat_param"):
            set_model_state_dict(other, {"0._flat_param": torch.ones(1)})

    def test_state_without_a_flat_form(self):
        model, (optimizer, _) = self._trained("adam", 0, 1)
        optimizer.state[model[0].bias]["note"] = "text"
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        with self.assertRaisesRegex(NotImplementedError, "Type is <class 'str'>"):
            get_optimizer_state_dict(model, optimizer, options=options)


if __name__ == "__main__":
    run_tests()
