"""What a training step costs with noise: plain SGD, SmoothOut, AdaSmoothOut, the 2018 way, SAM. All in one run.

Each round times a block of steps of each, and waits for the device after a block, not after a step: work of the host
that overlaps the device's is hidden, as it is in training. A ratio is a step's time over plain SGD's in the same round;
SmoothOut and AdaSmoothOut have many rounds with plain SGD, the others a few of their own.
Then drawing and restoring alone: one call that the host makes to an idle device, and the device's share of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from record import Rows, arguments, device_milliseconds, finish, in_turns, ratios, summary
from torch import Tensor, nn

from smoothout import AdaSmoothOut, SmoothOut
from smoothout.lab.models import build
from smoothout.select import is_normalisation


class Transformer(nn.Module):
    """The size of GPT-2 small: 12 layers, width 768, 12 heads, 50,257 tokens, tied output, 124 M parameters."""

    def __init__(self, tokens: int = 50257, width: int = 768, layers: int = 12, heads: int = 12, length: int = 1024):
        super().__init__()
        self.embed, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


def small_conv_net() -> nn.Module:
    """5.1 M parameters, for 32 × 32 images."""
    layers: list[nn.Module] = []
    widths = [3, 64, 128, 256, 512, 512, 256]
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if i < 3 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def images(batch: int, size: int, classes: int) -> Callable[[str], tuple[Tensor, Tensor]]:
    def make(device: str) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, 3, size, size, device=device)
        memory_format = torch.channels_last if device == "cuda" else torch.contiguous_format
        return x.contiguous(memory_format=memory_format), torch.randint(classes, (batch,), device=device)

    return make


def tokens(device: str) -> tuple[Tensor, Tensor]:
    return tuple(torch.randint(50257, shape, device=device) for shape in ((32, 1024), (32 * 1024,)))


# The model, its batch, rounds, and steps in a block.
CASES = {
    "cuda": {
        "ResNet18 at 224, batch 256": (lambda: build("resnet18"), images(256, 224, 1000), 25, 3),
        "GPT-2-small size, 32 × 1024 tokens": (Transformer, tokens, 9, 2),
        "ResNet44, batch 2048": (lambda: build("resnet44"), images(2048, 32, 10), 31, 3),
        "ResNet44, batch 128": (lambda: build("resnet44"), images(128, 32, 10), 31, 3),
    },
    "cpu": {"conv net of 5.1 M at 32 × 32, batch 32": (small_conv_net, images(32, 32, 10), 25, 1)},
}
CLOSE = ("plain SGD", "SmoothOut", "AdaSmoothOut")  # differ by per cents: many rounds, of these three alone
FEW_ROUNDS = 5  # for the others, with plain SGD and AdaSmoothOut again to compare with


class The2018Way:
    """A loop over the tensors, a few operations for each; w + θ − θ is not w exactly."""

    def __init__(self, model: nn.Module, strength: float, by_filter: bool) -> None:
        modules = [m for m in model.modules() if not is_normalisation(m)]
        self.parameters = list({p: None for m in modules for p in m.parameters(recurse=False)})
        self.strength, self.by_filter = strength, by_filter

    def perturb(self) -> None:
        self.noise = []
        for p in self.parameters:
            noise = (torch.rand_like(p.data) - 0.5) * (2 * self.strength)
            if self.by_filter and p.ndim > 1:
                shape = (-1, *[1] * (p.ndim - 1))
                norm_w = p.data.reshape(p.shape[0], -1).norm(p=2, dim=1).view(shape)
                norm_n = noise.reshape(p.shape[0], -1).norm(p=2, dim=1).view(shape)
                noise = noise * (self.strength * norm_w / (norm_n + 1e-6))
            p.data.add_(noise)
            self.noise.append(noise)

    def restore(self) -> None:
        for p, noise in zip(self.parameters, self.noise):
            p.data.sub_(noise)


def steps(model: nn.Module, batch: tuple[Tensor, Tensor], device: str) -> dict[str, Callable[[], None]]:
    """One training step of each method on the same model and batch."""
    x, y = batch
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    smooth, ada = SmoothOut(model), AdaSmoothOut(model)
    old, old_ada = The2018Way(model, 0.0375, by_filter=False), The2018Way(model, 0.15, by_filter=True)

    def backward() -> None:
        with torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext():
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step(context: Callable[[], AbstractContextManager] = nullcontext) -> None:
        with context():
            backward()
        update()

    def old_step(way: The2018Way) -> None:
        way.perturb()
        backward()
        way.restore()
        update()

    def sam_step() -> None:
        backward()
        parameters = [p for p in model.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        saved = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            ascent = torch._foreach_mul(gradients, 0.05 / (norm + 1e-12))
            torch._foreach_add_(parameters, ascent)
        optimizer.zero_grad()
        backward()
        with torch.no_grad():
            torch._foreach_copy_(parameters, saved)
        update()

    return {
        "plain SGD": step,
        "SmoothOut": lambda: step(smooth.perturbed),
        "AdaSmoothOut": lambda: step(ada.perturbed),
        "SmoothOut, 2018": lambda: old_step(old),
        "AdaSmoothOut, 2018": lambda: old_step(old_ada),
        "SAM": sam_step,
    }


def draw_and_restore(model: nn.Module, device: str, rounds: int) -> dict[str, dict]:
    """Drawing and restoring alone: as called from Python, and what the device works."""

    def ours(smooth: SmoothOut) -> Callable[[], None]:
        def cycle() -> None:
            with smooth.perturbed():
                pass

        return cycle

    def theirs(way: The2018Way) -> Callable[[], None]:
        def cycle() -> None:
            way.perturb()
            way.restore()

        return cycle

    cycles = {
        "SmoothOut": ours(SmoothOut(model)),
        "AdaSmoothOut": ours(AdaSmoothOut(model)),
        "SmoothOut, 2018": theirs(The2018Way(model, 0.0375, by_filter=False)),
        "AdaSmoothOut, 2018": theirs(The2018Way(model, 0.15, by_filter=True)),
    }
    called = {name: {"ms": summary(times)} for name, times in in_turns(cycles, rounds, device).items()}
    if device == "cuda":
        for name, cycle in cycles.items():
            called[name]["device ms"] = summary(device_milliseconds(cycle))
    return called


def main() -> None:
    args = arguments(__doc__, rounds=0, only="")
    rows = Rows(args)
    for case, (make, make_batch, rounds, block) in CASES[args.device].items():
        if args.only not in case:
            continue
        torch.manual_seed(0)
        model = make().to(args.device)
        if args.device == "cuda" and any(isinstance(m, nn.Conv2d) for m in model.modules()):
            model.to(memory_format=torch.channels_last)
        methods = steps(model, make_batch(args.device), args.device)
        rounds = args.rounds or rounds
        times = in_turns({name: methods[name] for name in CLOSE}, rounds, args.device, block=block)
        over_plain = ratios(times, "plain SGD")
        alone = draw_and_restore(model, args.device, min(rounds, 9))
        far = {name: step for name, step in methods.items() if name != "SmoothOut"}
        far_times = in_turns(far, min(rounds, FEW_ROUNDS), args.device, block=block)
        times, over_plain = far_times | times, ratios(far_times, "plain SGD") | over_plain
        for name in methods:
            row = {"case": case, "method": name, "step ms": summary(times[name]), "÷ plain": over_plain[name]}
            for key, value in alone.get(name, {}).items():
                row[f"draw + restore, {key}"] = value
            if name == "SAM":
                pairs = zip(far_times["SAM"], far_times["AdaSmoothOut"])
                row["SAM ÷ AdaSmoothOut"] = summary(sam / ada for sam, ada in pairs)
            rows.append(row)
        del model
    columns = ["case", "method", "step ms", "÷ plain", "draw + restore, ms"]
    columns += ["draw + restore, device ms"] * (args.device == "cuda") + ["SAM ÷ AdaSmoothOut"]
    blocks = ", ".join(f"{case}: {block}" for case, (_, _, _, block) in CASES[args.device].items())
    notes = (
        "median (first to third quartile); bf16 autocast and channels-last on CUDA; strengths 0.0375 and 0.15; "
        f"steps between two synchronisations: {blocks}"
    )
    finish(args, columns, rows, notes)


if __name__ == "__main__":
    main()
