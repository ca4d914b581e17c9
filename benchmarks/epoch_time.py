"""Seconds an epoch of ResNet44, batch 2048 as 16 ghosts of 128, AdaSmoothOut with a draw for each ghost.

BatchNorm, augmentation and clipping are on. Compared: whole updates in one CUDA graph, the ghosts stacked (one launch a
layer) or on parallel streams (by the number of streams), one graph a ghost, and the plain loop; beside each the loss
after 50 steps. And how long the test images take, judged by the network and with BatchNorm folded into convolutions
(the loss beside it is that on them). Without `--data-root` the images are random bytes, which take the same time.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from record import Rows, arguments, finish, summary

from smoothout.lab.config import resolve
from smoothout.lab.data import Dataset, load
from smoothout.lab.data.dataset import Split
from smoothout.lab.train import whole_step
from smoothout.lab.train.evaluate import evaluated, in_numbers
from smoothout.lab.train.loop import Surroundings, Trainer
from smoothout.lab.train.regime import learning_rate
from smoothout.lab.train.whole_step import WholeStep

STEPS_BEFORE_THE_LOSS = 50


def data(root: str) -> Dataset:
    if root:
        return load("cifar10", Path(root))
    torch.manual_seed(0)
    parts = [
        Split(torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (n,)), (0.5,) * 3, (0.25,) * 3)
        for n in (50_000, 1000)
    ]
    return Dataset("random", *parts, class_names=tuple("0123456789"), image_shape=(3, 32, 32))


def trainer(method: str, dataset: Dataset, device: str, graphs: bool) -> Trainer:
    config = resolve(
        dataset="cifar10", model="resnet44", method=method, batch_size=2048, epochs=400, preset="ours", clip=5.0,
        amp="bf16", channels_last=True, strength_schedule="constant",
    )  # fmt: skip
    return Trainer(config, dataset, Surroundings(device=torch.device(device), cuda_graphs=graphs))


def epoch(run: Trainer, number: int) -> None:
    """The steps alone, without judging."""
    run.steps.begin(number, 0)
    for step in range(len(run.batches)):
        run._set_rate(learning_rate(run.config, number, step, len(run.batches)))
        run.steps.step(step)


def measured(run: Trainer, epochs: int) -> dict[str, object]:
    """The loss after 50 steps, and the time of `epochs` after the third; of none, the time of the second."""
    warm_up = -(-STEPS_BEFORE_THE_LOSS // len(run.batches))
    seconds = [timed(run, number) for number in range(warm_up)]
    loss = float(run._losses[STEPS_BEFORE_THE_LOSS - 1 - (warm_up - 1) * len(run.batches)])
    if epochs:
        epoch(run, warm_up)  # the short last batch is captured in the third
        seconds = [timed(run, number) for number in range(warm_up + 1, warm_up + 1 + epochs)]
    return {"s an epoch": summary(seconds if epochs else seconds[-1:]), "loss after 50 steps": loss}


def timed(run: Trainer, number: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    epoch(run, number)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def judged(run: Trainer, quickly: bool, times: int) -> dict[str, object]:
    seconds, loss = [], float("nan")
    for _ in range(times + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        network, precision = run._quick_network if quickly else None, run.update.precision()
        loss = in_numbers(evaluated(run.model, run.test_batches, precision=precision, network=network)).loss
        seconds.append(time.perf_counter() - start)
    return {"s an epoch": summary(seconds[2:]), "loss after 50 steps": loss}


def main() -> None:
    torch.backends.cudnn.benchmark = True  # as training has it
    args = arguments(__doc__, data_root="", epochs=5, stacked=1, lanes="4,8,16", slow_loops=1)
    dataset = data(args.data_root)
    rows = Rows(args)
    ways = [("stacked", 0)] if args.stacked else []
    ways += [(f"{lanes} streams", int(lanes)) for lanes in args.lanes.split(",") if lanes]
    for name, lanes in ways:
        for method in ("adasmoothout", "plain"):
            whole_step.LANES, whole_step.STACKED = lanes, not lanes
            run = trainer(method, dataset, args.device, graphs=True)
            assert isinstance(run.steps, WholeStep)
            assert bool(run.steps._stacks) == (not lanes)
            torch.cuda.reset_peak_memory_stats()
            row = {"method": method, "step": f"one graph, {name}", **measured(run, args.epochs)}
            rows.append(row | {"peak GiB": torch.cuda.max_memory_allocated() / 2**30})
            assert run.steps._graphs
            if run._quick_network is not None and name == "stacked":
                for how, quickly in (("the network", False), ("folded", True)):
                    what = f"judging {len(dataset.test):,} images after {method}"
                    rows.append({"method": what, "step": how, **judged(run, quickly, args.epochs)})
            del run
    for name, graphs in (("one graph a ghost", True), ("plain loop", False)) if args.slow_loops else ():
        run = trainer("adasmoothout", dataset, args.device, graphs)
        if graphs:
            run.steps = whole_step.OneByOne(run.method, run.batches, whole_step.Sums(run._losses, run._correct))
        rows.append({"method": "adasmoothout", "step": name, **measured(run, 0)})
        del run
    finish(args, ["method", "step", "s an epoch", "loss after 50 steps", "peak GiB"], rows)


if __name__ == "__main__":
    main()
