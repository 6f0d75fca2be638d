"""Lightning within a byte budget, by one line: `python examples/lightning_training.py 60%`."""

import sys

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import remat.torch


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1)) for _ in range(16)]
        self.model = nn.Sequential(*layers, nn.Linear(256, 10))

    def training_step(self, batch):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
data = TensorDataset(torch.randn(2048, 256), torch.randint(10, (2048,)))
limit = remat.torch.trainers.lightning_callback(sys.argv[1] if sys.argv[1:] else "60%")
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[limit]
)
trainer.fit(Classifier(), DataLoader(data, batch_size=512))
print(limit.plans[0], f"last loss {trainer.callback_metrics['loss']:.4f}", sep="\n")
