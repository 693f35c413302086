# Owner(s): ["oncall: distributed"]
"""Models that are traced and cut into stages: together the stages compute, hold and
learn what the whole model does.
"""

import collections
import contextlib
import copy
import io
import itertools
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.pipelining import SplitPoint, pipe_split, pipeline
from torch.distributed.pipelining._IR import (
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PipeSequential,
    TrivialLossWrapper,
    _find_loss_from_output_and_spec,
    _find_loss_output,
    _modify_graph_op_device,
)

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WIDTH = 4


class Blocks(nn.Module):
    """Three layers and what makes cutting hard: a value that skips a stage, a weight
    that two stages use, buffers that are saved and not, a weight of the root.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)

    def forward(self, x, factor=None, *, bias):
        first = torch.tanh(self.layers[0](x + bias)) @ self.shared
        pipe_split()
        y = self.layers[1](first) * self.scale + self.shift
        pipe_split()
        y = torch.tanh(self.layers[2](y) @ self.shared) + self.hidden + first
        return y * torch.full((WIDTH,), 0.5, device=y.device)


class WithLoss(nn.Module):
    """Hands on two tensors, and one past a stage; ``order`` names its outputs."""

    def __init__(self, order) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order = order

    def forward(self, x, target):
        first, second = torch.tanh(self.layers[0](x)), x * self.layers[0].bias
        pipe_split()
        y = self.layers[1](first) * second
        pipe_split()
        y = self.layers[2](y) + first
        found = {"output": y, "loss": (y - target).square().mean()}
        return tuple(found[name] for name in self.order)


def first_of(output):
    """Return the tensor that a traced module hands on, alone or in a sequence."""
    return output if isinstance(output, torch.Tensor) else output[0]


class PipeTests(TestCase):
    def _inputs(self):
        torch.manual_seed(1)
        return torch.randn(2, 3, WIDTH).unbind()

    def test_stages_compute_and_hold_the_model(self):
        model, (x, bias) = Blocks(), self._inputs()
        pipe = pipeline(model, (x,), {"bias": bias})
        for one, other in ((x, bias), (bias, x)):
            whole = model(one, bias=other)
            self.assertEqual(first_of(pipe(one, bias=other)), whole)
        stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
        names = [
            ["layers.0.bias", "layers.0.weight", "shared"],
            ["layers.1.bias", "layers.1.weight", "scale", "shift"],
            ["hidden", "layers.2.bias", "layers.2.weight", "shared"],
        ]
        buffers, parameters = (
            dict(x) for x in (model.named_buffers(), model.named_parameters())
        )
        for stage, wanted in zip(stages, names, strict=True):
            found = dict(stage.named_buffers()), dict(stage.named_parameters())
            held = [{n: x[n] for n in wanted if n in x} for x in (buffers, parameters)]
            self.assertEqual([*found], held)
        places = [dict.fromkeys(("submod_pp_0", "submod_pp_2"), "shared")]
        self.assertEqual(pipe.replicated_params, places, "parameters of two stages")
        self.assertIsNot(stages[0].shared, stages[2].shared)
        # The shares of a weight's gradient that stages have add up to the whole.
        whole.square().sum().backward()
        first = first_of(stages[0](bias, bias=x))
        last = first_of(stages[2](first_of(stages[1](first)), first))
        self.assertEqual(last, whole, "one stage after another")
        last.square().sum().backward()
        sums = collections.Counter()
        for name, each in itertools.chain(
            *(each.named_parameters() for each in stages)
        ):
            sums[name] = sums[name] + each.grad
        grads = {name: each.grad for name, each in parameters.items() if name in sums}
        self.assertEqual(dict(sums), grads)
        for wrong in (-1, 3):
            with self.assertRaisesRegex(ValueError, f"Invalid stage index {wrong}"):
                pipe.get_stage_module(wrong)
        with self.assertRaisesRegex(RuntimeError, "invoke the Pipe object"):
            pipe.split_gm(x)
        self.assertIn("submod_pp_1", str(pipe))

    def _with_loss(self, model, args, spec):
        program = torch.export.export(model, args)
        replicate = MultiUseParameterConfig.REPLICATE
        return Pipe._from_traced(model, program, replicate, output_loss_value_spec=spec)

    def test_pipe_with_its_loss_computes_gradients(self):
        """Stage by stage, from the last to the first, also past a stage."""
        args = self._inputs()
        for order in (("loss", "output"), ("output", "loss")):
            model = WithLoss(order)
            spec = tuple(name == "loss" for name in order)
            pipe = self._with_loss(copy.deepcopy(model), args, spec)
            self.assertTrue(pipe.has_loss_and_backward)
            self.assertEqual((pipe.loss_spec, pipe.num_stages), (spec, 3))
            for _ in range(2):
                expected = model(*args)
                expected[order.index("loss")].backward()
                self.assertEqual(tuple(pipe(*args)), expected, order)
                grads = dict(model.named_parameters())
                for index, stage in enumerate(
                    pipe.get_stage_module(index) for index in range(3)
                ):
                    for name, each in stage.named_parameters():
                        what = f"{name} of stage {index}, {order}"
                        self.assertEqual(each.grad, grads[name].grad, what)
        with self.assertRaisesRegex(RuntimeError, "Did not find loss value in"):
            self._with_loss(WithLoss(("loss",)), args, (False,))
        plain = self._with_loss(WithLoss(("loss",)), args, None)
        self.assertEqual((plain.has_loss_and_backward, plain.loss_spec), (False, None))

    def test_losses_are_found_as_specified(self):
        graph = torch.fx.Graph()
        x, loss = graph.placeholder("x"), graph.placeholder("loss")
        for output, spec in (
            (loss, True),
            ((x, loss), (False, True)),
            ([x, {"a": x, "b": (loss,)}], [False, {"a": False, "b": (True,)}]),
        ):
            self.assertIs(_find_loss_from_output_and_spec(output, spec), loss)
        self.assertIsNone(_find_loss_from_output_and_spec(loss, False))
        for output, spec, text in (
            (3, True, "must specify a dynamic value but got 3"),
            (loss, (True,), "must match type of"),
            ((x, loss), (True,), "must match length of"),
            ((x,), (False,), "Did not find loss value"),
            ([loss], {"a": True}, "must match type of"),
            ({"b": loss}, {"a": True}, "must match keys of"),
            ({"a": loss}, {"a": False}, "Did not find loss value"),
            (loss, "loss", "Unsupported type .*str"),
        ):
            with self.assertRaisesRegex(RuntimeError, text):
                _find_loss_from_output_and_spec(output, spec)
        with self.assertRaisesRegex(AssertionError, "1 output node, got 0"):
            _find_loss_output(nn.Identity(), graph, None)
        node = graph.output({"loss": loss, "x": x})
        named = {"loss": True, "x": False}
        for mod, spec, expected in (
            (nn.Identity(), None, (loss, node, named)),
            (nn.Identity(), named, (loss, node, named)),
            (TrivialLossWrapper(None, None), None, (node.args[0], node, True)),
        ):
            self.assertEqual(_find_loss_output(mod, graph, spec), expected)
        graph.erase_node(node)
        node = graph.output((loss,))
        found = _find_loss_output(nn.Identity(), graph, None)
        self.assertEqual(found, (None, node, None))
        (value, target), layer = self._inputs(), nn.Linear(WIDTH, WIDTH)
        wrapped = TrivialLossWrapper(layer, nn.functional.mse_loss)
        expected = nn.functional.mse_loss(layer(value), target)
        self.assertEqual(wrapped(value, target), expected)
        with self.assertRaisesRegex(NotImplementedError, "an overridden"):
            LossWrapper(layer, None)(value)

    def test_pipe_is_shown_and_sent(self):
        model, (x, bias) = Blocks(), self._inputs()
        pipe = pipeline(model, (x,), {"bias": bias})
        info = pipe.info()
        self.assertIs(info.graph, pipe.split_gm.graph)
        found = info.num_stages, info.has_loss_and_backward
        self.assertEqual(found, (3, False))
        self.assertEqual(repr(pipe), repr(pipe.split_gm))
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            pipe.print_readable()
        self.assertRegex(shown.getvalue(), "class submod_pp_2|submod_pp_2 = ")
        first = first_of(pipe.get_stage_module(0)(x, bias=bias))
        stage = pipe.get_stage_module(1)
        make, arguments = stage.__reduce__()
        self.assertEqual(first_of(make(*arguments)(first)), first_of(stage(first)))
        # Constants are made on the device of the stage.
        last, device = pipe.get_stage_module(2), torch.device("meta")
        _modify_graph_op_device(last, device)
        nodes = [
            node
            for module in last.modules()
            for node in getattr(getattr(module, "graph", None), "nodes", ())
        ]
        devices = [n.kwargs["device"] for n in nodes if "device" in n.kwargs]
        self.assertEqual(set(devices), {device})
        last.to(device)
        self.assertEqual(
            first_of(last(first.to(device), first.to(device))).device, device
        )

    def test_models_that_cannot_be_traced_are_refused(self):
        class Branches(nn.Module):
            def forward(self, x):
                return x + 1 if x.sum() > 0 else x

        with self.assertRaisesRegex(RuntimeError, "cannot capture your model"):
            pipeline(Branches(), self._inputs()[:1])

    def test_splits_in_a_row_and_steps_without_gradient(self):
        """Modules are called at their splits as they were before."""

        class Fails(nn.Linear):
            def forward(self, x):
                raise ValueError("in the model")

        x = self._inputs()[0]
        pipe = pipeline(
            model := nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            (x,),
            split_spec={"0": SplitPoint.END},
        )
        self.assertEqual(model(x), torch.relu(model[0]._orig_forward(x)))
        self.assertEqual(pipe.num_stages, 2)
        for point in SplitPoint:
            failing = Fails(WIDTH, WIDTH)
            with self.assertRaises(RuntimeError):
                pipeline(nn.Sequential(failing), (x,), split_spec={"0": point})
            with self.assertRaisesRegex(ValueError, "in the model"):
                failing(x)

    def test_one_weight_of_two_modules(self):
        """Each stage has it under the name that its module gives it."""

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(WIDTH, WIDTH)
                self.last = nn.Linear(WIDTH, WIDTH)
                self.last.weight = self.first.weight

            def forward(self, x):
                y = torch.tanh(self.first(x))
                pipe_split()
                return self.last(y)

        model, (x, _) = Tied(), self._inputs()
        pipe = pipeline(model, (x,))
        self.assertEqual(first_of(pipe(x)), model(x))
        names = [f"{each}.weight" for each in ("first", "last")]
        places = dict(zip(("submod_pp_0", "submod_pp_1"), names, strict=True))
        self.assertEqual(pipe.replicated_params, [places])
        for index, name in enumerate(("first", "last")):
            found = pipe.get_stage_module(index).state_dict()
            # In torch 2.13 a stage may keep the other name, too.
            self.assertLessEqual({f"{name}.bias", f"{name}.weight"}, found.keys())

    def test_points_of_a_cut(self):
        """Before or after submodules, by a policy, between those of a sequence."""
        (x, _), layers = self._inputs(), [nn.Linear(WIDTH, WIDTH) for _ in range(4)]

        def made():
            inner = nn.Sequential(*copy.deepcopy(layers[1:3]))
            return nn.Sequential(
                copy.deepcopy(layers[0]), inner, copy.deepcopy(layers[3])
            )

        def policy(traced):
            *_, last = (n for n in traced.graph.nodes if n.op == "call_function")
            with traced.graph.inserting_before(last):
                traced.graph.call_function(torch.ops.pippy._pipe_split.default)
            return traced

        begin, end = SplitPoint.BEGINNING, SplitPoint.END
        cuts = (
            ({"split_spec": {"1.1": begin}}, "0 1.0|1.1 2"),
            ({"split_spec": {"1": begin, "2": begin}}, "0|1.0 1.1|2"),
            ({"split_spec": {"0": end, "1.0": end}}, "0|1.0|1.1 2"),
            ({"split_policy": policy}, "0 1.0 1.1|2"),
            ({}, "0 1.0 1.1 2"),
        )
        expected = made()(x)
        for options, names in cuts:
            pipe = pipeline(made(), (x,), **options)
            found = [
                " ".join(sorted({n.rpartition(".")[0] for n in stage.state_dict()}))
                for stage in map(pipe.get_stage_module, range(pipe.num_stages))
            ]
            self.assertEqual("|".join(found), names)
            self.assertEqual(first_of(pipe(x)), expected, names)
        pipe = pipeline(PipeSequential.from_sequential(made()), (x,))
        self.assertEqual((pipe.num_stages, first_of(pipe(x))), (3, expected))
        both = {"split_spec": {"1.1": begin}, "split_policy": policy}
        for options, kind, text in (
            (both, ValueError, "only one"),
            ({"split_spec": {"7.1": begin}}, AttributeError, "nonexistent module 7"),
            ({"split_spec": {"1": "middle"}}, ValueError, "Unknown split point"),
        ):
            with self.assertRaisesRegex(kind, text):
                pipeline(made(), (x,), **options)


if __name__ == "__main__":
    run_tests()
