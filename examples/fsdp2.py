"""FSDP2: weights are sharded, a logical tensor has one θ, each rank draws only its part of it.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from smoothout import AdaSmoothOut

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

model = nn.Sequential(nn.Linear(64, 127), nn.ReLU(), nn.Linear(127, 10))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
smooth = AdaSmoothOut(model, strength=0.15)  # after fully_shard
smooth.attach(optimizer)

for epoch in range(15):
    for batch in torch.randperm(1400).split(200):
        mine = batch.chunk(world)[rank]
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()

model.eval()
with torch.no_grad():
    accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
if rank == 0:
    print(f"test accuracy {accuracy:.3f} on {world} ranks")
dist.barrier()  # gloo's threads let go of their tensors: Python must not end before they have
dist.destroy_process_group()
