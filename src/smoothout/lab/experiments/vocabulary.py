"""What an experiment is: rows of runs with the paper's numbers beside them, what to measure of them, what to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from smoothout.lab.config import Config
from smoothout.lab.measurements import Measurement, settings_of

if TYPE_CHECKING:
    from smoothout.lab.experiments.records import Records

Scale = Literal["tiny", "paper"]
Split = Literal["train", "test"]


@dataclass(frozen=True)
class Setting:
    """How experiments are to be run.

    Args:
        scale: "paper" is the real thing; "tiny" is the same code on the digits, in minutes on a CPU.
        preset: where settings come from that an experiment does not name: paper, authors or ours.
        imagenet: a folder in ImageNet's layout; None: the ten classes of imagenette stand in, as plumbing.
    """

    scale: Scale = "paper"
    preset: str = "paper"
    imagenet: str | None = None


@dataclass(frozen=True)
class Measuring:
    """A measurement wanted of a run; its result is kept in the run's folder under `name`.

    Args:
        settings: of the function in `smoothout.measure`, as pairs.
        images: measured on the first so many of the split; None: all.
    """

    kind: Literal["sharpness", "sensitivity", "landscape", "curvature"]
    split: Split
    settings: tuple[tuple[str, Any], ...] = ()
    images: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.split}"

    def name_for(self, seed: int) -> str:
        """The name, which is the same for every seed."""
        return self.name

    def is_answered_by(self, there: Measurement, images: int) -> bool:
        """Whether this is the wanted one, of a split of so many images: `smoothout measure` may have made another."""
        return _is_as_wanted(there, dict(self.settings), self.images, images)


@dataclass(frozen=True)
class Line:
    """The losses between the runs of two configurations with the same seed; kept with the run at the start."""

    start: Config
    end: Config
    split: Split
    alphas: tuple[float, ...]
    images: int | None = None

    def name_for(self, seed: int) -> str:
        """The file's name holds the hash of the run at the end."""
        return f"interpolation-{self.split}-{self.end.with_seed(seed).hash}"

    def is_answered_by(self, there: Measurement, images: int) -> bool:
        """As `Measuring.is_answered_by`."""
        return _is_as_wanted(there, {"alphas": self.alphas}, self.images, images)


def _is_as_wanted(there: Measurement, settings: Mapping[str, Any], wanted_images: int | None, images: int) -> bool:
    (kind, *_), found = there.name.split("-"), there.settings
    wanted = settings_of(kind, {**settings, "images": min(wanted_images or images, images)})
    return {**found, "images": found["images"] or images} == wanted


@dataclass(frozen=True)
class Row:
    """One configuration and what the paper says of it.

    Args:
        config: with seed 0; the runner makes the other seeds.
        accuracy: the paper's, in per cent.
        sharpness: the paper's; facts about its solver make it a target in sense only, never in value.
        versus: the configuration this one is compared with, such as the baseline's.
        note: what a reader must know, such as that the row is plumbing.
        seeds: those of which runs are made; None: of whichever are asked for.
    """

    label: str
    config: Config
    accuracy: float | None = None
    sharpness: float | None = None
    versus: Config | None = None
    measurements: tuple[Measuring, ...] = ()
    note: str = ""
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Curve:
    """One curve of a drawing: a measurement of the runs of one configuration; None: their epochs."""

    label: str
    config: Config
    of: Measuring | Line | None = None


@dataclass(frozen=True)
class Drawing:
    """A picture made from measurements or epochs; "toy" and "low-pass" need none.

    Args:
        ends: of an interpolation, what lies at α = 0 and at α = 1.
    """

    kind: Literal[
        "toy",
        "low-pass",
        "interpolation",
        "loss under noise",
        "accuracy under noise",
        "landscape",
        "accuracy by epoch",
        "training loss by epoch",
        "accuracy by learning rate",
    ]
    caption: str
    curves: tuple[Curve, ...] = ()
    ends: tuple[str, str] = ("first checkpoint", "second")


NOT_MEASURED = "not measured yet"  # the verdict without records


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper's text, what our records say of it, and the figures behind that."""

    claim: str
    verdict: str
    evidence: str


@dataclass(frozen=True)
class Experiment:
    """A table, a figure or a set of claims of the paper.

    Args:
        judge: from records to verdicts, where the experiment is about claims.
        compares_costs: whether its runs were made alike enough for their evaluations and seconds to stand side by side.
        pools_spread: whether accuracies of rows with few runs each are compared by the deviation that all rows of one
            length have together.
    """

    name: str
    title: str
    rows: tuple[Row, ...] = ()
    lines: tuple[Line, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    notes: tuple[str, ...] = ()
    judge: Callable[[Records], tuple[Verdict, ...]] | None = None
    compares_costs: bool = False
    pools_spread: bool = False
