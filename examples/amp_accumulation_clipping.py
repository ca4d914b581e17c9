"""Mixed precision, gradient accumulation, clipping and a schedule, with attach(): the loop does not know of SmoothOut.

python examples/amp_accumulation_clipping.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from smoothout import AdaSmoothOut, schedule

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(digits.target)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
steps = 10 * 14
rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)

smooth = AdaSmoothOut(model, strength=0.15, schedule=schedule.Linear(steps))  # the noise grows from nothing
smooth.attach(optimizer)  # one θ for all micro-batches of a step; use draw="forward" for a new one each

for epoch in range(10):
    for batch in torch.randperm(1400).split(100):
        for part in batch.chunk(4):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x[part].to(device)), y[part].to(device)) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # the weights are clean here, whatever the gradients are of
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rates.step()

model.eval()
with torch.no_grad():
    accuracy = (model(x[1400:].to(device)).argmax(1).cpu() == y[1400:]).float().mean()
print(f"test accuracy {accuracy:.3f}, final strength {smooth.current_strength:.3f}")
