# Owner(s): ["oncall: distributed"]
"""Tensor parallel styles: a module that is split over ranks computes and learns what
the whole module does, in whatever layout its inputs come and its outputs go.
"""

import copy
import itertools
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1))
OPTIONS = {
    "style": (ColwiseParallel, RowwiseParallel),
    "kind": ("linear", "linear without bias", "embedding"),
    "source": (None, *LAYOUTS),
    "target": (None, *LAYOUTS),
    "use_local_output": (True, False),
    "gives_dtensor": (False, True),
}
FIRST, WIDTH, OUT = 4, 8, 12  # rows of four positions, of as many features


def works(row):
    # An embedding's input has no features; without a layout, rows expect parts of them.
    source = row.get("source", Replicate())
    parts = source in (Shard(1), Shard(-1))
    parts |= source is None and row.get("style") is not ColwiseParallel
    return not (row.get("kind") == "embedding" and parts)


class TensorParallelStyleTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _part(self, whole, layout):
        if isinstance(layout, Replicate):
            return whole
        return whole.chunk(self.world_size, layout.dim)[self.rank]

    def _check(self, module, reference, where):
        """Check that the gradients of ``module`` are those of ``reference``."""
        for name, whole in reference.named_parameters():
            found = module.get_parameter(name).grad
            found = found.full_tensor() if isinstance(found, DTensor) else found
            self.assertEqual(found, whole.grad, f"gradient of {name}, {where}")

    def _values(self, *shape, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_layouts_of_inputs_and_outputs(self):
        rows = [*pairwise(OPTIONS, works)]
        whole = {"source": None, "use_local_output": True, "gives_dtensor": False}
        for style, target in itertools.product(OPTIONS["style"], LAYOUTS):
            rows.append(
                {"style": style, "kind": "embedding", "target": target, **whole}
            )
        cut = whole | {"kind": "embedding", "source": Shard(0), "target": None}
        rows += [{"style": style, **cut} for style in OPTIONS["style"]]
        for row in rows:
            self._test_layouts(**row)

    def _test_layouts(
        self, style, kind, source, target, use_local_output, gives_dtensor
    ):
        where = f"{style.__name__} of {kind}, {source} to {target}, {use_local_output}"
        mesh, options = world_mesh(2), {"use_local_output": use_local_output}
        torch.manual_seed(0)
        if kind == "embedding":
            reference = nn.Embedding(WIDTH, OUT).to(self.device)
            x = torch.arange(FIRST * 4, device=self.device).view(FIRST, 4) * 3 % WIDTH
        else:
            reference = nn.Linear(WIDTH, OUT, bias=kind == "linear").to(self.device)
            x = self._values(FIRST, 4, WIDTH).requires_grad_()
        if source is not None:
            options["input_layouts"] = source
        elif style is RowwiseParallel:
            source = Shard(-1)
        if target is not None:
            options["output_layouts"] = target
        source = source or Replicate()
        target = target or (Shard(-1) if style is ColwiseParallel else Replicate())
        model = parallelize_module(copy.deepcopy(reference), mesh, style(**options))
        expected = reference(x)
        factor = self._values(*expected.shape, seed=1)
        (expected * factor).sum().backward()
        part = self._part(x.detach(), source).clone()
        part.requires_grad_(x.requires_grad)
        given = DTensor.from_local(part, mesh, [source]) if gives_dtensor else part
        prepared = []
        model.register_forward_pre_hook(lambda _, inputs: prepared.extend(inputs))
        with CommDebugMode() as log:
            found = model(given)
        # No values are compared or sent but those that the layouts need.
        is_rows = style is RowwiseParallel
        wanted = Shard(2) if is_rows and kind != "embedding" else Replicate()
        moves = isinstance(source, Shard) and source not in (wanted, Shard(-1))
        moves |= source == Shard(-1) and wanted == Replicate()
        moves += is_rows or target not in (Shard(-1), Shard(2))
        self.assertEqual(log.get_total_counts(), moves, where)
        self.assertEqual(isinstance(found, DTensor), not use_local_output, where)
        local = found if use_local_output else found.to_local()
        # Collectives run while the program goes on, if no rank has to copy after it.
        if is_rows and target in (Replicate(), Shard(0)):
            self.assertIsInstance(local, AsyncCollectiveTensor, where)
        if source == Shard(0) and wanted == Replicate():
            is_running = isinstance(prepared[0]._local_tensor, AsyncCollectiveTensor)
            self.assertTrue(is_running, where)
        self.assertEqual(local, self._part(expected, target), f"output, {where}")
        (local * self._part(factor, target)).sum().backward()
        self._check(model, reference, where)
        if x.requires_grad:
            wanted = self._part(x.grad, source)
            self.assertEqual(part.grad, wanted, f"gradient of the input, {where}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_vectors(self):
        """Collectives of vectors, whose parts need no copy, run while the program goes
        on."""
        mesh, prepared, x = world_mesh(2), [], self._values(WIDTH)
        torch.manual_seed(0)
        reference = nn.Linear(WIDTH, OUT, device=self.device)
        for style, options in (
            (ColwiseParallel, {"output_layouts": Replicate()}),
            (ColwiseParallel, {"input_layouts": Shard(0)}),
            (ColwiseParallel, {"input_layouts": Shard(-1)}),
            (RowwiseParallel, {}),
            (RowwiseParallel, {"output_layouts": Shard(0)}),
        ):
            where = f"{style.__name__} with {options}"
            is_rows = style is RowwiseParallel
            model = parallelize_module(copy.deepcopy(reference), mesh, style(**options))
            model.register_forward_pre_hook(lambda _, inputs: prepared.extend(inputs))
            source = options.get("input_layouts", Shard(0) if is_rows else Replicate())
            target = Replicate() if is_rows else Shard(0)
            found = model(self._part(x, source))
            target = options.get("output_layouts", target)
            is_running = isinstance(found, AsyncCollectiveTensor)
            self.assertEqual(is_running, is_rows or target == Replicate(), where)
            is_running = isinstance(prepared.pop()._local_tensor, AsyncCollectiveTensor)
            moves = not is_rows and source != Replicate()
            self.assertEqual(is_running, moves, where)
            self.assertEqual(found, self._part(reference(x), target), where)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_prepared_inputs_and_outputs(self):
        """A module gets and gives the given layouts, by position or by name; what has
        no layout passes as it is.
        """
        mesh, whole = world_mesh(2), self._values(FIRST, 6)
        rows, columns, all_ = Shard(0), Shard(1), Replicate()

        class Module(nn.Module):
            def forward(self, x, other, *, key):
                test.assertEqual(other, "as it is")
                for each in (x, key):
                    is_local = not isinstance(each, DTensor)
                    test.assertEqual(is_local, use_local)
                    each = each if is_local else each.to_local()
                    test.assertEqual(each, test._part(whole, columns), "prepared")
                return x, key

        test = self
        for use_local, gives_local in itertools.product((False, True), (None, False)):
            inputs = {
                "input_layouts": (rows, None),
                "desired_input_layouts": (columns, None),
                "input_kwarg_layouts": {"key": all_},
                "desired_input_kwarg_layouts": {"key": columns},
            }
            outputs = {
                "output_layouts": (columns, columns),
                "desired_output_layouts": (rows, all_),
            }
            if gives_local is not None:
                outputs["use_local_output"] = gives_local
            both = PrepareModuleInputOutput(
                **inputs, use_local_input=use_local, **outputs
            )
            prepared = parallelize_module(Module(), mesh, both)
            one = parallelize_module(
                Module(), mesh, PrepareModuleInput(**inputs, use_local_output=use_local)
            )
            one = parallelize_module(one, mesh, PrepareModuleOutput(**outputs))
            for module in (prepared, one):
                x, key = module(self._part(whole, rows), "as it is", key=whole)
                for each, layout in ((x, rows), (key, all_)):
                    self.assertEqual(isinstance(each, DTensor), gives_local is False)
                    if gives_local is False:
                        self.assertEqual(each.placements, (layout,))
                if gives_local is False:
                    x, key = x.to_local(), key.to_local()
                self.assertEqual(x, self._part(whole, rows), "output")
                self.assertEqual(key, whole, "output")
        with self.assertRaisesRegex(ValueError, "length|same|should"):
            one(self._part(whole, rows), key=whole)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_training_of_a_block(self):
        """Norms on parts of the sequence, a feed-forward network split over ranks, and
        a loss of logits that stay split: three steps as without ranks.
        """
        mesh = world_mesh(2)

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(WIDTH)
                self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
                self.rms, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 10)

            def forward(self, x):
                x = x + self.down(torch.tanh(self.up(self.norm(x))))
                return self.head(self.rms(x))

        torch.manual_seed(0)
        reference = Block().to(self.device)
        split = Shard(1)
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=split),
            "d*n": RowwiseParallel(output_layouts=split),
            "rms": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(input_layouts=split, use_local_output=False),
        }
        model = parallelize_module(copy.deepcopy(reference), mesh, plan)
        input_reshard(model.down, mesh, 0)
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)
        ]
        for step in range(3):
            where = f"step {step}"
            x = self._values(FIRST, 4, WIDTH, seed=step)
            target = torch.arange(FIRST * 4, device=self.device) * (step + 3) % 10
            target[step] = -100
            expected = F.cross_entropy(reference(x).flatten(0, 1), target)
            expected.backward()
            with loss_parallel():
                logits = model(self._part(x, split)).flatten(0, 1)
                loss = F.cross_entropy(logits, target)
                loss.backward()
            self.assertEqual(loss.full_tensor(), expected, f"loss of {where}")
            self._check(model, reference, where)
            for each in optimizers:
                each.step()
                each.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_plans_name_modules(self):
        """By path, by pattern or as a whole; others stay as they are. Parameters have
        the values of one rank and learn if they did before."""
        mesh = world_mesh(2)

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
                self.table, self.names = nn.Embedding(4, 6), nn.Embedding(4, 6)

        columns, rows, whole = Shard(1), Shard(0), Replicate()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan |= {"table": plan["up"], "n*s": plan["down"]}
        layouts = {"up.weight": rows, "up.bias": rows, "down.weight": columns}
        layouts |= {"down.bias": whole, "table.weight": columns, "names.weight": rows}
        for prefix, chosen, rank in (
            ("0.", (0,), {}),
            ("?.", (0, 1, 2), {"src_data_rank": 1}),
            ("[12].", (1, 2), {"src_data_rank": None}),
        ):
            source = rank.get("src_data_rank", 0)
            source = self.rank if source is None else source
            models = []
            for seed in range(2):
                torch.manual_seed(seed)
                model = nn.Sequential(*(Layer() for _ in range(3))).to(self.device)
                model[0].requires_grad_(False)
                models.append(model)
            reference, model = models[source], copy.deepcopy(models[self.rank])
            full = {prefix + name: style for name, style in plan.items()}
            self.assertIs(parallelize_module(model, mesh, full, **rank), model)
            for name, parameter in model.named_parameters():
                where = f"{name} of {prefix} with {rank}"
                index, _, rest = name.partition(".")
                self.assertEqual(parameter.requires_grad, index != "0", where)
                if int(index) not in chosen:
                    self.assertNotIsInstance(parameter, DTensor, where)
                    continue
                self.assertIsInstance(parameter, nn.Parameter, where)
                self.assertEqual(parameter.placements, (layouts[rest],), where)
                expected = self._part(reference.get_parameter(name), layouts[rest])
                self.assertEqual(parameter.to_local(), expected, where)
        linear = nn.Linear(4, 6, device=self.device)
        with mesh:
            parallelize_module(linear, parallelize_plan={"": ColwiseParallel()})
        self.assertEqual(linear.weight.placements, (rows,))
        linear = nn.Linear(4, 6, device=self.device)
        with self.assertWarnsRegex(UserWarning, "No parallelize_plan is provided"):
            self.assertIs(parallelize_module(linear, mesh), linear)
        self.assertNotIsInstance(linear.weight, DTensor)
        for key, token in (("3.up", "3"), ("0.left", "left"), ("1.up.0", "0")):
            model = nn.Sequential(Layer(), Layer())
            full = {key: RowwiseParallel(), "1.up": ColwiseParallel()}
            with self.assertWarnsRegex(UserWarning, f"token '{token}' in module"):
                parallelize_module(model, mesh, full)
            cut = [isinstance(each.up.weight, DTensor) for each in model]
            self.assertEqual(cut, [False, True], key)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parts_of_a_sequence(self):
        """Inputs are parts of the sequence, or are cut into them; outputs are parts."""
        mesh, whole = world_mesh(2), self._values(FIRST, 6, WIDTH)
        factor = self._values(FIRST, 6, WIDTH, seed=1)
        for dim, use_local, source in itertools.product(
            (0, 1, None), (True, False, None), (None, Replicate(), Shard(0), Shard(1))
        ):
            where = f"{dim}, {use_local}, {source}"
            options = {"sequence_dim": dim, "use_local_output": use_local}
            given = {name: each for name, each in options.items() if each is not None}
            part = Shard(1 if dim is None else dim)
            torch.manual_seed(0)
            reference = nn.LayerNorm(WIDTH, device=self.device)
            nn.init.uniform_(reference.weight)
            model = copy.deepcopy(reference)
            with CommDebugMode() as log:
                model = parallelize_module(model, mesh, SequenceParallel(**given))
            self.assertEqual(log.get_total_counts(), 0, where)
            x, local = whole.clone().requires_grad_(), self._part(whole, source or part)
            local = local.clone().requires_grad_()
            made = DTensor.from_local(local, mesh, [source]) if source else local
            with CommDebugMode() as log:
                found = model(made)
            self.assertEqual(isinstance(found, DTensor), not use_local, where)
            if not use_local:
                self.assertEqual(found.placements, (part,), where)
            moves = isinstance(source, Shard) and source != part
            self.assertEqual(log.get_total_counts(), moves, where)
            found = found if use_local else found.to_local()
            self.assertEqual(found, self._part(reference(x), part), where)
            (found * self._part(factor, part)).sum().backward()
            (reference(x) * factor).sum().backward()
            self._check(model, reference, where)
            self.assertEqual(local.grad, self._part(x.grad, source or part), where)
        with self.assertRaisesRegex(ValueError, "expecting input of LayerNorm"):
            model([whole])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_resharded_inputs(self):
        """What a module saves for its backward is a part on each rank, and whole again
        when it is used."""
        mesh = world_mesh(2)
        for dim, layout in itertools.product(
            (0, 1, None), (None, Replicate(), Shard(1))
        ):
            where = f"{dim}, {layout}"
            x = self._values(FIRST, WIDTH)
            x = (x if layout is None else self._part(x, layout)).requires_grad_()
            given = DTensor.from_local(x, mesh, [layout]) if layout else x
            module = nn.Sigmoid()
            self.assertIs(input_reshard(module, mesh, dim), module)
            found = module(given)
            with CommDebugMode() as log:
                # A later operation keeps its input as it is.
                other = found.exp()
                (found.sum() + other.sum()).backward()
            counts = [
                n for name, n in log.get_comm_counts().items() if "gather" in f"{name}"
            ]
            if layout != Shard(1):
                self.assertEqual(counts, [] if dim is None else [1], where)
            found = found.detach()
            found = found.to_local() if layout else found
            expected = (found - found.square()) * (1 + found.exp())
            self.assertEqual(x.grad, expected, where)
        # Parts on a mesh of more dimensions stay as they are.
        large, x = world_mesh(2, 1), self._values(FIRST, WIDTH)
        made = distribute_tensor(x, large, [Shard(0), Replicate()]).requires_grad_()
        module = input_reshard(nn.Sigmoid(), mesh, 0)
        with CommDebugMode() as log:
            module(made).sum().backward()
        self.assertEqual(log.get_total_counts(), 0)
        expected = x.sigmoid() - x.sigmoid().square()
        self.assertEqual(made.grad.full_tensor(), expected)
        # Less than an element a rank stays whole.
        module = input_reshard(nn.Sigmoid(), mesh, 0)
        x = torch.ones(1, device=self.device, requires_grad=True)
        with CommDebugMode() as log:
            module(x).backward()
        self.assertEqual(log.get_total_counts(), 0)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_prepared_single_values(self):
        """One layout does for one value, with or without names; gradients come back."""
        mesh, whole, rows = world_mesh(2), self._values(FIRST, 6), Shard(0)
        kinds = {"input": PrepareModuleInput, "output": PrepareModuleOutput}
        for (kind, style), use_local, gives in itertools.product(
            kinds.items(), (False, True, None), (False, True)
        ):
            where = f"{kind}, {use_local}, {gives}"
            layouts = {f"{kind}_layouts": rows, f"desired_{kind}_layouts": Shard(1)}
            if use_local is not None:
                layouts["use_local_output"] = use_local
            module = parallelize_module(nn.Identity(), mesh, style(**layouts))
            x = self._part(whole, rows).clone().requires_grad_()
            with CommDebugMode() as log:
                found = module(DTensor.from_local(x, mesh, [rows]) if gives else x)
            self.assertEqual(log.get_total_counts(), 1, where)
            is_local = kind == "output" if use_local is None else use_local
            self.assertEqual(isinstance(found, DTensor), not is_local, where)
            if not is_local:
                self.assertEqual(found.placements, (Shard(1),), where)
                found = found.to_local()
            self.assertEqual(found, self._part(whole, Shard(1)), where)
            (found * 3).sum().backward()
            self.assertEqual(x.grad, torch.full_like(x, 3), where)
        by_name = PrepareModuleInput(
            input_kwarg_layouts={"input": rows},
            desired_input_kwarg_layouts={"input": Replicate()},
        )
        module = parallelize_module(nn.Identity(), mesh, by_name)
        found = module(input=self._part(whole, rows))
        self.assertEqual(found.to_local(), whole)
        with self.assertRaisesRegex(AssertionError, "expecting input to be a torch.T"):
            module(input=[whole])
        pair, same = (rows, rows), "should have same length"
        given, wanted = {"input_layouts": rows}, {"desired_input_layouts": pair}
        outputs = {"output_layouts": pair, "desired_output_layouts": pair}
        for text, style, options in (
            ("should not be None", PrepareModuleInput, given),
            (same, PrepareModuleInput, given | wanted),
            (same, PrepareModuleInput, {"input_kwarg_layouts": {"x": rows}}),
            (same, PrepareModuleOutput, outputs | {"desired_output_layouts": rows}),
        ):
            with self.assertRaisesRegex(AssertionError, text):
                style(**options)
        for style, options in (
            (PrepareModuleInput, {"input_layouts": pair} | wanted),
            (PrepareModuleOutput, outputs),
        ):
            module = parallelize_module(nn.Identity(), mesh, style(**options))
            with self.assertRaisesRegex(ValueError, same):
                module(whole)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_plans_that_cannot_work_are_refused(self):
        mesh = world_mesh(2)
        for style, module in (
            (ColwiseParallel(), nn.LayerNorm(4)),
            (RowwiseParallel(), nn.LayerNorm(4)),
        ):
            with self.assertRaisesRegex(NotImplementedError, "nn.Linear and nn.Embed"):
                parallelize_module(module, mesh, style)
        with self.assertRaisesRegex(TypeError, "for parallelize_plan"):
            parallelize_module(nn.Linear(2, 2), mesh, ["up"])
        with self.assertWarnsRegex(UserWarning, "could not be resolved"):
            parallelize_module(nn.Linear(2, 2), mesh, {"none": ColwiseParallel()})


if __name__ == "__main__":
    run_tests()
