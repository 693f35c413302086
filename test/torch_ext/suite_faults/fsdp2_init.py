"""Mistakes of FSDP2's construction and state: what it accepts, moves, pins, names and gathers again."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import Fault, fault
from test.torch_ext.suite_faults.fsdp2_rooms import GROUP, INIT, MODULE, PARAM, ROOM, STATE, SUITE

__all__ = ["MISTAKES"]

_ERRORS = f"{SUITE}init:TestFullyShardErrors."
_LAZY = f"{SUITE}init:TestFullyShardLazyInit."
_PLACES = f"{SUITE}init:TestFullyShardDeviceTensor."
_PLACEMENT = f"{SUITE}init:TestFullyShardShardPlacementFn."
_STATES = f"{SUITE}state:TestFullyShardState."
_BACKWARD = f"{SUITE}backward:TestFullyShardBackward."
_THREE = f"{SUITE}backward:TestFullyShardThreeRanks."


def _error(function: str, old: str, test: str, says: str, new: str = "if False:", device: str = "cpu") -> Fault:
    return fault(function, old, new, _ERRORS + test, says, device)


MISTAKES = {
    "fully_shard_shared_parameter_in_two_groups_accepted": _error(
        f"{STATE}._validate_no_duplicate_params",
        "if fsdp_param._orig_param_uid in seen:",
        "test_parameter_shared_across_groups",
        "not raised",
    ),
    "fully_shard_meta_parameters_accepted": _error(
        f"{GROUP}._validate_no_meta_params",
        "if param_names_on_meta:",
        "test_parameters_on_meta",
        "not raised|does not match",
    ),
    "fully_shard_offloaded_parameters_on_the_device_accepted": _error(
        f"{GROUP}._validate_cpu_offload_params",
        "if fsdp_params_not_on_cpu:",
        "test_offloaded_parameters_on_the_device",
        "not raised|does not match",
        device="sim",
    ),
    "fully_shard_noncontiguous_parameter_accepted": _error(
        f"{PARAM}._init_sharded_param",
        "if not param.is_contiguous():",
        "test_noncontiguous_parameter",
        "not raised|does not match|Expected contiguous",
    ),
    "fully_shard_uneven_shards_of_columns_accepted": _error(
        f"{PARAM}._init_sharded_param",
        "if shard_dim > 0 and param_data.size(shard_dim) % shard_world_size != 0:",
        "test_uneven_columns",
        "not raised|does not match",
    ),
    "fully_shard_container_without_forward_accepted": _error(
        f"{INIT}:_validate_module",
        "and module.__class__.forward is nn.Module.forward",
        "test_modules_without_forward",
        "not raised|does not match",
        new="and False",
    ),
    "fully_shard_negative_dimension_off_by_one": fault(
        f"{PARAM}._init_sharded_param",
        "Shard(fsdp_placement.dim + param.ndim)",
        "Shard(fsdp_placement.dim + param.ndim - 1)",
        _PLACEMENT + "test_negative_dimension_counts_from_the_end",
        "placement of",
    ),
    "fully_shard_parameter_named_without_its_module": fault(
        f"{STATE}._init_fqns",
        "param_to_fsdp_param[param]._param_fqn = param_name",
        'param_to_fsdp_param[param]._param_fqn = param_name.rpartition(".")[2]',
        _LAZY + "test_fully_shard_module_and_param_fqns",
        "names of parameters",
    ),
    "fully_shard_every_module_is_a_root": fault(
        f"{STATE}._lazy_init",
        "state._is_root = False",
        "state._is_root = True",
        _LAZY + "test_fully_shard_is_root",
        "roots",
    ),
    "fully_shard_root_reshards_after_forward": fault(
        f"{STATE}._lazy_init",
        "if self._auto_reshard_after_forward:",
        "if False:",
        _LAZY + "test_root_keeps_its_parameters",
        "root is sharded after forward",
    ),
    "fully_shard_loaded_before_first_use_ignored": fault(
        f"{GROUP}.lazy_init",
        "fsdp_param.reset_sharded_param()",
        "pass",
        _LAZY + "test_reset_sharded_param_in_lazy_init",
        "output of what was put there before",
    ),
    "fully_shard_pinning_ignored": fault(
        f"{PARAM}.__init__",
        "self.offload_to_cpu and cast(CPUOffloadPolicy, offload_policy).pin_memory",
        "False",
        _PLACES + "test_pinned_memory",
        "pinned at first, pin_memory=True",
        device="sim",
    ),
    "fully_shard_pins_unasked": fault(
        f"{PARAM}.__init__",
        "self.offload_to_cpu and cast(CPUOffloadPolicy, offload_policy).pin_memory",
        "self.offload_to_cpu",
        _PLACES + "test_pinned_memory",
        "pinned at first, pin_memory=False",
        device="sim",
    ),
    "fully_shard_pinning_lost_in_a_load": fault(
        f"{PARAM}.reset_sharded_param",
        "if self.pin_memory and not local_tensor.is_pinned():",
        "if False:",
        _PLACES + "test_pinned_memory",
        "pinned after loading, pin_memory=True",
        device="sim",
    ),
    "fully_shard_class_named_after_nothing": fault(
        f"{INIT}:_apply_to_module",
        "(wrapper_module_cls, cls), dct",
        "(cls, wrapper_module_cls), dct",
        _STATES + "test_fully_shard_cls",
        "classes|MRO|method resolution",
    ),
    "fully_shard_slices_are_sharded": fault(
        f"{MODULE}.__new__",
        "self = orig_cls.__new__(orig_cls, *args, **kwargs)",
        "self = orig_cls.__new__(cls, *args, **kwargs)",
        _STATES + "test_slice_of_a_container_is_plain",
        "class of a slice",
    ),
    "fully_shard_gathers_in_backward_though_told_not_to": fault(
        f"{GROUP}.unshard",
        "not self.unshard_in_backward\n",
        "False\n",
        _BACKWARD + "test_set_unshard_in_backward",
        "all-gathers in backward",
    ),
    "fully_shard_unused_parameters_not_reduced": fault(
        f"{GROUP}.post_backward",
        "self.reduce_scatter_unused_params\n",
        "False\n",
        _BACKWARD + "test_set_reduce_scatter_unused_params",
        "elements reduced",
    ),
    "fully_shard_unused_parameters_reduced_as_ones": fault(
        f"{PARAM}.unsharded_zero_grad_data",
        "torch.zeros_like",
        "torch.ones_like",
        _BACKWARD + "test_set_reduce_scatter_unused_params",
        "gradient of two.weight",
    ),
    "fully_shard_frozen_parameters_reduced_as_unused": fault(
        f"{GROUP}.post_backward",
        "and fsdp_param.unsharded_param.requires_grad\n",
        "\n",
        _BACKWARD + "test_set_reduce_scatter_unused_params",
        "elements reduced",
    ),
    "fully_shard_recomputes_with_freed_parameters": fault(
        f"{STATE}._pre_forward",
        "if not fsdp_param_group.is_unsharded:",
        "if False:",
        _BACKWARD + "test_checkpointed_module_with_several_forwards",
        "RuntimeError|in check_sharded_parity",
    ),
    "fully_shard_converts_what_is_gathered": fault(
        f"{PARAM}.to_sharded",
        "self._setattr_on_modules(self.sharded_param)",
        "pass",
        _BACKWARD + "test_conversion_of_a_gathered_module",
        "converted|in test_conversion",
    ),
    "fully_shard_half_precision_divides_by_whole_numbers": fault(
        f"{ROOM}._fsdp_collectives:_get_gradient_divide_factors",
        "post_factor = factor / pre_factor",
        "post_factor = factor // pre_factor",
        _THREE + "test_half_precision",
        "gradient of",
    ),
    "fully_shard_pads_one_row_too_many": fault(
        f"{ROOM}._fsdp_common:_get_dim0_padded_size",
        "math.ceil(tensor_size[0] / dim0_factor) * dim0_factor",
        "(tensor_size[0] // dim0_factor + 1) * dim0_factor",
        _THREE + "test_train_parity",
        "elements reduced|weight.grad",
    ),
}
