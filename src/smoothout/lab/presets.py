"""Three ways to run the paper, every switch and every assumption in one place.

`paper` does what the text says, `authors` what their released code of 2018 did, `ours` what we hold to be right. A
preset only fills in settings that were not given; the optimizer and its rates come from the network's regime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smoothout.lab.methods import METHODS

if TYPE_CHECKING:
    from smoothout.lab.config import Config

TABLE_1_MODELS = ("mlp", "f1", "c1", "c3")
GHOST_BATCH = 128
WARM_UP = 5.0  # epochs
MEASURE_STATISTICS_ANYWAY = ("swa", "ema")
IMAGENET_MODELS = ("alexnet", "resnet18")


@dataclass(frozen=True)
class Assumption:
    """A sentence, and the configurations that it says something of."""

    text: str
    concerns: Callable[[Config], bool]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Preset:
    """Settings for a (model, method, batch size, epochs), and the sentences that say what was assumed."""

    name: str
    summary: str
    assumptions: tuple[Assumption, ...]
    settings: Callable[[str, str, int, int], dict[str, Any]]

    def __str__(self) -> str:
        return self._with(self.assumptions)

    def told_of(self, config: Config) -> str:
        """The same with those assumptions only that concern this run."""
        return self._with(each for each in self.assumptions if each.concerns(config))

    def _with(self, assumptions: Iterable[Assumption]) -> str:
        return "\n".join([f"preset {self.name}: {self.summary}", *(f"  - {each}" for each in assumptions)])


def default_strength(method: str, noise: str, scale: str) -> float | None:
    """The paper's strength; None where it gives none."""
    known = {
        ("smoothout", "uniform", "absolute"): 0.0375,
        ("smoothout", "gaussian", "absolute"): 0.025,
        ("adasmoothout", "uniform", "filter"): 0.15,
        ("adasmoothout", "gaussian", "filter"): 0.20,
        ("lpfsgd", "gaussian", "filter"): 0.20,
        ("smoothout", "bernoulli", "weight"): 1.0,
        ("ensemble", "uniform", "absolute"): 0.0375,
    }
    return known.get((method, noise, scale))


def _ghosts_of_the_text(model: str, batch_size: int) -> dict[str, Any]:
    """Ghost batch norm on the networks of Table 2: a pass a ghost, which is also the quickest way."""
    if model in TABLE_1_MODELS or batch_size < 2 * GHOST_BATCH:
        return {}
    return {"ghost_batch_size": GHOST_BATCH, "ghost_by": "loop"}


def _paper(model: str, method: str, batch_size: int, epochs: int) -> dict[str, Any]:
    return {"draws": "one", "report": "last", **_ghosts_of_the_text(model, batch_size)}


def _authors(model: str, method: str, batch_size: int, epochs: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "draws": "ghost",
        "ghost_batch_size": GHOST_BATCH,
        "ghost_by": "loop",
        "reset_optimizer_every_epoch": True,
        "clip": 5.0,
        "perturb_bn": True,
        "report": "best",
        "strength_schedule": "tanh-falling" if model in TABLE_1_MODELS else "constant",
    }
    if method == "adasmoothout":
        settings["scale_epsilon"] = 1e-6
    if model == "resnet18":
        settings["weight_decay"] = 1e-4
    return settings


def _ours(model: str, method: str, batch_size: int, epochs: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"draws": "one", "report": "last"}
    ghosts = _ghosts_of_the_text(model, batch_size)
    if not ghosts:
        return settings
    settings |= {**ghosts, "lr_warmup": min(WARM_UP, epochs / 20)}
    if method not in MEASURE_STATISTICS_ANYWAY:
        settings["remeasure_bn"] = "clean"
    if method in ("smoothout", "adasmoothout"):
        settings["draws"] = "ghost"
    return settings


def _takes_noise(config: Config) -> bool:
    return METHODS[config.method].takes_noise


def _has_the_papers_strength(config: Config) -> bool:
    known = default_strength(config.method, config.noise, config.scale)
    return _takes_noise(config) and config.strength == known


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "paper",
            "as the text says: one draw a step, constant strength, the noise taken back exactly",
            (
                Assumption(
                    "the text does not say which epoch is reported: the last one here",
                    lambda config: config.report == "last",
                ),
                Assumption(
                    "the text does not say whether normalisation layers take noise: they do not here",
                    lambda config: _takes_noise(config) and not config.perturb_bn,
                ),
                Assumption(
                    "ghost batches of 128 on the networks of Table 2, none on those of Table 1",
                    lambda config: config.ghost_batch_size > 0,
                ),
                Assumption(
                    "the optimizer of F1 is not revealed: SGD 0.1 for 50 epochs", lambda config: config.model == "f1"
                ),
                Assumption(
                    "epochs of C1 and C3, their augmentation and weight decay are not revealed: 100 epochs without "
                    "either",
                    lambda config: config.model in ("c1", "c3"),
                ),
                Assumption(
                    "AdaSmoothOut's strength on CIFAR-100 and ImageNet is not revealed: 0.15, as on CIFAR-10",
                    lambda config: (
                        config.method == "adasmoothout"
                        and _has_the_papers_strength(config)
                        and config.dataset not in ("digits", "mnist", "cifar10")
                    ),
                ),
                Assumption(
                    "weight decay and dropout are 0 on ImageNet", lambda config: config.model in IMAGENET_MODELS
                ),
            ),
            _paper,
        ),
        Preset(
            "authors",
            "as the released code of 2018 did: a draw for every ghost batch of 128, clip 5, best epoch on the test set",
            (
                Assumption(
                    "the optimizer is rebuilt every epoch: momentum and moments restart",
                    lambda config: config.reset_optimizer_every_epoch,
                ),
                Assumption(
                    "normalisation layers take noise, as they did until 2018-11, after the runs of Tables 1 and 2",
                    lambda config: _takes_noise(config) and config.perturb_bn,
                ),
                Assumption(
                    "the strength falls along a tanh from 1 to 0 on the networks of Table 1, as was the default on "
                    "the dates of those runs; constant elsewhere, which is not known",
                    _takes_noise,
                ),
                Assumption("1e-6 is added to ‖θᵢ‖ in filter scaling", lambda config: config.scale_epsilon > 0),
                Assumption("weight decay of ResNet18 is 1e-4", lambda config: config.model == "resnet18"),
                Assumption("the noise is taken back exactly here; theirs was w + θ − θ", _takes_noise),
                Assumption(
                    "choosing the best epoch on the test set flatters every method: compare best with best only",
                    lambda config: config.report == "best",
                ),
            ),
            _authors,
        ),
        Preset(
            "ours",
            "last epoch, optimizer state kept, noise on normalisation layers only where it is asked for",
            (
                Assumption(
                    "one draw a step on the networks of Table 1; on the others, at large batch, a draw for every "
                    f"ghost batch of 128, {WARM_UP:g} epochs of warm-up (a twentieth of all if these are fewer "
                    "than 100) and BatchNorm measured anew at the end, also without noise: so ResNet44 was trained "
                    "where it gained, at twice these strengths in 400 epochs (docs/large-batch.md)",
                    lambda config: bool(_ghosts_of_the_text(config.model, config.batch_size)),
                ),
                Assumption(
                    "the strength is the paper's: choose yours on held-out images (--hold-out), never on the test set. "
                    "`smoothout reproduce --preset ours` has strengths that were chosen so for F1, C1 and ResNet44",
                    _has_the_papers_strength,
                ),
            ),
            _ours,
        ),
    )
}
