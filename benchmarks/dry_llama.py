"""Two training steps of a Llama of 70 billion parameters under FSDP2: a program for dry runs.

    python -m torch_ext run --dry --world 1024 --memory 80GiB benchmarks/dry_llama.py

HSDP: parameters are sharded over up to 128 ranks and replicated over the others. Each block is checkpointed, computes
in bfloat16 and reduces in float32. A rank trains on one sequence of 8192 tokens. ``LAYERS`` in the environment: how
many blocks, of 80.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# As https://github.com/meta-llama/llama-models, Llama 3.1 70B.
DIM, HEADS, KV_HEADS, HIDDEN, WORDS = 8192, 64, 8, 28672, 128256
LAYERS = int(os.environ.get("LAYERS", "80"))
TOKENS = 8192
SHARDS = 128


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        part = DIM // HEADS
        self.query, self.out = linear(DIM, DIM), linear(DIM, DIM)
        self.key, self.value = linear(DIM, KV_HEADS * part), linear(DIM, KV_HEADS * part)
        self.gate, self.up, self.down = linear(DIM, HIDDEN), linear(DIM, HIDDEN), linear(HIDDEN, DIM)
        self.norms = nn.ModuleList((nn.RMSNorm(DIM), nn.RMSNorm(DIM)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, DIM)
        normed = self.norms[0](x)
        heads = (
            project(normed).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def main() -> None:
    device = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    size = dist.get_world_size()
    shards = min(SHARDS, size)
    mesh = init_device_mesh(device.type, (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(WORDS, DIM),
            *(checkpoint_wrapper(Block()) for _ in range(LAYERS)),
            nn.RMSNorm(DIM),
            linear(DIM, WORDS),
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model[1 : LAYERS + 1]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        words, targets = torch.randint(WORDS, (2, 1, TOKENS)).to(device)
        loss = F.cross_entropy(model(words).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
