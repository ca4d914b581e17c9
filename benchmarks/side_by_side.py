"""Seeds of C1 side by side on one GPU against the same one after another: seconds an epoch, evaluation included.

Without `--data-root` the images are random bytes, which take the same time.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

from epoch_time import data
from record import Rows, arguments, finish, summary

from smoothout.lab.config import resolve
from smoothout.lab.runs import load_run
from smoothout.lab.train import build
from smoothout.lab.train.start import Options, seed_folder, train_seeds

WARM_UP = 4  # epochs until the last, short batch is in a graph


def seconds(folder: Path, configs: list, together: int, device: str) -> list[float]:
    options = Options(device=device, together=together, quiet=True, checkpoint_every=1000)
    train_seeds(configs, lambda config: seed_folder(folder, config), options)
    return [m.seconds for c in configs for m in load_run(seed_folder(folder, c)).metrics[WARM_UP:-1]]


def main() -> None:
    args = arguments(__doc__, data_root="", seeds=5, epochs=14, batches="256,5000", methods="plain,smoothout")
    dataset = data(args.data_root)
    rows = Rows(args)
    with mock.patch.object(build, "load_dataset", return_value=dataset), tempfile.TemporaryDirectory() as out:
        for batch_size in map(int, args.batches.split(",")):
            for method in args.methods.split(","):
                base = resolve(
                    dataset="cifar10", model="c1", method=method, batch_size=batch_size, epochs=args.epochs,
                    amp="bf16", channels_last=True, preset="paper",
                )  # fmt: skip
                configs = [replace(base, seed=seed) for seed in range(args.seeds)]
                folder = Path(out, f"{method}-{batch_size}")
                times = {n: seconds(folder / str(n), configs, n, args.device) for n in (1, args.seeds)}
                alone, shared = summary(times[1]), summary(times[args.seeds])
                rows.append(
                    {"method": method, "batch": batch_size, "s an epoch, alone": alone, "side by side": shared}
                    | {"throughput": alone["median"] / shared["median"]}
                )
    finish(args, ["method", "batch", "s an epoch, alone", "side by side", "throughput"], rows)


if __name__ == "__main__":
    main()
