"""Random module trees: building them from a description, and training them."""

import contextlib

import torch
import torch.nn as nn
from hypothesis import find

from torch_ext.testing._internal.common_fsdp import BlockSpec, LayerSpec, build_tree, module_trees, train_tree

HOST = torch.device("cpu")
TREE = BlockSpec((LayerSpec(2, wrapped=True), BlockSpec((LayerSpec(5, bias=False), LayerSpec(1)), wrapped=True)))
EVERYTHING = slice(None)


def shapes(model):
    return [tuple(param.shape) for param in model.parameters()]


def test_widths_chain_and_values_depend_on_the_seed_alone():
    model = build_tree(TREE, HOST)
    assert shapes(model) == [(2, 3), (2,), (5, 2), (1, 5), (1,)]
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    again, other = build_tree(TREE, HOST), build_tree(TREE, HOST, seed=1)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert not any(map(torch.equal, model.parameters(), other.parameters()))


def test_layers_are_wrapped_innermost_first_and_the_model_last():
    wrapped = []
    model = build_tree(TREE, HOST, lambda module: wrapped.append(module) or module)
    assert [type(module) for module in wrapped] == [nn.Linear, nn.Sequential, nn.Sequential]
    assert wrapped[-1] is model


def test_accumulation_steps_every_other_time():
    steps = []
    model = build_tree(TREE, HOST)
    before = [param.clone() for param in model.parameters()]
    entered = []

    @contextlib.contextmanager
    def accumulate():
        entered.append(True)
        yield

    train_tree(model, EVERYTHING, 1, HOST, accumulate)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(param.grad is not None for param in model.parameters())
    steps = train_tree(model, EVERYTHING, 4, HOST, accumulate)
    assert steps.shape == (4,)
    assert len(entered) == 3
    assert not all(map(torch.equal, before, model.parameters()))


def test_the_simplest_tree_is_one_layer():
    assert find(module_trees(), lambda tree: True) == BlockSpec((LayerSpec(1, bias=False),))


def test_nested_and_wrapped_trees_are_drawn():
    def holds(tree):
        inner = [part for part in tree.parts if isinstance(part, BlockSpec)]
        return any(part.wrapped and any(each.wrapped for each in part.parts) for part in inner)

    assert holds(find(module_trees(), holds))
