"""The memory of a dry run is that of a run that computes, and its kinds are what arithmetic says."""

import functools
import json

import pytest

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.interpreter import python

pytestmark = pytest.mark.costly

SCRIPT = CHECKOUT / "test/torch_ext/sim/dry/small_programs.py"
MODELS = ("mlp", "convolution", "transformer", "lstm", "embedding")
NAMES = (*MODELS, "checkpointed", "attention", "operators")

# Of each model: parameters, bytes of an element, states for each parameter. Sizes are multiples of 512 bytes.
D, FF, H = 256, 512, 256
FORMS = {
    "mlp": (256 * 512 + 512 + 512 * 128 + 128, 4, 1),
    "convolution": (16 * 128 * 3**2 + 128 + 2 * 128 + 128 * 256 + 256, 4, 2),
    "transformer": (4 * D * D + 4 * D + 2 * D * FF + FF + D + 4 * D, 4, 2),
    "lstm": (4 * H * (128 + H) + 8 * H + 4 * H * (H + H) + 8 * H, 4, 1),
    "embedding": (1024 * 256, 2, 1),
}


@functools.cache
def results(mode, names):
    ended = python(SCRIPT, mode, *names)
    assert ended.returncode == 0, ended.stderr
    return dict(map(json.loads, ended.stdout.splitlines()))


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_those_of_a_run_that_computes(name):
    dry, wet = results("dry", NAMES)[name], results("wet", NAMES)[name]
    report = dry["report"]
    assert {key: dry[key] for key in wet} == wet
    assert (report["allocated"], report["reserved"]) == (wet["allocated"], wet["reserved"])


@pytest.mark.parametrize("name", MODELS)
def test_parameters_gradients_and_states_follow_closed_forms(name):
    elements, size, states = FORMS[name]
    kinds = results("dry", NAMES)[name]["report"]["kinds"]
    found = tuple(kinds[each] for each in ("parameters", "gradients", "optimizer state"))
    assert found == (elements * size, elements * size, states * elements * size)


def test_the_lines_add_up_to_the_peak_and_name_the_program():
    report = results("dry", NAMES)["mlp"]["report"]
    assert sum(line[2] for line in report["lines"]) == report["allocated"] == sum(report["kinds"].values())
    line = SCRIPT.read_text().partition("1 << 28, dtype")[0].count("\n") + 1
    assert report["lines"][0] == [f"{SCRIPT}:{line}", "activations", 1 << 28, 1]
    assert report["at"] == f"{SCRIPT}:{line}"
    assert report["steps"] == 2


def test_pages_stay_untouched():
    """The program asserts its resident memory."""
    assert results("dry", ("untouched",))["untouched"]["allocated"] > 300 << 30
