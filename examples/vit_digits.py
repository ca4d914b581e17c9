"""A small vision transformer on the digits: every 2×2 patch is a token.

python examples/vit_digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from smoothout import AdaSmoothOut, schedule

EPOCHS, BATCH = 20, 100


class ViT(nn.Module):
    def __init__(self, width=48, depth=2, heads=4):
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(digits.target)

model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
steps = EPOCHS * 1400 // BATCH
rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
# Filters of attention are rows of its projections; LayerNorm takes no noise.
smooth = AdaSmoothOut(model, strength=0.15, schedule=schedule.Warmup(steps // 10))

for epoch in range(EPOCHS):
    model.train()
    for batch in torch.randperm(1400).split(BATCH):
        with smooth.perturbed():
            F.cross_entropy(model(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()

model.eval()
with torch.no_grad():
    accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
print(smooth.summary())
print(f"test accuracy {accuracy:.3f} after {smooth.step_count} steps")
