"""Lightning's Trainer. Arguments: ddp or fsdp, and cpu to use no device."""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import nn

kind, device = sys.argv[1], sys.argv[2:]


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.loss = torch.zeros(())

    def training_step(self, batch, index):
        self.loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        return self.loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
inputs = torch.randn(64, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
trainer = lightning.Trainer(
    accelerator=device[0] if device else "cuda",
    devices=2,
    strategy=FSDPStrategy() if kind == "fsdp" else DDPStrategy(),
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
if trainer.is_global_zero:
    loss = model.loss
    print("result", f"{loss.item():.7f}", loss.device.type, type(trainer.strategy).__name__, flush=True)
