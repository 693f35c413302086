"""A small transformer whose input embedding and output projection share a parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_ext.compat.fsdp import HYBRID_SHARD_ZERO2
from torch_ext.testing._internal._fsdp.models.base import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestModel,
    _maybe_wrap_fsdp,
    _move_to_device,
    init_by_mode,
)

__all__ = ["TransformerWithSharedParams"]

_VOCABULARY, _WIDTH, _FEEDFORWARD, _BATCH = 23, 16, 8, 2
_SOURCE_STEPS, _TARGET_STEPS = 6, 4

_HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, HYBRID_SHARD_ZERO2})


class TransformerWithSharedParams(FSDPTestModel):
    """Sequence to sequence over a vocabulary of 23, with a float and an integer buffer
    and an optional batch norm: source ``(6, 2)`` and target ``(4, 2)`` token ids, time
    before batch, to output ``(4, 2, 23)``.

    With ``deterministic``, all instances have the same weights and are in evaluation
    mode, which turns dropout and batch statistics off.
    """

    vocab_bias: torch.Tensor  # 1D, _WIDTH
    long_buffer: torch.Tensor  # 1D, _WIDTH, integers

    def __init__(
        self,
        group: Any,
        device_init_mode: DEVICEInitMode,
        add_bn: bool,
        deterministic: bool,
    ) -> None:
        super().__init__()
        self.rank, self.world_size, self.bs = group.rank(), group.size(), _BATCH
        if deterministic:
            torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.transformer = nn.Transformer(
            _WIDTH,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=_FEEDFORWARD,
            dropout=0.1,
        )
        self.output_proj = nn.Linear(_WIDTH, _VOCABULARY)
        self.output_proj.weight = self.embed_tokens.weight
        self.register_buffer("vocab_bias", torch.ones(_WIDTH))
        self.register_buffer("long_buffer", torch.zeros(_WIDTH, dtype=torch.long))
        self.bn = nn.BatchNorm1d(_BATCH) if add_bn else nn.Identity()
        _move_to_device(self, device_init_mode == DEVICEInitMode.DEVICE_BEFORE)
        if deterministic:
            self.eval()

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        # Callers then draw the same numbers in every step, but others on each rank.
        torch.manual_seed(1 + self.rank)
        source, target = (
            torch.arange(steps * self.bs, device=device)
            for steps in (_SOURCE_STEPS, _TARGET_STEPS)
        )
        return source.view(-1, self.bs), target.view(-1, self.bs)

    def forward(self, src_ids: torch.Tensor, tgt_ids: torch.Tensor) -> torch.Tensor:
        source = self.embed_tokens(src_ids)
        source = source + self.vocab_bias + self.long_buffer.type_as(source)
        target = self.bn(self.embed_tokens(tgt_ids))
        return self.output_proj(self.transformer(source, target))

    def get_loss(self, input: Any, output: torch.Tensor) -> torch.Tensor:
        targets = input[1].flatten()
        return F.cross_entropy(output.flatten(0, 1), targets, reduction="sum")

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def get_ignored_modules(self) -> list[nn.Module]:
        """Return the modules that tests of ``ignored_modules`` exclude from FSDP."""
        return [self.transformer]

    @staticmethod
    def init(
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        add_bn: bool = True,
    ) -> nn.Module | FSDP:
        """Return a transformer. ``RECURSIVE`` wraps its encoder and decoder layers and
        the root, unless ``fsdp_kwargs`` has another ``auto_wrap_policy``. For hybrid
        sharding ``group`` may be a pair, whose first group is the model's.
        """
        own_group = group[0] if isinstance(group, tuple) else group
        # Without a group, FSDP creates the two groups of these strategies itself.
        strategy = (fsdp_kwargs or {}).get("sharding_strategy")
        derives = strategy in _HYBRID and not isinstance(group, tuple)
        layers = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}

        def build(wrap: bool, **kwargs: Any) -> nn.Module:
            model = TransformerWithSharedParams(
                own_group, device_init_mode, add_bn, deterministic
            )
            kwargs.setdefault("auto_wrap_policy", ModuleWrapPolicy(layers))
            return _maybe_wrap_fsdp(model, wrap, None if derives else group, **kwargs)

        return init_by_mode(build, fsdp_init_mode, device_init_mode, fsdp_kwargs)
