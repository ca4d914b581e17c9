"""Distributed data parallel: every rank draws its own θ, so N ranks average N draws at no cost.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from smoothout import AdaSmoothOut

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
smooth = AdaSmoothOut(model, strength=0.15)  # shared_noise=True would draw the same θ on all ranks

for epoch in range(15):
    for batch in torch.randperm(1400).split(200):
        mine = batch.chunk(world)[rank]
        with smooth.perturbed():
            F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()

for p in model.parameters():  # the ranks agree to the last bit
    copies = [torch.empty_like(p) for _ in range(world)]
    dist.all_gather(copies, p.detach())
    assert all(torch.equal(c, copies[0]) for c in copies)
if rank == 0:
    with torch.no_grad():
        accuracy = (model.module(x[1400:]).argmax(1) == y[1400:]).float().mean()
    print(f"test accuracy {accuracy:.3f} on {world} ranks")
dist.barrier()  # gloo's threads let go of their tensors: Python must not end before they have
dist.destroy_process_group()
