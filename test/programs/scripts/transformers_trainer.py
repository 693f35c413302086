"""transformers' Trainer on a Llama made from a configuration. Arguments: ddp or fsdp, and cpu to use no device."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

kind, device = sys.argv[1], sys.argv[2:]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (64, 16))]
sharded = {}
if kind == "fsdp":
    sharded = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=device == ["cpu"],
        **sharded,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)
    loss = trainer.train().training_loss
if arguments.process_index == 0:
    print("result", f"{loss:.7f}", arguments.device.type, type(trainer.model_wrapped).__name__, flush=True)
