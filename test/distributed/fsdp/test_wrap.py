# Owner(s): ["oncall: distributed"]
"""FSDP1's wrapping: which modules each policy wraps and with which options, and the
pair ``enable_wrap`` and ``wrap``.
"""

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _recursive_wrap,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest
from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def tree() -> nn.Sequential:
    """Return modules of 90, 78, 288 and 6 elements; two of their layers have 72."""
    return nn.Sequential(
        OrderedDict(
            pair=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)),
            list=nn.ModuleList([nn.Linear(8, 8), nn.Linear(2, 2)]),
            attention=nn.MultiheadAttention(8, 2),
            last=nn.Linear(2, 2),
        )
    )


def sizes(least: int | None = None, **options: Any) -> Callable[..., bool]:
    """Return the policy by size, with its own limit if ``least`` is None."""
    limit = {} if least is None else {"min_num_params": least}
    return partial(size_based_auto_wrap_policy, **limit, **options)


LINEARS = ["attention.out_proj", "last", "list.0", "list.1", "pair.0", "pair.1"]
# What is tried -> the policy, and the modules that it wraps below the root.
POLICIES = {
    "size 72": (sizes(72), ["list.0", "pair.0"]),
    "size 73": (sizes(73), ["pair"]),
    "size 90": (sizes(90), ["pair"]),
    "size 91": (sizes(91), []),
    "the size of no module": (sizes(), []),
    "size 73, lists are wrapped": (
        sizes(73, exclude_wrap_modules=set()),
        ["list", "pair"],
    ),
    "size 73, attention is no leaf": (
        sizes(73, force_leaf_modules=set()),
        ["attention", "pair"],
    ),
    "size 72, lists are leaves": (
        sizes(72, force_leaf_modules={nn.ModuleList}),
        ["attention", "attention.out_proj", "pair.0"],
    ),
    "size 6, without linear layers": (
        sizes(6, exclude_wrap_modules={nn.Linear}),
        ["list", "pair"],
    ),
    "always": (always_wrap_policy, [*LINEARS, "attention", "list", "pair"]),
    "of a transformer": (
        partial(
            transformer_auto_wrap_policy,
            transformer_layer_cls={nn.MultiheadAttention, nn.ModuleList},
        ),
        ["attention", "list"],
    ),
    "a lambda": (
        partial(
            lambda_auto_wrap_policy,
            lambda_fn=lambda module: getattr(module, "out_features", 0) == 2,
        ),
        ["last", "list.1", "pair.1"],
    ),
    "two classes": (
        ModuleWrapPolicy([nn.Linear, nn.MultiheadAttention]),
        [*LINEARS, "attention"],
    ),
    "classes, called": (ModuleWrapPolicy({nn.Linear}).__call__, LINEARS),
    "a custom one": (
        CustomPolicy(lambda module: isinstance(module, nn.ModuleList)),
        ["list"],
    ),
}


class TestAutoWrap(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _fsdp(self, module: nn.Module, policy: Any, **options: Any) -> FSDP:
        return FSDP(module, device_id=self.device, auto_wrap_policy=policy, **options)

    def _wrapped(self, model: nn.Module) -> dict[str, FSDP]:
        """Return the wrappers below the root by the plain name of what they wrap."""
        self.assertIsInstance(model, FSDP)
        prefix = "_fsdp_wrapped_module"
        return {
            ".".join(part for part in name.split(".") if part != prefix): module
            for name, module in model.named_modules()
            if isinstance(module, FSDP) and module is not model
        }

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_policies(self):
        for name, (policy, expected) in POLICIES.items():
            model = self._fsdp(tree(), policy)
            self.assertEqual(sorted(self._wrapped(model)), sorted(expected), name)
        self.assertIn("Linear", repr(ModuleWrapPolicy({nn.Linear})))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_what_a_policy_is_asked(self):
        """A function is asked whether to descend, with the elements of a module, and
        then whether to wrap, with those that no module below has. The root's answer to
        the second does not count. Ignored modules are left out of both.
        """
        model = tree()
        names = {id(module): name for name, module in model.named_modules()}
        asked = []

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            name = names[id(module)]
            asked.append(f"{name or 'root'} {recurse} {nonwrapped_numel}")
            return name != "attention" if recurse else name in ("pair.0", "list")

        ignored = [model.pair[1], model.last]
        found = self._fsdp(model, policy, ignored_modules=ignored)
        self.assertEqual(sorted(self._wrapped(found)), ["list", "pair.0"])
        self.assertExpectedInline(
            "\n".join(asked),
            """\
root True 438
pair True 72
pair.0 True 72
pair.0 False 72
pair False 0
list True 78
list.0 True 72
list.0 False 72
list.1 True 6
list.1 False 6
list False 78
attention True 288""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_modules_are_not_wrapped(self):
        for name, policy in {
            "always": always_wrap_policy,
            "classes": ModuleWrapPolicy({nn.Linear, nn.ModuleList}),
            "custom": CustomPolicy(lambda module: True),
        }.items():
            model = tree()
            found = self._wrapped(
                self._fsdp(model, policy, ignored_modules=[model.list, model.pair[0]])
            )
            for ignored in ("list", "list.0", "list.1", "pair.0"):
                self.assertNotIn(ignored, found, name)
            for other in ("pair.1", "last", "attention.out_proj"):
                self.assertIn(other, found, name)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_options_reach_every_wrapper(self):
        options = {
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
            "cpu_offload": CPUOffload(False),
            "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
            "mixed_precision": MixedPrecision(torch.bfloat16),
            "forward_prefetch": True,
            "limit_all_gathers": False,
            "use_orig_params": True,
            "process_group": dist.new_group(),
        }
        own = {
            "sharding_strategy": ShardingStrategy.FULL_SHARD,
            "forward_prefetch": False,
        }

        def custom(module: nn.Module) -> bool | dict[str, Any]:
            if isinstance(module, nn.MultiheadAttention):
                return {}
            if isinstance(module, nn.Linear):
                return module.out_features == 8 and own
            return isinstance(module, nn.ModuleList)

        for name, policy, expected in (
            ("classes", ModuleWrapPolicy({nn.Linear}), LINEARS),
            ("function", POLICIES["two classes"][0].__call__, [*LINEARS, "attention"]),
            (
                "custom",
                CustomPolicy(custom),
                ["attention.out_proj", "list", "list.0", "pair.0"],
            ),
        ):
            root = self._fsdp(tree(), policy, **options)
            wrapped = self._wrapped(root)
            self.assertEqual(sorted(wrapped), sorted(expected), name)
            for place, module in {"": root, **wrapped}.items():
                is_own = name == "custom" and place and place != "list"
                wanted = {**options, **(own if is_own else {})}
                found = {key: getattr(module, key, None) for key in wanted}
                found["use_orig_params"] = module._use_orig_params
                self.assertEqual(found, wanted, f"options of {place or 'root'}, {name}")
                self.assertEqual(module.compute_device, self.device)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "False/True or a kwarg dict.*words"):
            self._fsdp(tree(), CustomPolicy(lambda module: "words"))
        for policy in (ModuleWrapPolicy({nn.Linear}), always_wrap_policy):
            model = tree()
            model.pair[1] = self._fsdp(model.pair[1], None)
            with self.assertRaisesRegex(ValueError, r"already have.*pair\.1 in"):
                self._fsdp(model, policy)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_frozen_parameters_among_trained_ones(self):
        """A policy that puts both in one wrapper is refused for flat parameters. For
        original parameters FSDP warns. Either text names the module, the parameters of
        each kind, and the elements whose gradients need memory.
        """
        layers = {
            "pair": (
                "88 numel instead of 16 ",
                ["1.weight"],
                ["0.weight", "0.bias"],
            ),
            "attention": (
                "280 numel instead of 216 ",
                ["in_proj_weight", "in_proj_bias"],
                ["out_proj.weight"],
            ),
        }
        texts = {}
        for name, (numels, *kinds) in layers.items():
            trained, frozen = ([f"{name}.{each}" for each in kind] for kind in kinds)
            texts[name] = (
                f"{name} has both parameters with requires_grad=True and False. ",
                numels,
                f"requires_grad=True:\n{trained}\n",
                f"requires_grad=False:\n{frozen}",
            )
        for orig in (False, True):
            for wrapped, ignored, mixed in (
                (["pair", "attention"], [], ["pair", "attention"]),
                (["pair", "pair.0", "attention"], [], ["attention"]),
                (["pair", "pair.0", "attention"], ["attention.out_proj"], []),
            ):
                model = tree()
                model.pair[1] = nn.Linear(8, 2, bias=False)
                model.attention.out_proj.bias = None
                model.pair[0].requires_grad_(False)
                model.attention.out_proj.requires_grad_(False)
                chosen = {*map(model.get_submodule, wrapped)}
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    with (
                        nullcontext()
                        if orig or not mixed
                        else self.assertRaises(ValueError)
                    ) as refused:
                        self._fsdp(
                            model,
                            CustomPolicy(chosen.__contains__),
                            use_orig_params=orig,
                            ignored_modules=[*map(model.get_submodule, ignored)],
                        )
                found = [str(each.message) for each in caught]
                found = [each for each in found if "requires_grad" in each]
                if refused is not None:
                    self.assertEqual(found, [])
                    found, mixed = [str(refused.exception)], mixed[:1]
                self.assertEqual(len(found), len(mixed), f"{wrapped=}, {orig=}")
                for name, text in zip(mixed, found, strict=True):
                    start, numels, *names = texts[name]
                    self.assertTrue(text.startswith(start), text)
                    self.assertEqual(numels in text, orig, text)
                    self.assertEqual("use_orig_params=False" in text, not orig, text)
                    self.assertIn("wrap the frozen parameters with FSDP sep", text)
                    for each in names:
                        self.assertIn(each, text)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_classes_without_mixed_precision(self):
        """Layers of ``_module_classes_to_ignore`` get wrappers without mixed precision,
        compute in float32, and give the type that they got.
        """
        precision = MixedPrecision(
            torch.bfloat16, _module_classes_to_ignore=(nn.LayerNorm,)
        )
        kinds = ModuleWrapPolicy({nn.Linear})
        for name, policy in {"classes": kinds, "function": kinds.__call__}.items():
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)
            )
            with self.assertWarnsRegex(UserWarning, "LayerNorm.*\n.*wrapped as sep"):
                root = self._fsdp(model, policy, mixed_precision=precision)
            self.assertEqual(list(self._wrapped(root)), ["0", "1", "2", "3"], name)
            seen = []

            def note(module, args, output, seen=seen):
                seen.append((args[0].dtype, module.weight.dtype, output.dtype))

            for layer in root.module:
                layer.module.register_forward_hook(note, prepend=True)
            root(self.rows(4)).sum().backward()
            brain, full = (torch.bfloat16,) * 3, (torch.float32,) * 3
            self.assertEqual(seen, [brain, full] * 2, name)
            strict = [each.mixed_precision.param_dtype for each in root.module]
            self.assertEqual(strict, [torch.bfloat16, None] * 2, name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self._fsdp(nn.Sequential(nn.Linear(4, 4)), kinds, mixed_precision=precision)


class Wrapper(nn.Module):
    """Stands for FSDP: keeps what it wraps and with which options."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options


class TestWrapUtils(TestCase):
    def test_wrap(self):
        """``wrap`` wraps in the context alone, with its options, which those of the
        call override.
        """
        layer = nn.Linear(2, 2)
        self.assertIs(wrap(layer, a=3), layer, "without a context")
        with enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
            found = [wrap(layer), wrap(layer, b=3, c=4), wrap(layer)]
        self.assertEqual(
            [each.options for each in found],
            [{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}, {"a": 1, "b": 2}],
        )
        for each in found:
            self.assertIsInstance(each, Wrapper)
            self.assertIs(each.module, layer)
        self.assertIs(wrap(layer), layer, "after the context")

    def test_recursive_wrap(self):
        """Any class or function can wrap, but a class not what it has wrapped; it
        returns how many elements are wrapped.
        """
        none: dict[str, Any] = {"ignored_modules": set(), "ignored_params": set()}
        for wrapper in (Wrapper, lambda module, **options: Wrapper(module, **options)):
            for only_below, numel in ((True, 90), (False, 90)):
                found, wrapped = _recursive_wrap(
                    tree().pair, always_wrap_policy, wrapper,
                    only_wrap_children=only_below, **none, a=1,
                )  # fmt: skip
                self.assertEqual(isinstance(found, Wrapper), not only_below)
                self.assertEqual(wrapped, numel)
                inside = found if only_below else found.module
                self.assertEqual([each.options for each in inside], [{"a": 1}] * 2)
        model = nn.Sequential(nn.Linear(2, 2), Wrapper(nn.Linear(2, 2)))
        with self.assertRaisesRegex(AssertionError, "is already wrapped by"):
            _recursive_wrap(model, always_wrap_policy, Wrapper, **none)
        none["ignored_modules"] = {model[1]}
        none["ignored_params"] = {*model[1].parameters()}
        _, wrapped = _recursive_wrap(model, always_wrap_policy, Wrapper, **none)
        self.assertEqual(wrapped, 6)
        for arguments in ((None, Wrapper), (always_wrap_policy, None)):
            with self.assertRaisesRegex(AssertionError, "Must specify"):
                _recursive_wrap(tree(), *arguments, **none)

    def test_contexts(self):
        layer = nn.Linear(2, 2)
        with self.assertRaises(KeyError), enable_wrap(wrapper_cls=Wrapper, a=1):
            raise KeyError
        self.assertIs(wrap(layer), layer, "after an exception")
        with enable_wrap(wrapper_cls=Wrapper, a=1):
            with (
                self.assertRaisesRegex(NotImplementedError, "already within"),
                enable_wrap(wrapper_cls=nn.Sequential),
            ):
                pass
            self.assertEqual(wrap(layer).options, {"a": 1}, "after a nested context")
        with enable_wrap(wrapper_cls=Wrapper):
            self.assertEqual(wrap(layer).options, {}, "options of an earlier context")
        with enable_wrap(wrapper_cls=None), self.assertRaises(AssertionError):
            wrap(layer)
        self.assertIs(wrap(layer), layer, "after a context without a class")


if __name__ == "__main__":
    run_tests()
