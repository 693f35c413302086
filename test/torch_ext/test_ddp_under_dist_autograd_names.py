"""Every name in upstream's ``ddp_under_dist_autograd_test`` exists here. RPC looks several of them up by name."""

import pytest

from torch_ext.testing._internal.distributed import ddp_under_dist_autograd_test as ours

MODULE_NAMES = [
    "DdpMode",
    "init_logger",
    "FeatureSet",
    "_call_method",
    "_remote_method",
    "_remote_method_async",
    "RemoteEM",
    "getLinear",
    "RemoteNet",
    "HybridModel",
    "Trainer",
    "get_training_examples",
    "set_shutdown_signal",
    "shutdown_signal",
    "gLogger",
    "DdpUnderDistAutogradTest",
    "CommonDdpComparisonTest",
    "DdpComparisonTest",
    "CudaDdpComparisonTest",
    "NUM_EM_ROW",
    "D_SPARSE",
    "D_DENSE",
    "D_HID",
    "D_OUT",
    "NUM_TRAINERS",
    "WORLD_SIZE",
    "TRAINER_RANKS",
    "REMOTE_WORKER_RANK",
    "MASTER_RANK",
]

MEMBERS = {
    "DdpMode": "NONE OUTSIDE INSIDE",
    "FeatureSet": "dense_features sparse_features values",
    "RemoteEM": "forward",
    "RemoteNet": "forward",
    "HybridModel": "forward",
    "Trainer": "destroy_pg train_batch",
    "DdpUnderDistAutogradTest": """world_size remote_worker_name trainer_name _remote_worker_process _trainer_process
        _master_process do_test_on_master _do_test test_backward_no_ddp test_backward_ddp_outside
        test_backward_ddp_outside_uneven_inputs test_backward_ddp_inside""",
    "CommonDdpComparisonTest": "world_size trainer_name get_remote_grads",
    "DdpComparisonTest": """_run_test_ddp_comparision test_ddp_comparison test_ddp_comparison_uneven_inputs
        test_ddp_dist_autograd_sparse_grads test_ddp_dist_autograd_local_vs_remote""",
    "CudaDdpComparisonTest": "test_ddp_dist_autograd_local_vs_remote_gpu",
}

VALUES = {
    "NUM_EM_ROW": 2,
    "D_SPARSE": 3,
    "D_DENSE": 2,
    "D_HID": 3,
    "D_OUT": 1,
    "NUM_TRAINERS": 4,
    "WORLD_SIZE": 6,
    "TRAINER_RANKS": [0, 1, 2, 3],
    "REMOTE_WORKER_RANK": 4,
    "MASTER_RANK": 5,
}


@pytest.mark.parametrize("name", MODULE_NAMES)
def test_name_of_the_module_exists(name: str) -> None:
    assert hasattr(ours, name)


@pytest.mark.parametrize(("owner", "member"), [(o, m) for o, members in MEMBERS.items() for m in members.split()])
def test_member_of_the_class_exists(owner: str, member: str) -> None:
    assert hasattr(getattr(ours, owner), member)


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_constant_has_upstreams_value(name: str, value: object) -> None:
    assert getattr(ours, name) == value
