"""One typed configuration: everything that determines what a run computes, and nothing that does not (paths, devices).

Values come in this order, later ones win: the defaults below, the regime of the model, the preset, a TOML file, flags.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

from smoothout.lab.data import AUGMENTATIONS, NAMES
from smoothout.lab.data.catalogue import FOLDER_PREFIX
from smoothout.lab.methods import METHODS
from smoothout.lab.models import check_name, default_model
from smoothout.lab.nearest import nearest
from smoothout.lab.presets import MEASURE_STATISTICS_ANYWAY, PRESETS, default_strength
from smoothout.lab.train.regime import SCALINGS, regime_of
from smoothout.lab.train.strength import SCHEDULES
from smoothout.noise import NAMES as NOISES


class ConfigError(ValueError):
    """A setting that does not exist or cannot be. The message names it, its value and what would be right."""


def _setting(default: Any, group: str, help: str, choices: Iterable[str] = ()) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "choices": tuple(choices)})


@dataclass(frozen=True)
class Config:
    """What a run computes. `resolve` fills in what is not given."""

    dataset: str = _setting("digits", "Data", "digits, mnist, cifar10, cifar100, imagenette or imagefolder:PATH")
    hold_out: int = _setting(0, "Data", "judge on this many training images, held out, instead of the test set")
    augment: str = _setting("none", "Data", "augmentation of the training images", AUGMENTATIONS)

    model: str = _setting("f1", "Model", "mlp, f1, c1, c3, resnet44, alexnet, resnet18, … or your module:function")
    dropout: float | None = _setting(None, "Model", "dropout probability, where the model has any; 0 switches it off")

    method: str = _setting("smoothout", "Method", "training method: how a step gets its gradient", METHODS)
    strength: float = _setting(0.0375, "Method", "size of the noise, a; for sam and asam, ρ")
    noise: str = _setting("uniform", "Method", "distribution of the raw noise", NOISES)
    noise_p: float = _setting(0.5, "Method", "probability that Bernoulli noise drops a weight")
    scale: str = _setting("absolute", "Method", "absolute θ = a·n; weight θ = a·w·n; filter is adasmoothout's",
                          ("absolute", "filter", "weight"))  # fmt: skip
    scale_epsilon: float = _setting(0.0, "Method", "added to ‖θᵢ‖ in filter scaling; the authors' code has 1e-6")
    strength_schedule: str = _setting("constant", "Method", "how the strength changes over training", SCHEDULES)
    strength_warmup: float = _setting(0.0, "Method", "epochs in which the strength also rises from 0")
    draws: str = _setting("one", "Method", "noise draws per step: one, ghost (one per ghost batch), or a number")
    antithetic: bool = _setting(False, "Method", "draws come in pairs +θ, −θ; needs an even number of draws")
    clean_share: float = _setting(0.0, "Method", "with draws=ghost, the share of ghost batches that see no noise")
    ghosts_per_draw: int = _setting(1, "Method", "with draws=ghost, how many consecutive ghost batches share a draw")
    denoise: bool = _setting(True, "Method", "take the noise back before the update; without it, the paper's ablation")
    perturb_bn: bool = _setting(False, "Method", "noise on the parameters of normalisation layers too")
    perturb_weights: bool = _setting(True, "Method", "noise on all others; without it, on normalisation only")
    shared_noise: bool = _setting(False, "Method", "all processes draw the same noise, instead of each its own")
    swa_start: float = _setting(0.75, "Method", "swa averages the ends of epochs after this fraction of training")
    ema_decay: float = _setting(0.99, "Method", "decay of ema's average, per update")

    batch_size: int = _setting(128, "Batch", "images per update, over all processes")
    ghost_batch_size: int = _setting(0, "Batch", "images that BatchNorm sees at a time; 0: the batch is not cut")
    ghost_by: str = _setting("loop", "Batch", "ghost batches as micro-batches in a loop, or inside BatchNorm layers",
                             ("loop", "layer"))  # fmt: skip

    epochs: int = _setting(50, "Optimizer", "passes over the data; milestones move in proportion")
    stop_after: int = _setting(0, "Optimizer", "end after this many, with rates and strengths of all --epochs")
    optimizer: str = _setting("sgd", "Optimizer", "which one", ("sgd", "adam", "adamw"))
    lr: float = _setting(0.1, "Optimizer", "learning rate; where it is scaled, that of batch 128")
    lr_scaling: str = _setting("none", "Optimizer", "how the learning rate grows with the batch size", SCALINGS)
    lr_warmup: float = _setting(0.0, "Optimizer", "epochs in which the learning rate rises from 0")
    milestones: tuple[int, ...] = _setting((), "Optimizer", "epochs at which it decays, such as 81,122,164")
    lr_decay: float = _setting(0.1, "Optimizer", "factor on the learning rate at each milestone")
    momentum: float = _setting(0.9, "Optimizer", "momentum of SGD")
    weight_decay: float = _setting(0.0, "Optimizer", "L2 for SGD and Adam, decoupled for AdamW")
    clip: float = _setting(0.0, "Optimizer", "largest norm of the gradient; 0: not clipped")
    reset_optimizer_every_epoch: bool = _setting(False, "Optimizer", "forget momentum and moments, as the 2018 code")

    seed: int = _setting(0, "Run", "seed of initialisation, data order and noise")
    preset: str = _setting("ours", "Run", "where settings come from that are not given; ours has the paper's strengths "
                           "here, in `reproduce` those chosen on held-out images", PRESETS)  # fmt: skip
    report: str = _setting("last", "Run", "the epoch whose accuracy counts; both are kept", ("last", "best"))
    remeasure_bn: str = _setting("no", "Run", "at the end, BatchNorm's statistics over all training images at clean "
                                 "weights; uncut: without augmentation", ("no", "clean", "uncut"))  # fmt: skip
    log_smoothed_loss: bool = _setting(False, "Run", "every epoch, the training loss at noise of the current strength")
    amp: str = _setting("none", "Run", "mixed precision", ("none", "bf16", "fp16"))
    channels_last: bool = _setting(False, "Run", "memory format of images and convolutions")
    compile: bool = _setting(False, "Run", "torch.compile the model")

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, _converted(each, getattr(self, each.name)))
        if self.draws.isdecimal():
            number = int(self.draws)
            object.__setattr__(self, "draws", "one" if number == 1 else str(number))  # one run, one hash
        if self.stop_after == self.epochs:
            object.__setattr__(self, "stop_after", 0)
        _check_numbers(self)
        _check_together(self)

    @property
    def epochs_trained(self) -> int:
        """All, or those before it stops."""
        return self.stop_after or self.epochs

    @property
    def epochs_in_words(self) -> str:
        all_ = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        return f"{self.stop_after} of {all_}" if self.stop_after else all_

    @property
    def draws_number(self) -> int | None:
        """Draws a step where it is a number ("one" is 1); None where every ghost batch has its own."""
        if self.draws == "ghost":
            return None
        return 1 if self.draws == "one" else int(self.draws)

    def to_dict(self) -> dict[str, Any]:
        """Every setting, as JSON takes it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @cached_property
    def hash(self) -> str:
        """Twelve hexadecimal digits of what determines the result.

        Settings at their default are left out, so that one added later does not change the hash of old runs.
        """
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        told = {name: value for name, (value, default) in values.items() if value != default}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    def with_seed(self, seed: int) -> Config:
        """The same run with another seed."""
        return self if seed == self.seed else replace(self, seed=seed)

    def to_the_end(self) -> Config:
        """The same run if nothing stops it earlier."""
        return replace(self, stop_after=0) if self.stop_after else self

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """A saved configuration; a setting that did not exist when it was saved has its default."""
        check_names(settings)
        if isinstance(settings.get("remeasure_bn"), bool):  # as it was when there was one way
            settings = {**settings, "remeasure_bn": "uncut" if settings["remeasure_bn"] else "no"}
        return cls(**settings)


@cache
def _types() -> dict[str, tuple[Any, bool]]:
    """The type of every setting, and whether it may be None."""
    hints = get_type_hints(Config).items()
    return {name: (get_args(h)[0], True) if isinstance(h, types.UnionType) else (h, False) for name, h in hints}


def check_names(settings: Mapping[str, Any]) -> None:
    """Refuse a setting that does not exist, with the nearest that does."""
    known = [each.name for each in fields(Config)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"there is no setting {name!r}{nearest(name, known)}")


def read_toml(file: Path) -> dict[str, Any]:
    """Settings of a TOML file: the names of the flags, with - or _."""
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: no valid TOML ({error})") from error
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    try:
        check_names(settings)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return settings


def resolve(file: Mapping[str, Any] = types.MappingProxyType({}), **flags: Any) -> Config:
    """The complete configuration of what was asked for: defaults, regime and preset fill in the rest.

    Args:
        file: settings of a file, see `read_toml`.
        flags: settings that win over it; one that is None was not given.
    """
    asked = _converted_all({**file, **{name: value for name, value in flags.items() if value is not None}})
    dataset = asked.get("dataset", Config.dataset)
    if dataset not in NAMES and not dataset.startswith(FOLDER_PREFIX):
        raise ConfigError(f"dataset={dataset!r} is not known{nearest(dataset, [*NAMES, f'{FOLDER_PREFIX}PATH'])}")
    base = {name: getattr(Config, name) for name in ("method", "batch_size", "preset")}
    settings: dict[str, Any] = {"dataset": dataset, "model": default_model(dataset), **base, **asked}
    model, method = settings["model"], settings["method"]
    check_name(model)
    from_regime = regime_of(model).settings(asked.get("epochs"))
    preset = PRESETS[settings["preset"]]
    from_preset = preset.settings(model, method, settings["batch_size"], from_regime["epochs"])
    entry = METHODS[method]
    _refuse_ignored(method, asked)
    neutral = {name: getattr(Config, name) for name in entry.ignores}
    settings = {**from_regime, **from_preset, **entry.settings, **settings, **neutral}
    if entry.takes_noise:
        _check_scale(method, settings.get("noise", Config.noise), settings.setdefault("scale", entry.scale))
        if "strength" not in settings:
            settings["strength"] = _known_strength(settings)
    else:
        radius = 0.0 if entry.radius is None else settings.get("strength", entry.radius)
        settings.update(strength=radius, draws="one", strength_schedule="constant", perturb_weights=True)
    return Config(**settings)


def differences(there: Config, asked: Config) -> list[str]:
    """In words, the settings in which two configurations differ."""
    old, new = there.to_dict(), asked.to_dict()
    return [f"{name}: {old[name]!r} there, {new[name]!r} asked for" for name in old if old[name] != new[name]]


def _known_strength(settings: Mapping[str, Any]) -> float:
    noise = settings.get("noise", Config.noise)
    strength = default_strength(settings["method"], noise, settings["scale"])
    if strength is None:
        raise ConfigError(f"no strength is known for noise={noise!r} with scale={settings['scale']!r}: give one")
    return strength


def _converted_all(settings: Mapping[str, Any]) -> dict[str, Any]:
    check_names(settings)
    return {each.name: _converted(each, settings[each.name]) for each in fields(Config) if each.name in settings}


def _converted(each: Field[Any], value: Any) -> Any:
    """A value in the type of its setting, or a ConfigError. Text is read, since flags and files give it."""
    kind, may_be_none = _types()[each.name]
    if value is None and may_be_none:
        return None
    choices = each.metadata["choices"]
    if choices and str(value) not in choices:
        raise ConfigError(f"{each.name}={value!r} is not known{nearest(str(value), choices)}")
    read, in_words = _READERS[kind]
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{each.name}={value!r}: expected {in_words}") from error


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _wholes(value: Any) -> tuple[int, ...]:
    parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    return tuple(sorted(map(_whole, parts)))


_READERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    str: (str, "a word"),
    bool: (_truth, "true or false"),
    int: (_whole, "a whole number"),
    float: (_number, "a number"),
    tuple[int, ...]: (_wholes, "whole numbers with commas between them"),
}


_AT_LEAST_ONE = ("batch_size", "epochs", "ghosts_per_draw")
_NOT_NEGATIVE = (
    *("hold_out", "strength", "scale_epsilon", "strength_warmup", "ghost_batch_size", "stop_after"),
    *("lr", "lr_warmup", "lr_decay", "momentum", "weight_decay", "clip"),
)


def _check_numbers(config: Config) -> None:
    for name in _AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)}: at least 1 is needed")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{name}={value}: a finite number that is not negative is needed")
    for name in ("dropout", "noise_p"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{name}={value}: a probability between 0 and 1 is needed")
    for name in ("swa_start", "ema_decay", "clean_share"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)}: a number from 0 to below 1 is needed")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed={config.seed}: a whole number from 0 to 2⁶³ − 1 is needed")


def _refuse_ignored(method: str, asked: Mapping[str, Any]) -> None:
    """Refuse them where they are asked for, not in a `Config`: a saved run that has one can still be read."""
    for name in METHODS[method].ignores:
        if asked.get(name, getattr(Config, name)) != getattr(Config, name):
            raise ConfigError(
                f"{name}={asked[name]!r}: method={method!r} does not use it, since the noise of its copies never "
                "changes and never enters the weights: leave it out, or choose method='smoothout'"
            )


def _check_scale(method: str, noise: str, scale: str) -> None:
    if (scale == "filter") != (METHODS[method].scale == "filter"):
        other = "adasmoothout" if scale == "filter" else "smoothout"
        raise ConfigError(f"method={method!r} with scale={scale!r}: that is method={other!r}")
    if noise == "bernoulli" and scale != "weight":
        raise ConfigError(f"noise='bernoulli' needs scale='weight' (the paper's view of dropout), not {scale!r}")


def _check_together(config: Config) -> None:
    """Settings that are right one by one and wrong together."""
    if not config.draws.isdecimal() and config.draws not in ("one", "ghost"):
        raise ConfigError(f"draws={config.draws!r}: expected one, ghost, or a number such as 4")
    number = config.draws_number
    if number == 0 or (config.antithetic and number is not None and number % 2):
        raise ConfigError(f"draws={config.draws!r}: at least 1 is needed, and with antithetic an even number")
    if config.draws == "ghost" and config.ghost_by == "layer":
        raise ConfigError("draws='ghost' draws noise for every ghost batch, so ghost_by='loop' is needed, not 'layer'")
    for name in ("clean_share", "ghosts_per_draw"):
        value = getattr(config, name)
        if value == getattr(Config, name):
            continue
        if config.draws != "ghost" or config.antithetic or not config.denoise:
            raise ConfigError(f"{name}={value} needs draws='ghost', noise that is taken back, and no antithetic pairs")
        if not 0 < 2 * config.ghost_batch_size <= config.batch_size:
            raise ConfigError(f"{name}={value} needs several ghost batches: give ghost_batch_size")
    if config.stop_after > config.epochs:
        raise ConfigError(f"stop_after={config.stop_after} is beyond the last of epochs={config.epochs}")
    if config.stop_after and config.method == "swa":
        raise ConfigError("method='swa' averages the end of training: no stop_after")
    if config.log_smoothed_loss and METHODS[config.method].radius is not None:
        raise ConfigError(f"log_smoothed_loss is of the noise of training, and method={config.method!r} draws none")
    if config.remeasure_bn != "no" and config.method in MEASURE_STATISTICS_ANYWAY:
        raise ConfigError(f"method={config.method!r} measures its average's statistics anew anyway: no remeasure_bn")
    if METHODS[config.method].takes_noise:
        _check_scale(config.method, config.noise, config.scale)
        if not config.perturb_weights and not config.perturb_bn:
            raise ConfigError("perturb_weights=False leaves nothing to perturb: give perturb_bn (--perturb-bn), too")
