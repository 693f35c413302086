# Owner(s): ["oncall: distributed"]
"""DistributedDataParallel with parameters that a step does not use, graphs that never
change, and low precision.

Two ranks add two numbers in one order and halving is exact, so gradients equal the
reference's bit by bit.
"""

import contextlib
import dataclasses
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    CollectiveLog,
    DDPTest,
    check_races,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Branches(nn.Module):
    """Two linear layers of which forward uses those that ``use`` names, and a third
    that it never uses.
    """

    def __init__(self, device, form="tensor"):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.never = (nn.Linear(4, 4) for _ in range(3))
        self.use, self.form = ("one", "two"), form
        self.to(device)

    def forward(self, x):
        for name in self.use:
            x = getattr(self, name)(x)
        return FORMS[self.form](x)


@dataclasses.dataclass
class Output:
    rows: torch.Tensor
    note: str = ""


FORMS = {
    "tensor": lambda x: x,
    "list": lambda x: [1, x],
    "tuple": lambda x: (None, (x,)),
    "dict": lambda x: {"rows": x, "note": "a string"},
    "dataclass": lambda x: Output(x),
}


def rows_of(output):
    """Return the one tensor that an output of any form of ``FORMS`` contains."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Output):
        return output.rows
    if isinstance(output, dict):
        return output["rows"]
    return output[1][0] if isinstance(output, tuple) else output[1]


class TestDDPUnusedParameters(DDPTest):
    def _check(self, ddp, reference, label):
        """Check against averages in which a rank that has no gradient counts as zero;
        None if no rank has one.
        """
        for name, parameter in reference.named_parameters():
            gradient = (
                torch.zeros_like(parameter)
                if parameter.grad is None
                else parameter.grad.clone()
            )
            have = torch.tensor(float(parameter.grad is not None), device=self.device)
            dist.all_reduce(gradient)
            dist.all_reduce(have)
            expected = gradient / self.world_size if have.item() else None
            found = ddp.module.get_parameter(name).grad
            self.assertEqual(
                found, expected, f"{label}: gradient of {name}", atol=0, rtol=0
            )

    @contextlib.contextmanager
    def _name_step(self, label):
        """Add the step to an error of the reducer, whose own words are the same for any
        step.
        """
        try:
            yield
        except RuntimeError as error:
            raise AssertionError(
                f"{label}: DDP misjudged the used parameters: {error}"
            ) from error

    def _steps(self, ddp, reference, uses):
        for step, use in enumerate(uses):
            for each in (ddp, reference):
                (ddp.module if each is ddp else each).use = use
                each.zero_grad()
                with self._name_step(
                    f"step {step} with {use} in use, output in a {reference.form}"
                ):
                    rows_of(each(self.rows(4, step))).square().sum().backward()
            self._check(ddp, reference, f"step {step}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_branch_that_only_one_rank_takes(self):
        for gradient_as_bucket_view in (False, True):
            model, reference = Branches(self.device), Branches(self.device)
            ddp = DDP(
                model,
                find_unused_parameters=True,
                gradient_as_bucket_view=gradient_as_bucket_view,
            )
            own, other = ("one", "two") if self.rank == 0 else ("two", "one")
            self._steps(ddp, reference, [("one",), (own,), (other, own), (other,)])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_outputs_of_every_form(self):
        """Tensors are found within lists, tuples, dictionaries and dataclasses."""
        self.run_subtests({"form": list(FORMS)}, self._test_outputs_of_every_form)

    def _test_outputs_of_every_form(self, form):
        model, reference = Branches(self.device, form), Branches(self.device, form)
        self._steps(
            DDP(model, find_unused_parameters=True),
            reference,
            [("one",), ("one", "two")],
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradient_of_an_unused_parameter_is_kept(self):
        """DDP leaves the gradient of a parameter that no rank uses unchanged."""
        model = Branches(self.device)
        ddp = DDP(model, find_unused_parameters=True)
        model.never.weight.grad = torch.full_like(model.never.weight, 3.0 + self.rank)
        ddp(self.rows(4)).sum().backward()
        self.assertEqual(
            model.never.weight.grad,
            torch.full((4, 4), 3.0 + self.rank),
            "gradient of never",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_output_that_the_loss_ignores(self):
        class Two(Branches):
            def forward(self, x):
                return self.one(x), self.two(x)

        model, reference = Two(self.device), Two(self.device)
        ddp = DDP(model, find_unused_parameters=True)
        for step in range(2):
            for each in (ddp, reference):
                each.zero_grad()
                each(self.rows(4, step))[0].square().sum().backward()
            self._check(ddp, reference, f"step {step}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unused_parameters_that_nobody_looks_for_are_an_error(self):
        """The error names the parameters by index, and tells what to do."""
        ddp = DDP(Branches(self.device))
        ddp(self.rows(4)).sum().backward()
        expected = (
            r"(?s)Expected to have finished reduction in the prior "
            r"iteration.*find_unused_parameters=True"
            rf".*did not receive grad for rank {self.rank}: 4 5"
        )
        with self.assertRaisesRegex(RuntimeError, expected):
            ddp(self.rows(4))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_static_graph_finds_unused_parameters_once(self):
        """DDP reduces at the end of the first backwards, and as soon as a bucket is
        complete once it knows the order.
        """
        model, reference = Branches(self.device), Branches(self.device)
        ddp = DDP(model, static_graph=True, bucket_cap_mb=1e-5)
        computed = []
        for step in range(3):
            computed.clear()
            for each in (ddp, reference):
                each.zero_grad()
            log = CollectiveLog()
            hooked = model.one.weight.register_hook(
                lambda _, log=log: computed.append(
                    [call.name for call in log.calls].count("all-reduce")
                )
            )
            with log, self._name_step(f"step {step}"):
                ddp(self.rows(4, step)).square().sum().backward()
            hooked.remove()
            reference(self.rows(4, step)).square().sum().backward()
            self._check(ddp, reference, f"step {step}")
            early = "buckets reduced before the first layer's gradient comes"
            self.assertEqual(computed[0] > 0, step > 1, f"step {step}: {early}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_static_graph_with_a_module_that_runs_twice(self):
        from torch.utils.checkpoint import checkpoint

        class Twice(Branches):
            def forward(self, x):
                for _ in range(2):
                    x = checkpoint(self.one, x, use_reentrant=False)
                return self.two(x)

        model, reference = Twice(self.device), Twice(self.device)
        ddp = DDP(model, static_graph=True)
        for step in range(3):
            for each in (ddp, reference):
                each.zero_grad()
                each(self.rows(4, step)).square().sum().backward()
            self._check(ddp, reference, f"step {step}")


class Typed(nn.Module):
    """A linear layer with a buffer, and the types that it saw."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))
        self.seen = {}

    def forward(self, x):
        self.seen = {
            "x": x.dtype,
            "weight": self.layer.weight.dtype,
            "buffer": self.offset.dtype,
        }
        return self.layer(x)


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


class TestDDPMixedPrecision(DDPTest):
    def _model(self):
        torch.manual_seed(0)
        return nn.Sequential(Typed(), Typed()).to(self.device)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_compute_in_low_precision(self):
        """Forward and backward in one type, the reduction in another; parameters,
        gradients, optimizer in full.

        Values of the first step are not compared:
        docs/findings/ddp_mixed_precision_first_step.md.
        """
        skip_without_accelerator("DDP's mixed precision makes streams")
        self.run_subtests(
            {"types": [(BRAIN, FULL), (HALF, HALF)]},
            self._test_compute_in_low_precision,
        )

    def _test_compute_in_low_precision(self, types):
        param_dtype, reduce_dtype = types
        precision = _MixedPrecision(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=param_dtype
        )
        model, reference = self._model(), self._model()
        ddp = DDP(model, mixed_precision=precision)
        for step in range(3):
            ddp.zero_grad()
            with CollectiveLog() as log:
                ddp(self.rows(4, step)).sum().backward()
            reduced = {call.dtype for call in log.calls if call.name == "all-reduce"}
            self.assertEqual(reduced, {reduce_dtype}, "types that are reduced")
            seen = dict.fromkeys(("x", "weight", "buffer"), param_dtype)
            self.assertEqual(
                [each.seen for each in model], [seen] * 2, "types in forward"
            )
            after = {(each.dtype, each.grad.dtype) for each in model.parameters()}
            self.assertEqual(
                after,
                {(FULL, FULL)},
                "types of parameters after backward, and of gradients",
            )
            if not step:
                continue
            computing = self._model().to(param_dtype)
            computing(self.rows(4, step).to(param_dtype)).sum().backward()
            for name, each in computing.named_parameters():
                gradient = each.grad.to(reduce_dtype)
                dist.all_reduce(gradient)
                expected = (gradient / self.world_size).to(FULL)
                found = model.get_parameter(name).grad
                self.assertEqual(
                    found, expected, f"gradient of {name}, step {step}", atol=0, rtol=0
                )
        self.assertEqual(
            list(model.parameters()),
            list(reference.parameters()),
            "parameters",
            atol=0,
            rtol=0,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inputs_are_moved_and_cast(self):
        """From the host, also by keyword. Frozen parameters compute in low precision,
        and have their full one again after backward.
        """
        skip_without_accelerator("DDP's mixed precision makes streams")
        index = self.rank % torch.accelerator.device_count()
        for ids in ([index], None):
            torch.manual_seed(0)
            model = Typed()
            model.layer.bias.requires_grad_(False)
            model.ignored = nn.Parameter(torch.ones(2), requires_grad=False)
            model.to(self.device)
            before = [each.detach().clone() for each in model.parameters()]
            DDP._set_params_and_buffers_to_ignore_for_model(model, ["ignored"])
            precision = _MixedPrecision(BRAIN, FULL, BRAIN)
            ddp = DDP(model, device_ids=ids, mixed_precision=precision)
            for step in range(3):
                ddp.zero_grad()
                rows = self.rows(4, step)
                rows = rows.cpu() if ids else rows
                output = ddp(x=rows) if step == 1 else ddp(rows)
                output.sum().backward()
                seen = dict.fromkeys(("x", "weight", "buffer"), BRAIN)
                self.assertEqual(model.seen, seen, f"types in forward, {step}, {ids}")
                after = [each.detach() for each in model.parameters()]
                self.assertEqual(after, before, f"parameters, {step}, {ids}")
                self.assertIsNone(model.layer.bias.grad, "gradient of the frozen one")
                if step:  # docs/findings/ddp_mixed_precision_first_step.md
                    expected = self.rows(4, step).to(BRAIN).sum(0).to(FULL)
                    dist.all_reduce(expected)
                    expected = (expected / self.world_size).expand(4, 4)
                    found = model.layer.weight.grad
                    self.assertEqual(found, expected, f"{step}", atol=0.05, rtol=0.02)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_low_precision_copies_take_memory_only_in_use(self):
        """Before forward a parameter's copy has no memory. Ignored parameters have no
        copy, and keep their type.
        """
        skip_without_accelerator("DDP's mixed precision makes streams")
        model = self._model()
        names = ["1.layer.weight", "1.layer.bias", "1.offset"]
        ignored = [model[1].layer.weight, model[1].layer.bias, model[1].offset]
        DDP._set_params_and_buffers_to_ignore_for_model(model, names)
        DDP(
            model,
            mixed_precision=_MixedPrecision(
                param_dtype=HALF, reduce_dtype=FULL, buffer_dtype=HALF
            ),
        )
        copies = {
            name: each._mp_param
            for name, each in model.named_parameters()
            if hasattr(each, "_mp_param")
        }
        self.assertEqual(
            list(copies), ["0.layer.weight", "0.layer.bias"], "parameters with a copy"
        )
        sizes = [copy.untyped_storage().size() for copy in copies.values()]
        self.assertEqual(sizes, [0, 0], "bytes of copies before forward")
        self.assertEqual(
            [each.dtype for each in ignored], [FULL] * 3, "types of ignored parameters"
        )
        self.assertEqual(model[0].offset.dtype, HALF, "type of the other buffer")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_streams_wait_for_low_precision(self):
        """Low-precision copies and casts of gradients run on separate streams, for
        which others wait.
        """
        skip_without_accelerator("the host has no streams")
        ddp = DDP(
            self._model(),
            mixed_precision=_MixedPrecision(param_dtype=HALF, reduce_dtype=FULL),
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with check_races():
            for step in range(3):
                # DDP does not do so itself, and may copy parameters that the optimizer
                # has not written: docs/races.md.
                ddp._mp_stream.wait_stream(torch.accelerator.current_stream())
                ddp(self.rows(4, step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    run_tests()
