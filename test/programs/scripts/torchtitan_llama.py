"""torchtitan's debug model of Llama 3. Arguments: fsdp, tp, pp or cp, which two of four ranks do besides FSDP2 (fsdp:
none do), and cpu to use no device. Rank 0 prints the loss of the last step.
"""

import json
import os
import random
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

kind, on_host = sys.argv[1], sys.argv[2:] == ["cpu"]
if on_host:  # torchtitan knows accelerators only
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device: "host"
    torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1)
    torch.cpu.current_device = lambda: 0
    torch.cpu.memory_stats = lambda device: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    os.environ["LOCAL_RANK"] = "0"

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402

# In Triton, for a mixture of experts, which this model has not.
sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

assets = Path(f"assets{os.environ['RANK']}")
assets.mkdir()
words = [f"w{number}" for number in range(100)]
vocabulary = {word: number for number, word in enumerate(["[UNK]", "<s>", "</s>", *words])}
added = [
    {"id": number, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    | {"normalized": False}
    for word, number in vocabulary.items()
    if number < 3
]
model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
whole = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"}, "model": model}
(assets / "tokenizer.json").write_text(json.dumps(whole))
(assets / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
choose = random.Random(0)
texts = [json.dumps({"text": " ".join(choose.choices(words, k=20))}) for _ in range(64)]
(assets / "data").mkdir()
(assets / "data" / "texts.json").write_text("\n".join(texts))
os.environ["HF_DATASETS_CACHE"] = str(assets / "cache")

options = {
    "job.dump_folder": assets,
    "model.hf_assets_path": assets,
    "training.dataset_path": assets / "data",
    "training.steps": 2,
    "training.seq-len": 32,
    "training.local-batch-size": 2,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 1,
}
if kind != "fsdp":
    name = {"tp": "tensor", "pp": "pipeline", "cp": "context"}[kind]
    options[f"parallelism.{name}_parallel_degree"] = 2
if on_host:
    options["optimizer.implementation"] = "foreach"
trainer = Trainer(ConfigManager().parse_args([f"--{name}={value}" for name, value in options.items()]))
with torch.no_grad():  # however many ranks share a weight
    for part in trainer.model_parts:
        for module in part.modules():
            if on_host and isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        for name, parameter in part.named_parameters():
            value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            value *= 0.02
            if isinstance(parameter, DTensor):
                parameter.copy_(
                    distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
                )
            else:
                parameter.copy_(value)
losses = []
trainer.metrics_processor.log = lambda step, loss, *rest, **named: losses.append(loss)
trainer.train()
last = torch.tensor(losses[-1], device=trainer.device)  # below zero where a rank has not the pipeline's last stage
dist.all_reduce(last, dist.ReduceOp.MAX)
trainer.close()
if dist.get_rank() == 0:
    print("result", f"{last.item():.7f}", last.device.type, type(trainer.model_parts[0]).__name__, flush=True)
dist.destroy_process_group()
