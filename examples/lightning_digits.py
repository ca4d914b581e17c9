"""Lightning: one callback more.

python examples/lightning_digits.py
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from smoothout.integrations.lightning import SmoothOutCallback


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


pl.seed_everything(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=100, shuffle=True)
test = DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=397)

smooth = SmoothOutCallback(0.15, scale="filter")  # AdaSmoothOut: ‖θᵢ‖ = 0.15·‖wᵢ‖ for every filter i
trainer = pl.Trainer(max_epochs=20, callbacks=[smooth], logger=False, enable_checkpointing=False, log_every_n_steps=14)
trainer.fit(Digits(), train, test)
print(smooth.smooth.summary())
print(f"test accuracy {trainer.callback_metrics['accuracy']:.3f}")
