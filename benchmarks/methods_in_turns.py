"""What noise costs ResNet44 in GPU time: epochs of Table 2's rows in preset ours, in turns.

One process, an epoch of each in every round, and its time over the plain one's in that round: the runs of Table 2 met
different machines and versions of the step. Without `--data-root` the images are random bytes, which take as long.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

import torch
from epoch_time import data, epoch
from record import Rows, arguments, finish, in_turns, ratios, summary

from smoothout.lab.config import Config
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.train.loop import Surroundings, Trainer

OURS = Setting("paper", "ours")
SETTINGS = ("strength", "draws", "clean_share", "perturb_bn")
UNTIL_CAPTURED = 4  # epochs: the short last batch is in a graph from the third on


def configs() -> dict[str, Config]:
    """By name, the plain one first. The strength changes no time."""
    found = {"plain": resnet44(OURS, "plain")}
    for method in ("smoothout", "adasmoothout"):
        config = resnet44(OURS, method)
        found[method] = replace(config, perturb_bn=False)
        found[f"{method}, noise on BatchNorm's parameters, too"] = replace(config, perturb_bn=True)
    return found


def main() -> None:
    torch.backends.cudnn.benchmark = True  # as training has it
    args = arguments(__doc__, data_root="", rounds=9)
    dataset = data(args.data_root)
    around = Surroundings(device=torch.device(args.device), cuda_graphs=args.device == "cuda")
    trainers = {name: Trainer(config, dataset, around) for name, config in configs().items()}
    numbers = {name: count() for name in trainers}

    def one_more(name: str) -> None:
        epoch(trainers[name], next(numbers[name]))

    times = in_turns(
        {name: partial(one_more, name) for name in trainers}, args.rounds, args.device, warm_up=UNTIL_CAPTURED
    )
    over_plain = ratios(times, "plain")
    rows = Rows(args)
    for name, values in times.items():
        settings = {each: getattr(trainers[name].config, each) for each in SETTINGS}
        rows.append({"method": name, **settings, "ms an epoch": summary(values), "over plain": over_plain[name]})
    finish(args, ["method", "ms an epoch", "over plain"], rows)


if __name__ == "__main__":
    main()
