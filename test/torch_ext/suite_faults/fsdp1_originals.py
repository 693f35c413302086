"""Mistakes that FSDP1 could contain in what it does for original parameters (``use_orig_params=True``)."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import fault

__all__ = ["MISTAKES"]

_HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
_SUITE = "fsdp.test_fsdp_use_orig_params:TestFSDPUseOrigParams"
_PARAM = f"{_SUITE}Writeback.test_param_writeback_replace_"
_GRAD = f"{_SUITE}Writeback.test_grad_writeback_change_"
_BETWEEN = f"{_SUITE}Writeback.test_writeback_between_fwd_and_bwd_for_no_reshard_raises"
_TRAINABILITY = f"{_SUITE}MultipleParamGroups.test_diff_trainability"

MISTAKES = {
    "first_replaced_parameter_alone_written_back": fault(
        f"{_HANDLE}._writeback_orig_params",
        "wroteback = True",
        "wroteback = True\n            break",
        f"{_PARAM}data",
        "after a.weight, a.bias, .* was replaced",
    ),
    "parameter_with_new_data_not_written_back": fault(
        f"{_HANDLE}._writeback_orig_params",
        "or not _same_storage(param, flat_param_tensor)",
        "or False",
        f"{_PARAM}data",
        "output after a.weight was replaced",
    ),
    "new_parameter_not_written_back": fault(
        f"{_HANDLE}._writeback_orig_params",
        "param_changed = getattr(module, param_name) is not param",
        "param_changed = False",
        f"{_PARAM}parameter",
        "output after a.weight was replaced",
    ),
    "parameter_written_back_to_the_start": fault(
        f"{_HANDLE}._writeback_tensor",
        "dst_tensor[offset : offset + expected_shape.numel()].copy_(src_tensor)",
        "dst_tensor[: expected_shape.numel()].copy_(src_tensor)",
        f"{_PARAM}data",
        "output after a.bias was replaced",
    ),
    "parameter_of_the_second_rank_written_back_alone": fault(
        f"{_HANDLE}._writeback_orig_params",
        "if needs_param_writeback:",
        "if needs_param_writeback and (self.rank or not self.uses_sharded_strategy):",
        f"{_PARAM}data",
        "output after a.weight was replaced",
    ),
    "new_parameter_forgotten": fault(
        f"{_HANDLE}._writeback_orig_params",
        "flat_param._params[i] = param",
        "pass",
        f"{_SUITE}Writeback.test_replaced_parameter_is_trained",
        "parameters trained after a.weight was replaced",
    ),
    "new_gradient_not_written_back": fault(
        f"{_HANDLE}._writeback_orig_params",
        "if needs_grad_writeback:",
        "if False:",
        f"{_GRAD}new",
        "in which the gradient of a.weight was replaced",
    ),
    "gradient_set_when_there_was_none_is_lost": fault(
        f"{_HANDLE}._writeback_orig_params",
        "                flat_param.grad = flat_param_grad\n",
        "",
        f"{_SUITE}Writeback.test_gradients_without_a_backward_are_used",
        "after a.weight was given a gradient",
    ),
    "gradient_set_to_none_kept": fault(
        f"{_HANDLE}._writeback_tensor",
        "dst_tensor[offset : offset + expected_shape.numel()].zero_()",
        "pass",
        f"{_GRAD}none",
        "in which the gradient of a.weight was set to None(.|\n)*backward_again=True",
    ),
    "gradient_set_to_none_becomes_zero": fault(
        f"{_HANDLE}._writeback_tensor",
        "self.flat_param._is_grad_none_mask[tensor_index] = True",
        "pass",
        f"{_GRAD}none",
        "in which the gradient of a.weight was set to None(.|\n)*backward_again=False",
    ),
    "gradient_stays_none": fault(
        f"{_HANDLE}._reset_is_grad_none",
        "flat_param._is_grad_none_mask[i] = False",
        "pass",
        f"{_GRAD}none",
        "in which the gradient of a.(weight|bias) was set to None",
    ),
    "last_gradient_decides_that_all_are_none": fault(
        f"{_HANDLE}._reset_flat_param_grad_info_if_needed",
        "all_grad_none &= param.grad is None",
        "all_grad_none = param.grad is None",
        f"{_SUITE}MultipleParamGroups.test_multiple_optimizers",
        "parameters after step",
    ),
    "last_parameter_decides_that_all_are_frozen": fault(
        f"{_HANDLE}._reset_flat_param_grad_info_if_needed",
        "requires_grad |= param.requires_grad",
        "requires_grad = param.requires_grad",
        _TRAINABILITY,
        "the output of a module that is trained carries no gradient",
    ),
    "flat_parameter_stays_frozen": fault(
        f"{_HANDLE}._reset_flat_param_grad_info_if_needed",
        "flat_param.requires_grad = requires_grad",
        "flat_param.requires_grad = flat_param.requires_grad and requires_grad",
        f"{_SUITE}Init.test_all_may_be_frozen_and_thawed",
        "the output of a module that is trained carries no gradient",
    ),
    "frozen_parameter_gets_a_gradient": fault(
        f"{_HANDLE}._use_sharded_grad_views",
        "if param.requires_grad and not is_grad_none:",
        "if not is_grad_none:",
        _TRAINABILITY,
        "gradients when .* are trained",
    ),
    "parameters_may_change_between_forward_and_backward": fault(
        f"{_HANDLE}._writeback_orig_params",
        "if self._skipped_use_sharded_views and (\n            param_changed or needs_param_writeback\n        ):",
        "if False:",
        _BETWEEN,
        "changing the parameters between forward and backward. not found in",
    ),
    "shard_of_another_shape_accepted": fault(
        f"{_HANDLE}._writeback_tensor",
        "src_tensor is not None and src_tensor.shape != expected_shape",
        "src_tensor is not None and src_tensor.dim() != len(expected_shape)",
        f"{_SUITE}Writeback.test_writeback_shape_mismatch",
        '"Cannot writeback when the parameter shape changes',
    ),
    "changed_shared_parameter_accepted": fault(
        f"{_HANDLE}._writeback_orig_params",
        "if getattr(module, param_name) is not getattr(prim_module, prim_param_name):",
        "if False:",
        f"{_SUITE}Writeback.test_changing_a_shared_parameter_raises",
        "NotImplementedError not raised",
    ),
    "shards_exposed_in_place_of_kept_parameters": fault(
        f"{_HANDLE}._use_sharded_flat_param",
        "torch.is_grad_enabled()",
        "False",
        f"{_SUITE}ParamAccess.test_access_params_after_forward",
        "parameters after forward",
    ),
    "unsharded_gradients_hidden_under_no_sync": fault(
        "torch.distributed.fsdp._runtime_utils:_post_backward_hook",
        "handle._use_unsharded_grad_views()",
        "pass",
        f"{_SUITE}NoSync.test_no_sync_correctness",
        "Missing keys in the actual mapping: .*a.bias",
    ),
    "gradient_views_one_element_late": fault(
        f"{_HANDLE}._use_sharded_grad_views",
        "param.grad = grad[offset : offset + numel_in_shard].reshape(",
        "param.grad = grad.roll(-1)[offset : offset + numel_in_shard].reshape(",
        f"{_SUITE}MultipleParamGroups.test_diff_hyperparams",
        "parameters after training with two groups",
    ),
    "low_precision_kept_after_unsharding_in_full": fault(
        f"{_HANDLE}._get_padded_unsharded_flat_param",
        "_free_storage(flat_param._full_param_padded)",
        "pass",
        f"{_SUITE}UnshardReshard.test_summon_between_two_forwards",
        "output after parameters were doubled",
    ),
}
