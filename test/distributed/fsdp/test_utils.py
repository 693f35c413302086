# Owner(s): ["oncall: distributed"]
"""Helpers of FSDP1 that walk containers, rename entries and find modules."""

import dataclasses
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp._common_utils import (
    _apply_to_modules,
    _FSDPDeviceHandle,
    _get_param_to_fqns,
    _get_root_modules,
    _is_namedtuple,
    _named_parameters_with_duplicates,
    _UninitializedDeviceHandle,
    clean_tensor_name,
    collect_grad_tensors,
    replace_grad_tensors,
)
from torch.distributed.fsdp._debug_utils import SimpleProfiler
from torch.distributed.fsdp._limiter_utils import _FreeEventQueue
from torch.distributed.utils import _replace_by_prefix

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = None


@dataclasses.dataclass(init=False)
class Closed:
    """Cannot be replaced, because its constructor takes no fields."""

    held: Any

    def __init__(self) -> None:
        self.held = grad(1.0)


class Own(list):
    """A list that cannot be made from a list."""

    def __init__(self, *items: Any) -> None:
        if len(items) == 1 and isinstance(items[0], list):
            raise TypeError
        super().__init__(items)


class OwnTuple(tuple):
    """Likewise, a tuple."""

    def __new__(cls, *items: Any) -> "OwnTuple":
        if len(items) == 1 and isinstance(items[0], list):
            raise TypeError
        return super().__new__(cls, items)


def grad(value: float) -> torch.Tensor:
    return torch.tensor([value], requires_grad=True)


class TestGradTensors(TestCase):
    def test_order_and_types(self):
        """Tensors that require grad are found in order and replaced in that order, in
        every kind of container, whose type is kept. All else is left as it is.
        """
        plain, kept = torch.zeros(1), {torch.ones(1, requires_grad=True)}
        output = {
            "one": [grad(1.0), plain, (grad(2.0), "text", None)],
            "two": Pair(grad(3.0), [3]),
            "three": Record(OrderedDict(a=grad(4.0)), Record),
            "set": kept,
            "four": grad(5.0),
        }
        found = collect_grad_tensors(output)
        self.assertEqual([each.item() for each in found], [1.0, 2.0, 3.0, 4.0, 5.0])
        for each in found:
            self.assertTrue(each.requires_grad)
        changed = replace_grad_tensors(output, iter([10 * each for each in found]))
        ten = [each.item() for each in collect_grad_tensors(changed)]
        self.assertEqual(ten, [10.0, 20.0, 30.0, 40.0, 50.0])
        for path in (
            lambda output: output,
            lambda output: output["one"],
            lambda output: output["one"][2],
            lambda output: output["two"],
            lambda output: output["three"],
            lambda output: output["three"].first,
        ):
            self.assertIs(type(path(changed)), type(path(output)))
            self.assertIsNot(path(changed), path(output))
        self.assertIs(changed["one"][1], plain)
        self.assertEqual(changed["one"][2][1:], ("text", None))
        self.assertEqual(changed["two"].second, [3])
        self.assertIs(changed["three"].second, Record)
        self.assertIs(changed["set"], kept)
        self.assertEqual(output["four"].item(), 5.0, "the given output")

    def test_what_has_no_gradient_is_the_same_object(self):
        plain = torch.zeros(1)
        for output in (plain, [plain], (plain,), {"a": plain}, Pair(1, plain), 3):
            self.assertEqual(collect_grad_tensors(output), ())
            self.assertIs(replace_grad_tensors(output, iter(())), output)
        record = Record(plain)
        self.assertIs(replace_grad_tensors(record, iter(())), record)

    def test_types_that_cannot_be_made_anew(self):
        self.assertEqual(replace_grad_tensors(Own(grad(1.0)), iter([3])), [3])
        self.assertEqual(replace_grad_tensors(OwnTuple(grad(1.0)), iter([3])), (3,))
        with self.assertRaisesRegex(TypeError, "reconstruct dataclass Closed.*replace"):
            replace_grad_tensors(Closed(), iter([grad(2.0)]))

    def test_refusals(self):
        with self.assertRaisesRegex(
            RuntimeError, "2 replacement tensors were not con.*"
        ):
            replace_grad_tensors(
                [grad(1.0)], iter([grad(each) for each in (1.0, 2.0, 3.0)])
            )
        for make in (list, lambda each: Pair(each[0], 1), lambda each: {"a": each[0]}):
            endless: list[Any] = [None]
            endless[0] = make([endless])
            for call in (
                collect_grad_tensors,
                lambda output: replace_grad_tensors(output, iter(())),
            ):
                with self.assertRaisesRegex(RuntimeError, r"max depth \(128\)"):
                    call(endless)
        deep: Any = grad(1.0)
        for _ in range(127):
            deep = [deep]
        self.assertEqual(len(collect_grad_tensors(deep)), 1, "127 lists in each other")
        with self.assertRaisesRegex(RuntimeError, "max depth"):
            collect_grad_tensors([deep])
        with self.assertRaisesRegex(RuntimeError, "max depth"):
            replace_grad_tensors([deep], iter([grad(1.0)]))

    def test_is_namedtuple(self):
        found = [_is_namedtuple(each) for each in (Pair(1, 2), (1, 2), Pair, [1], 3)]
        self.assertEqual(found, [True, False, False, False, False])


class Listing(nn.Module):
    """Its ``named_parameters`` knows no ``remove_duplicate``."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(1))

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        if not remove_duplicate:
            raise AssertionError("not supported")
        return super().named_parameters(prefix, recurse)


class TestUtils(TestCase):
    def test_replace_by_prefix(self):
        state = {
            "layer.a": torch.tensor(1),
            "abc.layer.def": torch.tensor(2),
            "layer.b": torch.tensor(3),
        }
        original = dict(state)
        _replace_by_prefix(state, "layer.", "module.layer.")
        self.assertEqual(
            state,
            {
                "module.layer.a": original["layer.a"],
                "abc.layer.def": original["abc.layer.def"],
                "module.layer.b": original["layer.b"],
            },
        )
        _replace_by_prefix(state, "module.layer.", "layer.")
        self.assertEqual(state, original)

    def test_clean_tensor_name(self):
        wrapped = "a._fsdp_wrapped_module.b._checkpoint_wrapped_module.c"
        self.assertEqual(clean_tensor_name(wrapped), "a.b.c")
        self.assertEqual(clean_tensor_name("_fsdp_wrapped_module.a"), "a")
        self.assertEqual(clean_tensor_name("a.b"), "a.b")

    def test_root_modules(self):
        """Of some modules, those that no other one contains."""
        model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
        inner, layer, last = model[0], model[0][0], model[1]
        for given, roots in (
            ({model, inner, layer, last}, {model}),
            ({inner, layer, last}, {inner, last}),
            ({layer, last}, {layer, last}),
            (set(), set()),
        ):
            self.assertEqual(_get_root_modules(given), roots)

    def test_named_parameters_with_duplicates(self):
        layer = nn.Linear(1, 1, bias=False)
        shared = nn.Sequential(layer, nn.Sequential(layer))
        self.assertEqual(
            [name for name, _ in _named_parameters_with_duplicates(shared)],
            ["0.weight", "1.0.weight"],
        )
        found = _named_parameters_with_duplicates(Listing(), recurse=False)
        self.assertEqual([name for name, _ in found], ["own"])
        with self.assertRaisesRegex(AssertionError, "remove_duplicate"):
            _named_parameters_with_duplicates(shared, remove_duplicate=True)

    def test_names_of_parameters(self):
        """Each parameter has the name of its first place, or those of all places."""
        layer = nn.Linear(1, 1)
        shared = nn.Sequential(layer, nn.Sequential(layer))
        weight, bias = layer.parameters()
        first = {weight: ["0.weight"], bias: ["0.bias"]}
        self.assertEqual(_get_param_to_fqns(shared), first)
        every = {weight: ["0.weight", "1.0.weight"], bias: ["0.bias", "1.0.bias"]}
        found = _get_param_to_fqns(shared, dedup_shared_params=False)
        self.assertEqual(found, every)

    def test_device_handle(self):
        """It has the attributes of the device's module, and errors name the device."""
        host = torch.empty(0).device
        module, handle = torch.get_device_module(host), _FSDPDeviceHandle(host)
        self.assertEqual(handle.current_device(), module.current_device())
        name = host.type
        with self.assertRaisesRegex(
            AttributeError, f"backend '{name}' not implement 'torch.{name}.missing'"
        ):
            _ = handle.missing
        with self.assertRaisesRegex(AttributeError, "'meta' does not have a corresp"):
            _FSDPDeviceHandle(torch.device("meta"))
        self.assertIs(_FSDPDeviceHandle(host, backend=nn).Linear, nn.Linear)
        self.assertIsInstance(_FSDPDeviceHandle.from_device(host), _FSDPDeviceHandle)
        with self.assertRaisesRegex(RuntimeError, "an uninitialized device handle"):
            _ = _UninitializedDeviceHandle().Stream

    def test_apply_to_modules(self):
        """Modules are visited before those below them, with their prefix, their depth
        and the given arguments.
        """
        model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
        seen: list[Any] = []

        def note(module: nn.Module, prefix: str, depth: int, seen: list[Any]) -> None:
            seen.append((type(module).__name__, prefix, depth))

        for names in (None, [name for name, _ in model.named_parameters()]):
            seen.clear()
            last = _apply_to_modules(model, note, lambda seen: seen[-1], names, seen)
            self.assertEqual(
                seen,
                [
                    ("Sequential", "", 0),
                    ("Sequential", "0.", 1),
                    ("Linear", "0.0.", 2),
                    ("Linear", "1.", 1),
                ],
            )
            self.assertEqual(last, seen[-1])
        for name in ("_fsdp_wrapped_module", "_dmp_wrapped_module", "module"):
            outer = nn.ModuleDict({name: model, "other": nn.Linear(1, 1)})
            seen.clear()
            _apply_to_modules(outer, note, lambda seen: None, ["0.0.a", "1.a"], seen)
            self.assertEqual(
                [prefix for _, prefix, _ in seen],
                ["", "", "0.", "0.0.", "1.", "other."],
                f"prefixes below {name}, which names of parameters leave out",
            )

    def test_free_event_queue(self):
        """The third all-gather waits for the first one's memory to be freed, and so
        on: at most two are in flight.
        """
        queue = _FreeEventQueue()
        taken = []
        for number in range(5):
            taken.append(queue.dequeue_if_needed())
            queue.enqueue(number)
        self.assertEqual(taken, [None, None, 0, 1, 2])

    def test_simple_profiler(self):
        SimpleProfiler.reset()
        for _ in range(2):
            with SimpleProfiler.profile("one"), SimpleProfiler.profile("two"):
                pass
        once = dict(SimpleProfiler.results)
        self.assertEqual([*once], ["two", "one"])
        self.assertTrue(0 < once["two"] <= once["one"] < 60)
        with self.assertRaises(KeyError), SimpleProfiler.profile("one"):
            with (
                self.assertRaisesRegex(AssertionError, "one is already being profiled"),
                SimpleProfiler.profile("one"),
            ):
                pass
            raise KeyError
        self.assertGreater(SimpleProfiler.results["one"], once["one"])
        with SimpleProfiler.profile("one"):
            SimpleProfiler.profiling.add("left")
        SimpleProfiler.reset()
        self.assertEqual([*SimpleProfiler.results, *SimpleProfiler.profiling], [])


if __name__ == "__main__":
    run_tests()
