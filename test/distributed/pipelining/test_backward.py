# Owner(s): ["oncall: distributed"]
"""The backward of a stage, whole or in two parts, against autograd's."""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.pipelining._backward import (
    _null_coalesce_accumulate,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WIDTH = 4


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return (self.last(torch.tanh(self.first(x))),)


class Shared(Chain):
    """One weight twice, the second use after the first."""

    def forward(self, x, y):
        return (self.first(torch.tanh(self.first(x * y))) + x,)


class Pairs(Chain):
    """Both outputs need both inputs."""

    def forward(self, x, y):
        z = torch.tanh(self.first(x)) + y
        return z, self.last(y) * x + z


class Aside(Chain):
    """Weights that meet the input after operations among themselves, one alone."""

    def forward(self, x, y):
        aside = torch.exp(self.first.bias) * self.last.weight[0]
        return x @ self.first.weight + aside, y * self.last.bias


class Frozen(Chain):
    """A weight without gradient, one that is not used, and an input that is not."""

    def __init__(self):
        super().__init__()
        self.first.weight.requires_grad_(False)

    def forward(self, x, y):
        return (torch.sin(self.first(x)),)


class Mixed(Chain):
    """An output without gradient before one that has it."""

    def forward(self, x, y):
        return x.detach() * 2, self.first(x) * y


class StageBackwardTests(TestCase):
    def _inputs(self, step):
        torch.manual_seed(step)
        return [each.requires_grad_() for each in torch.randn(2, 3, WIDTH).unbind()]

    def test_parts_of_a_backward_add_up(self):
        """Gradients of inputs first, those of weights later: microbatch by microbatch
        they accumulate as autograd's.
        """
        for kind in (Chain, Shared, Pairs, Aside, Frozen, Mixed):
            torch.manual_seed(0)
            module, later = kind(), []
            reference = copy.deepcopy(module)
            for step in range(3):
                where = f"{kind.__name__}, microbatch {step}"
                inputs, wanted = self._inputs(step), self._inputs(step)
                outputs = list(module(*inputs))
                grads = [torch.randn_like(each) for each in outputs]
                pairs = [
                    (value, grad)
                    for value, grad in zip(reference(*wanted), grads, strict=True)
                    if value.requires_grad
                ]
                torch.autograd.backward(*zip(*pairs, strict=True))
                values = [*inputs, torch.ones(2), "text"]
                before = [each.grad for each in module.parameters()]
                found, groups = stage_backward_input(
                    outputs, grads, values, module.parameters()
                )
                expected = [each.grad for each in wanted]
                self.assertEqual(found, (*expected, None, None), where)
                self.assertEqual([each.grad for each in inputs], expected, where)
                self.assertFalse(any(each.requires_grad for each in outputs), where)
                for each, grad in zip(module.parameters(), before, strict=True):
                    self.assertIs(each.grad, grad, f"only inputs yet, {where}")
                later.append(groups)
            for groups in later:
                found = stage_backward_weight(module.parameters(), groups)
            weights = [each.grad for each in module.parameters()]
            expected = [each.grad for each in reference.parameters()]
            self.assertEqual(weights, expected, kind.__name__)
            self.assertEqual(found, tuple(weights), "gradients of earlier microbatches")

    def test_parts_of_a_loss(self):
        """A loss has no gradients given; those of an input accumulate."""
        module = Pairs()
        reference = copy.deepcopy(module)
        (x, y), wanted = self._inputs(0), self._inputs(0)
        for _ in range(2):
            sum(map(torch.sum, reference(*wanted))).square().backward()
            loss = sum(map(torch.sum, module(x, y))).square()
            _, groups = stage_backward_input((loss,), None, [x, y], module.parameters())
            stage_backward_weight(module.parameters(), groups)
        for one, other in zip(
            [x, y, *module.parameters()],
            [*wanted, *reference.parameters()],
            strict=True,
        ):
            self.assertEqual(one.grad, other.grad)
        found, groups = stage_backward_input(
            [x.detach()], [y], [x, 1], module.parameters()
        )
        self.assertEqual((found, groups), ((None, None), []), "nothing to do")
        loss = module.first(torch.ones(WIDTH)).sum()
        found, groups = stage_backward_input(
            (loss,), None, [torch.ones(WIDTH)], module.parameters()
        )
        self.assertEqual((found, groups), ((None,), []), "no input has a gradient")

    def test_outputs_of_any_form(self):
        """Gradients have the form of the outputs; where there is none, none flows."""
        module = Chain()
        reference = copy.deepcopy(module)
        (x, y), (u, v) = self._inputs(0), self._inputs(0)
        grads = torch.randn(3, 3, WIDTH)
        for _ in range(2):
            a, b = reference.first(u) * v, reference.last(v)
            torch.autograd.backward([a, b, b * 2], list(grads))
            p, q = module.first(x) * y, module.last(y)
            output = {
                "a": p,
                "b": [q, (q * 2, None, 3), x.detach()],
                "c": [p],
                "d": {"e": p},
            }
            given = {
                "a": grads[0],
                "b": (grads[1], [grads[2], None, None], None),
                "c": None,
                "d": None,
            }
            found = stage_backward(output, given, [x, 3, y, torch.ones(1)])
            self.assertEqual(found, (u.grad, None, v.grad, None))
            self.assertEqual((x.grad, y.grad), (None, None), "released")
            u.grad = v.grad = None
            for one, other in zip(
                module.parameters(), reference.parameters(), strict=True
            ):
                self.assertEqual(one.grad, other.grad)
        x.grad = None
        p, q = module.first(x) * 2, module.last(y)
        found = stage_backward(
            [p, q], [grads[0], None], [x, y], outputs_with_grads_idxs=[0]
        )
        self.assertEqual(found, (2 * grads[0] @ module.first.weight, None))
        for one, other, total in ((None, 2, 2), (3, None, 3), (None, None, None)):
            self.assertEqual(_null_coalesce_accumulate(one, other), total)
        self.assertEqual(_null_coalesce_accumulate(x, y), x + y)

    def test_failures_show_shapes_and_types(self):
        module, (x, y) = Chain(), self._inputs(0)
        seen = r"Tensor\(torch.Size\(\[3, 4\]\), grad=True, dtype=torch.float32\)"
        for output, grads, text in (
            (lambda z: z, "text", "Expected Tensor or None gradient but got .*str"),
            (lambda z: [z], torch.ones(1), "grad_value expected to have type .*list"),
            (lambda z: (z, z), (y,), "got 2 != 1"),
            (lambda z: {"a": z}, [y], "Expected dict, got .*list"),
            (lambda z: {"a": z}, {"b": y}, "Expected keys {'a'}, got {'b'}"),
        ):
            with self.assertRaises(RuntimeError) as raised:
                stage_backward(output(module(x, y)[0]), grads, [x, 5])
            self.assertRegex(str(raised.exception.__cause__), text)
            self.assertRegex(str(raised.exception), "Failed to run stage backward:")
            self.assertRegex(str(raised.exception), rf"Stage output: .*{seen}")
            self.assertRegex(str(raised.exception), rf"Input: .*{seen}.*'5'")
        with self.assertRaises(RuntimeError) as raised:
            stage_backward_input(
                [module(x, y)[0]], [torch.ones(7)], [x], module.parameters()
            )
        self.assertRegex(str(raised.exception), "Failed to run stage backward input:")
        self.assertRegex(str(raised.exception), rf"Stage output: .*{seen}")
        self.assertRegex(str(raised.exception), r"gradient: .*\[7\]\), grad=False")
        self.assertRegex(str(raised.exception), rf"Input: .*{seen}")
        loss = module(x, y)[0].sum()
        with torch.no_grad(), self.assertRaisesRegex(RuntimeError, "no-grad context"):
            stage_backward_input([loss], None, [x], module.parameters())


if __name__ == "__main__":
    run_tests()
