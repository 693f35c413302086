"""Mistakes that FSDP1 could contain in clipping, freezing, hooks, ignored states, scaling, saving and unsharding."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import fault

__all__ = ["MISTAKES"]

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
_NORM = "torch.distributed.fsdp.fully_sharded_data_parallel:_get_grad_norm"

_CLIP = "fsdp.test_fsdp_clip_grad_norm:TestClipGradNorm."
_PARITY = f"{_CLIP}test_ddp_parity_norm_type_"

MISTAKES = {
    "infinity_norms_added_up": fault(
        f"{_FSDP}.clip_grad_norm_",
        "total_norm, op=torch.distributed.ReduceOp.MAX, group=self.process_group",
        "total_norm, group=self.process_group",
        f"{_PARITY}inf",
        "norm inf of all gradients",
    ),
    "infinity_norm_of_sharded_gradients_alone": fault(
        f"{_FSDP}.clip_grad_norm_",
        "torch.maximum(local_sharded_norm, local_nonsharded_norm)\n",
        "local_sharded_norm\n",
        f"{_CLIP}test_norm_is_that_of_the_largest",
        "infinity norm",
    ),
    "sharded_norm_to_the_wrong_power": fault(
        f"{_FSDP}.clip_grad_norm_",
        "total_norm = local_sharded_norm**norm_type",
        "total_norm = local_sharded_norm**2",
        f"{_PARITY}2_5",
        "norm 2.5 of all gradients",
    ),
    "replicated_norm_to_the_wrong_power": fault(
        f"{_FSDP}.clip_grad_norm_",
        "total_norm += local_nonsharded_norm**norm_type",
        "total_norm += local_nonsharded_norm",
        f"{_PARITY}2_5",
        "norm 2.5 of all gradients(.|\n)*'replicated'|norm 2.5 of all gradients(.|\n)*'unmanaged'",
    ),
    "square_root_of_every_norm": fault(
        f"{_FSDP}.clip_grad_norm_",
        "total_norm ** (1.0 / norm_type)",
        "total_norm ** 0.5",
        f"{_PARITY}1",
        "norm 1 of all gradients",
    ),
    "replicated_gradients_count_on_every_rank": fault(
        f"{_FSDP}.clip_grad_norm_",
        "total_norm += local_nonsharded_norm**norm_type",
        "total_norm += self.world_size * local_nonsharded_norm**norm_type",
        f"{_PARITY}1",
        "norm 1 of all gradients(.|\n)*'replicated'",
    ),
    "replicated_taken_for_sharded": fault(
        f"{_FSDP}.clip_grad_norm_",
        "        if handle.uses_sharded_strategy:\n            target_set",
        "        if True:\n            target_set",
        f"{_PARITY}2",
        "norm 2 of all gradients(.|\n)*'replicated'",
    ),
    "unmanaged_gradients_not_counted": fault(
        f"{_FSDP}.clip_grad_norm_",
        "        if not_fsdp_managed:",
        "        if False:",
        f"{_PARITY}2",
        "norm 2 of all gradients(.|\n)*'unmanaged'",
    ),
    "unmanaged_gradients_not_clipped": fault(
        f"{_FSDP}.clip_grad_norm_",
        "nonsharded_params.append(param)\n            if param.grad is not None:",
        "nonsharded_params.append(param)\n            if False:",
        f"{_PARITY}2",
        "gradients after clipping(.|\n)*'unmanaged'",
    ),
    "small_gradients_scaled_up": fault(
        f"{_FSDP}.clip_grad_norm_",
        "torch.clamp(clip_coef, max=1.0)",
        "clip_coef",
        f"{_PARITY}2",
        "gradients after clipping(.|\n)*max_norm=1000000.0",
    ),
    "gradients_clipped_by_their_own_norm": fault(
        f"{_FSDP}.clip_grad_norm_",
        "clip_coef = max_norm / (total_norm + 1e-6)",
        "clip_coef = max_norm / (local_sharded_norm + 1e-6)",
        f"{_PARITY}2",
        "gradients after clipping",
    ),
    "norm_in_the_type_of_the_last_gradient": fault(
        f"{_FSDP}.clip_grad_norm_",
        "torch.promote_types,",
        "lambda first, second: second,",
        f"{_CLIP}test_low_precision_grads",
        "type of the norm",
    ),
    "norm_returned_in_single_precision": fault(
        f"{_FSDP}.clip_grad_norm_",
        "return total_norm.to(total_norm_dtype)",
        "return total_norm",
        f"{_CLIP}test_low_precision_grads",
        "type of the norm",
    ),
    "norm_of_each_gradient_in_its_own_type": fault(
        _NORM,
        "torch.linalg.vector_norm(grad.detach(), norm_type, dtype=torch.float32)",
        "torch.linalg.vector_norm(grad.detach(), norm_type).float()",
        f"{_CLIP}test_low_precision_grads",
        "norm of gradients in low precision",
    ),
    "norm_of_norms_of_the_second_kind": fault(
        _NORM,
        "        norm_type,\n        dtype=torch.float32,\n    )\n    return",
        "        2,\n        dtype=torch.float32,\n    )\n    return",
        f"{_PARITY}1",
        "norm 1 of all gradients",
    ),
    "rank_without_gradients_returns_nothing": fault(
        f"{_FSDP}.clip_grad_norm_",
        "return total_norm\n",
        "return self._zero_scalar\n",
        f"{_CLIP}test_no_gradients",
        "norm of the gradients of rank 0",
    ),
    "norm_of_a_part_may_be_asked_for": fault(
        f"{_FSDP}.clip_grad_norm_",
        "if not self._is_root:",
        "if False:",
        f"{_CLIP}test_non_root",
        "on the root FSDP instance. not found in",
    ),
}
