"""SmoothOut in a plain training loop: two lines more than without it.

python examples/plain_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from smoothout import AdaSmoothOut

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
train, test = slice(0, 1400), slice(1400, None)

model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
smooth = AdaSmoothOut(model, strength=0.15)  # 1

for epoch in range(20):
    for batch in torch.randperm(1400).split(100):
        with smooth.perturbed():  # 2
            loss = F.cross_entropy(model(x[train][batch]), y[train][batch])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

model.eval()
with torch.no_grad():
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean()
print(smooth.summary())
print(f"test accuracy {accuracy:.3f} after {smooth.step_count} steps")
