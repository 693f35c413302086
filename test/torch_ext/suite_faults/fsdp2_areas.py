"""Mistakes that FSDP2 could contain where only the suite of one subject looks: freezing, clipping, scaling, init."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import fault
from test.torch_ext.suite_faults.fsdp2_rooms import COMM, INIT, ROOM, STATE, SUITE, of_group, of_param

__all__ = ["MISTAKES"]

_FROZEN = f"{SUITE}frozen:TestFullyShardFrozen."
_IGNORED = f"{SUITE}ignore_params:TestFullyShardIgnoreParams."
_CLIP = f"{SUITE}clip_grad_norm_:TestClipGradNormWorldSize"
_SCALER = f"{SUITE}grad_scaler:TestFullyShardGradientScaler."
_LOGGING = f"{SUITE}logging:LoggingTests.test_fsdp_logging"
_WIRE = f"{SUITE}comm:TestFullyShardCollectiveOps."
_TYPES = f"{SUITE}mixed_precision:TestFullyShardMixedPrecisionTraining."
_STATE_DICT = f"{SUITE}state_dict:TestFullyShardStateDictMultiProcess."
_METHODS = f"{SUITE}forward:TestFullyShardCustomForwardMethod."
_AUTOGRAD = f"{SUITE}autograd:"
_EXTENSIONS = f"{SUITE}extensions:TestFullyShardAllGatherExtensionsMultiThread."


MISTAKES = {
    "fully_shard_later_freezing_ignored": of_param(
        "to_unsharded",
        "set_requires_grad_if_needed(self.sharded_param, self._unsharded_param)",
        "pass",
        _FROZEN + "test_requires_grad_changed_between_steps",
        "only the sharded parameter has a gradient|step 1: elements reduced",
    ),
    "fully_shard_frozen_at_first_stays_frozen": fault(
        f"{ROOM}._fsdp_param:set_requires_grad_if_needed",
        "if src_tensor.requires_grad != dst_tensor.requires_grad:",
        "if not src_tensor.requires_grad and dst_tensor.requires_grad:",
        _FROZEN + "test_requires_grad_changed_between_steps",
        "step 2: .*(gradient|elements reduced)|only the [a-z]+ parameter has a gradient",
    ),
    "fully_shard_frozen_types_counted": of_group(
        "_init_mp_dtypes",
        "p for p in self.fsdp_params if p.sharded_param.requires_grad",
        "p for p in self.fsdp_params",
        _FROZEN + "test_frozen_parameters_may_have_another_type",
        "test_frozen_parameters_may_have_another_type(.|\\n)*_step",
    ),
    "fully_shard_frozen_parameters_trainable": of_param(
        "_init_sharded_param",
        "requires_grad=param.requires_grad",
        "requires_grad=True",
        _FROZEN + "test_train_mixed_requires_grad_per_group",
        "only the sharded parameter has a gradient",
    ),
    "fully_shard_ignored_parameter_sharded": fault(
        f"{INIT}:_get_managed_states",
        "if param in ignored_params:",
        "if False:",
        _IGNORED + "test_part_of_a_module",
        "sharded parameters",
    ),
    "fully_shard_buffers_not_moved": fault(
        f"{INIT}:_move_states_to_device",
        "for tensor in itertools.chain(params, buffers):",
        "for tensor in params:",
        _IGNORED + "test_ignored_parameters_are_not_moved",
        r"\n\W*devices\n",
        device="sim",
    ),
    "fully_shard_module_with_buffers_ignored": fault(
        f"{INIT}:_ignore_module",
        "if len(list(module.buffers(recurse=False))) > 0:",
        "if False:",
        _IGNORED + "test_ignored_parameters_are_not_moved",
        r"\n\W*devices\n",
        device="sim",
    ),
    "fully_shard_scalar_accepted": fault(
        f"{INIT}:_verify_managed_param",
        "if len(param.shape) == 0:",
        "if False:",
        _IGNORED + "test_scalars_may_be_ignored",
        "Change scale|IndexError|AssertionError",
    ),
    "norm_of_shards_adds_instead_of_powers": fault(
        "torch.distributed.tensor._ops._math_ops:_NormPartial._pre_reduce_transform",
        "return tensor**self.norm_type",
        "return tensor**2",
        _CLIP + "2.test_clip_grad_norm_1d",
        "norm 1",
    ),
    "norm_of_shards_keeps_its_power": fault(
        "torch.distributed.tensor._ops._math_ops:_NormPartial._post_reduce_transform",
        "return tensor ** (1.0 / self.norm_type)",
        "return tensor ** (1.0 / int(self.norm_type))",
        _CLIP + "3.test_clip_grad_norm_of_three_ranks",
        r"norm 2\.5",
    ),
    "clipping_enlarges_small_gradients": fault(
        "torch.nn.utils.clip_grad:_clip_grads_with_norm_",
        "torch.clamp(clip_coef, max=1.0)",
        "clip_coef",
        _CLIP + "2.test_clip_grad_norm_1d",
        r"Tensor-likes are not close(.|\n)*weight.grad",
    ),
    "overflow_of_a_shard_unknown_to_others": fault(
        "torch.distributed.tensor._dispatch:found_inf_reduce_handler",
        "target_tensor.copy_(found_inf)",
        "pass",
        _SCALER + "test_gradient_scaler",
        "step 1: parameters",
    ),
    "overflow_reduced_as_a_minimum": fault(
        "torch.distributed.tensor._dispatch:found_inf_reduce_handler",
        'Partial("max")',
        'Partial("min")',
        _SCALER + "test_gradient_scaler",
        "step 1: parameters",
    ),
    "fully_shard_root_hook_not_logged": fault(
        f"{STATE}._root_post_backward_final_callback",
        'logger.debug("FSDP::root_post_backward")',
        "pass",
        _LOGGING,
        r"- FSDP::root_post_backward",
    ),
    "fully_shard_name_of_the_module_lost": fault(
        f"{STATE}._init_fqns",
        "fsdp_param_group._module_fqn = module_name",
        'fsdp_param_group._module_fqn = ""',
        _LOGGING,
        r"- FSDP::pre_forward \(first\)",
    ),
    "fully_shard_parameters_stay_gathered_in_a_saved_state": of_group(
        "_register_state_dict_hooks",
        "module.register_state_dict_pre_hook(to_sharded_hook)",
        "module.register_state_dict_pre_hook(lambda *args: None)",
        _STATE_DICT + "test_hooks_on_state_dict_see_sharded_parameters",
        r"\n\W*before saving\n",
    ),
    "fully_shard_parameters_stay_gathered_in_a_load": of_group(
        "_register_state_dict_hooks",
        "module._register_load_state_dict_pre_hook(to_sharded_hook)",
        "module._register_load_state_dict_pre_hook(lambda *args: None)",
        _STATE_DICT + "test_hooks_on_state_dict_see_sharded_parameters",
        "in test_hooks_on_state_dict_see_sharded_parameters",
    ),
    "fully_shard_meta_parameters_named_without_their_module": of_group(
        "_validate_no_meta_params",
        "fsdp_param._param_fqn",
        "fsdp_param._module_info.param_name",
        _STATE_DICT + "test_meta_model_refuses_to_run",
        r"does not match(.|\n)*\['weight', 'bias', 'weight', 'bias'\]",
    ),
    "fully_shard_factor_multiplied": fault(
        f"{COMM}:_get_gradient_divide_factors",
        "ReduceOp.PREMUL_SUM(1 / factor)",
        "ReduceOp.PREMUL_SUM(factor)",
        _WIRE + "test_set_gradient_divide_factor",
        "weight.grad: (.|\n)*force_sum=False",
        device="sim",
    ),
    "fully_shard_factor_ignored_where_only_sums_are_allowed": fault(
        f"{COMM}:_get_gradient_divide_factors",
        "pre_factor, post_factor = None, factor",
        "pre_factor, post_factor = None, float(data_parallel_size)",
        _WIRE + "test_set_gradient_divide_factor",
        "weight.grad: (.|\n)*force_sum=True",
        device="sim",
    ),
    "fully_shard_gradients_accumulate_in_low_precision": of_param(
        "to_accumulated_grad_if_needed",
        "unsharded_grad.to(self.reduce_dtype)",
        "unsharded_grad",
        _TYPES + "test_gradient_accumulation_in_the_type_of_the_reduction_float32",
        "Tensor-likes are not equal|uniform gradient dtype",
    ),
    "fully_shard_reduced_gradient_rounded": fault(
        f"{COMM}:foreach_reduce",
        "reduce_output = _to_dtype_if_needed(reduce_output, orig_dtype)",
        "reduce_output = _to_dtype_if_needed(reduce_output.bfloat16(), orig_dtype)",
        _TYPES + "test_compute_and_reduce_types_float16_float32",
        "Tensor-likes are not equal",
    ),
    "fully_shard_inner_tensors_of_an_extension_swapped": of_param(
        "_unflatten_all_gather_outputs",
        "self.all_gather_outputs, self._extensions_data",
        "self.all_gather_outputs[::-1], self._extensions_data",
        _EXTENSIONS + "test_inner_tensors_keep_their_places",
        "(a|b) of in_proj.weight",
    ),
    "fully_shard_extension_gets_the_size_of_its_shard": of_param(
        "all_gather_inputs",
        "                self._orig_size,\n",
        "                self.sharded_size,\n",
        _EXTENSIONS + "test_arguments_of_the_hooks",
        "size of in_proj.weight",
    ),
    "fully_shard_extension_gets_the_stride_of_its_shard": of_param(
        "all_gather_inputs",
        "                self._contiguous_orig_stride,\n",
        "                self._contiguous_orig_stride[::-1],\n",
        _EXTENSIONS + "test_arguments_of_the_hooks",
        "stride of in_proj.weight",
    ),
    "fully_shard_extension_gets_no_module": of_param(
        "all_gather_inputs",
        "                self._module_info.module,\n",
        "                None,\n",
        _EXTENSIONS + "test_arguments_of_the_hooks",
        "module of in_proj.weight",
    ),
    "fully_shard_extension_gets_another_policy": of_param(
        "all_gather_inputs",
        "                self.mp_policy,\n",
        "                MixedPrecisionPolicy(),\n",
        _EXTENSIONS + "test_arguments_of_the_hooks",
        "policy of in_proj.weight",
    ),
    "fully_shard_extension_unshards_in_full_precision": of_param(
        "init_unsharded_param",
        "metadata,\n            self.param_dtype or self.orig_dtype,\n        )",
        "metadata,\n            self.orig_dtype,\n        )",
        _EXTENSIONS + "test_arguments_of_the_hooks",
        "type of in_proj.weight",
    ),
    "fully_shard_registered_method_leaves_parameters_gathered": fault(
        "torch.distributed.fsdp._fully_shard._fully_shard:register_fsdp_forward_method",
        "return fsdp_state._post_forward(self, args, out)",
        "return out",
        _METHODS + "test_registered_method_trains_as_forward_does",
        "not a DTensor: its module is unsharded",
    ),
    "fully_shard_method_that_is_none_registered": fault(
        "torch.distributed.fsdp._fully_shard._fully_shard:register_fsdp_forward_method",
        "if not hasattr(module, method_name):",
        "if False:",
        _METHODS + "test_register_fsdp_forward_method_of_no_method_is_refused",
        "has no attribute 'nothing_of_that_name'",
    ),
    "fully_shard_hooks_after_accumulation_forgotten": fault(
        f"{COMM}:foreach_reduce",
        "for hook in (",
        "for hook in () and (",
        _AUTOGRAD + "TestFullyShardPostAccGradHook.test_post_accumulate_grad_hook_sees_the_sharded_gradient",
        "gradients that the hooks have seen",
    ),
    "fully_shard_unused_module_never_finished": fault(
        f"{STATE}._root_post_backward_final_callback",
        "if fsdp_param_group._training_state != TrainingState.POST_BACKWARD:",
        "if False:",
        _AUTOGRAD + "TestFullyShardAutograd.test_unused_forward_output",
        "not a DTensor: its module is unsharded",
    ),
}
