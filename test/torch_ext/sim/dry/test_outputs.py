"""The results of kernels have the types, sizes and strides of a run that computes, and those of a GPU.

Each kernel that a sample of torch's operator database runs in half precision, forward and backward, is compared, and
kernels of modules with statistics.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from test.torch_ext.house.source import CHECKOUT
from test.torch_ext.interpreter import python

SCRIPT = CHECKOUT / "test/torch_ext/sim/dry/every_output.py"

# Torch has no shape functions for these.
WITHOUT_SHAPES = ("aten::fractional_max_pool3d_backward", "aten::_logcumsumexp")

# Results that CUDA's kernels for half precision have in float: layer_norm_cuda, batch_norm_cuda, _fused_rms_norm_cuda
# of aten/src/ATen/native/cuda, and attention. native_group_norm is one function for all devices: none.
IN_FLOAT = {
    "aten.native_layer_norm.default": (1, 2),
    "aten.native_batch_norm.default": (1, 2),
    "aten._fused_rms_norm.default": (1,),
    "aten._scaled_dot_product_fused_attention_overrideable.default": (1,),
    "aten._weight_norm_interface.default": (1,),
    "aten.native_group_norm.default": (),
}


@pytest.mark.costly
def test_kernels_have_the_results_of_a_run_that_computes_and_of_a_gpu(tmp_path):
    modes = ("dry", "wet")
    with ThreadPoolExecutor() as pool:
        for ended in pool.map(lambda mode: python(SCRIPT, mode, tmp_path / mode), modes):
            assert ended.returncode == 0, ended.stderr
    dry, wet = (json.loads((tmp_path / mode).read_text()) for mode in modes)
    assert dry.keys() == wet.keys() and len(wet) > 900
    kernels = set()
    for name, (rows, error) in wet.items():
        found, refused = dry[name]
        is_refused = "which a dry run does not compute" in refused or any(each in refused for each in WITHOUT_SHAPES)
        assert not refused or is_refused or error, refused  # an error: the host lacks a kernel
        compared = len(found) if is_refused or error else len(rows)
        assert found[: len(rows)] == rows[:compared], name
        for kernel, results in rows:
            kernels.add(kernel)
            if kernel in IN_FLOAT and results[0][0] in ("torch.float16", "torch.bfloat16"):
                of_float = tuple(at for at, result in enumerate(results) if result[0] == "torch.float32")
                assert of_float == IN_FLOAT[kernel], (name, kernel)
    assert IN_FLOAT.keys() <= kernels
