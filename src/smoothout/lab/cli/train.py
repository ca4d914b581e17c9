"""`smoothout train`: its flags are the settings of the configuration, one for one."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from smoothout.lab.cli.introduction import Introduction, wrapped
from smoothout.lab.config import Config, read_toml, resolve
from smoothout.lab.presets import GHOST_BATCH, PRESETS, Preset
from smoothout.lab.train.regime import regime_of
from smoothout.lab.train.start import Options, seed_folder, train, train_seeds

# \b keeps the lines that follow as they are.
HELP = """Train a network, with or without SmoothOut. The same command again resumes it, or says that it is done.

Settings that are not given come from the network's usual training and
the preset; --dry-run prints them all.

\b
smoothout train --epochs 20 --out runs/first
smoothout train --model mlp --method plain --batch-size 256 --out runs/plain
smoothout train --dataset mnist --method adasmoothout --batch-size 6000 \\
  --seeds 5 --out runs/f1
smoothout train --dataset cifar10 --model resnet44 --method adasmoothout \\
  --batch-size 2048 --epochs 400 --preset authors --amp bf16 \\
  --channels-last --out runs/resnet44
smoothout train --config run.toml --lr 0.05 --out runs/other
smoothout train --dataset cifar10 --hold-out 5000 --strength 0.05 \\
  --out runs/judged-on-held-out-images
smoothout train --method sam --strength 0.05 --out runs/sam
torchrun --nproc-per-node 2 -m smoothout train --dataset cifar10 \\
  --batch-size 1024 --out runs/two-processes
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train", help=HELP)(_with_setting_flags(_train))


def _train(
    out: Annotated[Path, typer.Option(help="folder of the run")] = Path("runs/latest"),
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; flags win over it")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many runs, seeds counted up from --seed, in OUT/seed-0 …")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the resolved settings and stop")] = False,
    data_root: Annotated[Path | None, typer.Option(help="where data are looked for first")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    checkpoint_every: Annotated[int, typer.Option(min=1, help="epochs between checkpoints")] = 1,
    minutes: Annotated[float | None, typer.Option(help="stop at the first checkpoint after this many minutes")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="event files in OUT/tensorboard")] = False,
    workers: Annotated[int | None, typer.Option(min=0, help="processes that decode images")] = None,
    cuda_graphs: Annotated[bool, typer.Option(help="on CUDA, replay a step as one graph")] = True,
    together: Annotated[
        int | None, typer.Option(min=1, help="how many seeds train at once on a GPU; default: 5 for small networks")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print nothing but errors")] = False,
    **settings: Any,
) -> None:
    resolved = resolve(read_toml(config) if config else {}, **settings)
    if dry_run:
        print(json.dumps({"hash": resolved.hash, **resolved.to_dict()}, indent=1, ensure_ascii=False))
        print(wrapped(str(PRESETS[resolved.preset])))
        return
    options = Options(data_root, device, checkpoint_every, minutes, tensorboard, workers, cuda_graphs, together, quiet)
    introduction = Introduction(settings)
    if seeds == 1:
        train(resolved, out, options, introduction)
        return
    runs = [resolved.with_seed(resolved.seed + i) for i in range(seeds)]
    train_seeds(runs, lambda each: seed_folder(out, each), options, introduction)


def _with_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for every setting, all of them None unless given: typer reads signatures."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    kinds = get_type_hints(Config)
    parameters = list(own)
    for setting in fields(Config):
        help_ = setting.metadata["help"]
        if setting.metadata["choices"]:
            help_ += f" ({', '.join(setting.metadata['choices'])})"
        default = _default_in_words(setting)
        option = typer.Option(help=help_, rich_help_panel=setting.metadata["group"], show_default=default)
        flag_type: Any = _flag_type(kinds[setting.name])
        kind = Annotated[flag_type | None, option]
        parameters.append(
            inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        )

    def with_flags(**given: Any) -> None:
        command(**given)

    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags


def _default_in_words(setting: Field[Any]) -> str | bool:
    """What applies where the flag is not given; False where that is nothing."""
    if setting.name == "model":
        return "by the dataset"
    if setting.name in regime_of("").settings():
        return "by the model"
    if setting.name in ("strength", "noise", "scale"):
        return "by the method"
    if any(setting.name in _filled_in_by(preset) for preset in PRESETS.values()):
        return "by the preset"
    if setting.default is None or isinstance(setting.default, bool):
        return setting.name.replace("_", "-") if setting.default else False
    return str(setting.default)


def _filled_in_by(preset: Preset) -> set[str]:
    """The settings that a preset has a say in, for some network."""
    settings = [preset.settings(model, "adasmoothout", 2 * GHOST_BATCH, 100) for model in ("f1", "resnet18")]
    return {name for each in settings for name in each}


def _flag_type(kind: Any) -> type:
    """The type a flag is read as: text for lists, which the configuration takes apart itself."""
    if isinstance(kind, types.UnionType):
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    return kind if kind in (int, float, bool, str) else str
