"""ResNet44 on CIFAR-10 at 2048 in ghosts of 128, by a loop that uses nothing of this package: a check on the fast step.

Plain torch: convolutions over the whole batch, BatchNorm ghost by ghost, SGD, the regime of the paper's row. With
`--strength` SmoothOut with one draw a step, by a clone and a copy. The accuracies stand beside those of
`smoothout train` with the same settings; no two runs are equal, since data order and noise come from other generators.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from record import Rows, arguments, finish
from torch import Tensor, nn

BATCH, GHOSTS, RATE, MOMENTUM, DECAY = 2048, 16, 0.4, 0.9, 1e-4
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MILESTONES = (81, 122, 164)  # of 200 epochs


class GhostNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return torch.cat([super(GhostNorm, self).forward(ghost) for ghost in input.chunk(GHOSTS)])


def convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.normal_(layer.weight, 0, math.sqrt(2 / (size * size * outputs)))
    return nn.Sequential(layer, GhostNorm(outputs))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet44() -> nn.Sequential:
    widths = [16] * 8 + [32] * 7 + [64] * 7
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    return nn.Sequential(
        convolution(3, 16, 3, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def read(folder: Path, names: list[str], device: str) -> tuple[Tensor, Tensor]:
    rows = np.concatenate([np.fromfile(folder / name, np.uint8).reshape(-1, 3073) for name in names])
    return (
        torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)).to(device),
        torch.from_numpy(rows[:, 0].astype(np.int64)).to(device),
    )


def normalised(images: Tensor) -> Tensor:
    mean, spread = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (MEAN, SPREAD))
    return ((images.float() / 255 - mean) / spread).contiguous(memory_format=torch.channels_last)


def augmented(images: Tensor) -> Tensor:
    """Padded by 4 with grey, cropped and flipped at random."""
    n, device = len(images), images.device
    padded = F.pad(images, (4, 4, 4, 4), value=127)
    across, down = (torch.randint(9, (n, 1), device=device) + torch.arange(32, device=device) for _ in range(2))
    across = torch.where(torch.rand(n, 1, device=device) < 0.5, across.flip(1), across)
    each = torch.arange(n, device=device).view(n, 1, 1)
    return padded.permute(0, 2, 3, 1)[each, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


def rate_at(update: int, epochs: int, per_epoch: int, warm_up: int) -> float:
    decays = sum(update // per_epoch >= round(each * epochs / 200) for each in MILESTONES)
    return RATE * 0.1**decays * (min(1.0, (update + 1) / (warm_up * per_epoch)) if warm_up else 1.0)


def main() -> None:
    args = arguments(__doc__, data_root="", epochs=100, warm_up=0, clip=0.0, strength=0.0, seed=0, images=50_000)
    folder = Path(args.data_root) / "cifar-10-batches-bin"
    images, labels = read(folder, [f"data_batch_{i}.bin" for i in range(1, 6)], args.device)
    images, labels = images[: args.images], labels[: args.images]
    test_images, test_labels = read(folder, ["test_batch.bin"], args.device)
    torch.manual_seed(args.seed)
    model = resnet44().to(args.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    noisy = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)] + [model[-1].bias]
    half = torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")
    per_epoch = math.ceil(len(images) / BATCH)
    rows, update = Rows(args), 0
    for epoch in range(1, args.epochs + 1):
        start, model = time.perf_counter(), model.train()
        seen, right = torch.zeros((), device=args.device), torch.zeros((), device=args.device)
        for batch in torch.randperm(len(images), device=args.device).split(BATCH):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(update, args.epochs, per_epoch, args.warm_up)
            clean = [w.detach().clone() for w in noisy] if args.strength else []
            for w in noisy if args.strength else []:
                w.data.add_(torch.empty_like(w).uniform_(-args.strength, args.strength))
            with half:
                outputs = model(normalised(augmented(images[batch])))
            # The mean over ghosts, which in a short last batch may differ in size by one.
            parts = zip(outputs.float().chunk(GHOSTS), labels[batch].chunk(GHOSTS))
            losses = [F.cross_entropy(*part) for part in parts]
            (sum(losses) / len(losses)).backward()
            for w, value in zip(noisy, clean):
                w.data.copy_(value)
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            seen += torch.stack(losses).detach().mean() * len(batch)
            right += (outputs.argmax(1) == labels[batch]).sum()
            update += 1
        model.eval()
        with torch.no_grad(), half:
            guesses = torch.cat([model(normalised(part)).argmax(1) for part in test_images.split(2000)])
        rows.append(
            {
                "epoch": epoch,
                "train loss": float(seen) / len(images),
                "train accuracy": float(right) / len(images),
                "test accuracy": float((guesses == test_labels).float().mean()),
                "seconds": time.perf_counter() - start,
            }
        )
    finish(args, list(rows[-1]), rows)


if __name__ == "__main__":
    main()
