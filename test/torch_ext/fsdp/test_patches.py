"""Each patch is visible to every rank, process or thread, and undone afterwards, even if the body raises."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    FSDPTestMultiThread,
    patch_all_gather,
    patch_all_reduce,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_post_backward,
    patch_reduce_scatter,
    patch_register_post_backward_hook_backward,
    patch_reshard,
    patch_unshard,
    rank_device,
)

# For each context, the owner and the name of what it replaces.
TARGETS = {
    patch_all_gather: (dist, "all_gather_single"),
    patch_reduce_scatter: (dist, "reduce_scatter_single"),
    patch_all_reduce: (dist, "all_reduce"),
    patch_foreach_all_gather: (param_group, "foreach_all_gather"),
    patch_foreach_reduce: (param_group, "foreach_reduce"),
    patch_unshard: (param_group.FSDPParamGroup, "unshard"),
    patch_reshard: (param_group.FSDPParamGroup, "reshard"),
    patch_post_backward: (param_group.FSDPParamGroup, "post_backward"),
    patch_register_post_backward_hook_backward: (param_group.RegisterPostBackwardFunction, "backward"),
}

# Their values before any test runs.
ORIGINALS = {patch: vars(owner)[name] for patch, (owner, name) in TARGETS.items()}


def current(patch):
    owner, name = TARGETS[patch]
    return vars(owner)[name]


def counting(patch, calls):
    """Return a replacement that counts its calls and calls the original."""
    original = ORIGINALS[patch]
    original = getattr(original, "__func__", original)  # the function in a static method

    def replacement(*args, **kwargs):
        calls.append(patch)
        return original(*args, **kwargs)

    return replacement


class StopBodyError(Exception):
    pass


class PatchChecks:
    """The same tests for ranks that are processes and for ranks that are threads."""

    replacement = staticmethod(lambda *args, **kwargs: pytest.fail("never called"))

    def test_each_is_seen_and_gone(self):
        for patch in TARGETS:
            with patch(self.replacement):
                self.assertIs(current(patch), self.replacement)
                dist.barrier()
            dist.barrier()
            self.assertIs(current(patch), ORIGINALS[patch], str(patch))
            dist.barrier()
            with self.assertRaises(StopBodyError), patch(self.replacement):
                self.assertIs(current(patch), self.replacement)
                raise StopBodyError
            dist.barrier()
            self.assertIs(current(patch), ORIGINALS[patch], str(patch))
            dist.barrier()

    def test_nested(self):
        # One object for all threads, so that each can compare.
        inner = SHARED.setdefault("inner", lambda *args, **kwargs: self.fail("never called"))
        with patch_all_reduce(self.replacement):
            with patch_all_reduce(inner):
                self.assertIs(dist.all_reduce, inner)
                dist.barrier()
            dist.barrier()
            self.assertIs(dist.all_reduce, self.replacement)
            dist.barrier()
        dist.barrier()
        self.assertIs(dist.all_reduce, ORIGINALS[patch_all_reduce])

    def test_training_calls_it(self):
        for patch in TARGETS:
            if patch is patch_all_reduce:
                continue  # FSDP2 does not call it over a 1D mesh
            model = fully_shard(nn.Linear(4, 4, device=rank_device(self.rank)))
            calls = SHARED.setdefault(patch, [])
            with patch(counting(patch, calls)):
                # The function whose backward is patched runs only for inputs that require grad.
                model(torch.ones(2, 4, device=rank_device(self.rank), requires_grad=True)).sum().backward()
            self.assertGreater(len(calls), 0, str(patch))


SHARED = {}


class TestPatchesAcrossProcesses(PatchChecks, FSDPTest):
    world_size = 2

    def test_no_body_runs_before_every_rank_is_patched(self):
        """Otherwise the first rank's body could communicate with peers that still run the original."""
        reported = []
        barrier = dist.barrier

        def reporting_barrier(*args, **kwargs):
            reported.append(current(patch_all_reduce) is self.replacement)
            return barrier(*args, **kwargs)

        dist.barrier = reporting_barrier
        try:
            with patch_all_reduce(self.replacement):
                self.assertEqual(reported, [False, False, True])
            self.assertEqual(reported, [False, False, True, True])
        finally:
            dist.barrier = barrier


class TestPatchesAcrossThreads(PatchChecks, FSDPTestMultiThread):
    def test_early_raiser_that_enters_again_leaves_no_replacement_behind(self):
        """Rank 0 raises and enters again while others are in their bodies. What it finds then must not be restored."""
        for _ in range(20):
            with self.assertRaises(StopBodyError), patch_all_reduce(self.replacement):
                if self.rank != 0:
                    time.sleep(0.01)
                raise StopBodyError
            with patch_all_reduce(self.replacement):
                pass
            dist.barrier()
            self.assertIs(dist.all_reduce, ORIGINALS[patch_all_reduce])
            dist.barrier()

    def test_thread_that_raises_early_leaves_the_patch_of_others(self):
        """A rank in its body keeps the replacement after another rank has raised."""
        left = SHARED.setdefault("left", threading.Event())
        context = patch_all_reduce(self.replacement)
        with self.assertRaises(StopBodyError):
            with context:
                if self.rank == 0:
                    raise StopBodyError
                left.wait(60)
                self.assertIs(dist.all_reduce, self.replacement)
                raise StopBodyError
        if self.rank == 0:
            left.set()
        dist.barrier()
        self.assertIs(dist.all_reduce, ORIGINALS[patch_all_reduce])
