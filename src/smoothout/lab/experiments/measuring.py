"""The measurements of the experiments, at both scales."""

from __future__ import annotations

from smoothout.lab.config import Config
from smoothout.lab.experiments.vocabulary import Line, Measuring, Setting, Split

NOISE_GRID = (0.0, 0.0125, 0.025, 0.0375, 0.05, 0.075, 0.1)
FEW_IMAGES = 10_000  # enough for a deep network, whose passes are dear
TINY_IMAGES = 200
DEEP = ("resnet44", "alexnet", "resnet18")
BANDS = "Bands: the deviation over runs, of a single one over its draws."  # of losses under noise


def sharpness(setting: Setting, model: str = "") -> Measuring:
    """(C_ε, A)-sharpness in all of space, ε = 5e-4, five starts of ten iterations, as in the paper.

    By ascent, which stays on the device; the paper's solver is `smoothout measure sharpness --method lbfgsb`.
    """
    restarts, iterations = (2, 2) if setting.scale == "tiny" else (5, 10)
    settings = (("epsilon", 5e-4), ("restarts", restarts), ("max_iterations", iterations), ("method", "ascent"))
    return Measuring("sharpness", "train", settings, _images(setting, model))


def sensitivity(setting: Setting, model: str = "", split: Split = "train") -> Measuring:
    """C̄(w; a) on a grid of strengths; the noise is the same for every run.

    Three draws of C1 had standard errors up to a third of the rise, so networks measured later have more.
    """
    grid, draws = ((0.0, 0.0375, 0.1), 2) if setting.scale == "tiny" else (NOISE_GRID, 10 if model in DEEP else 3)
    return Measuring("sensitivity", split, (("strengths", grid), ("draws", draws)), _images(setting, model))


def curvature(setting: Setting) -> Measuring:
    """The largest eigenvalue of the Hessian, and its trace: each product is two passes back, so fewer images do."""
    probes, iterations, images = (2, 10, TINY_IMAGES) if setting.scale == "tiny" else (10, 60, FEW_IMAGES)
    return Measuring("curvature", "train", (("top", 1), ("probes", probes), ("max_iterations", iterations)), images)


def landscape(setting: Setting, model: str = "", split: Split = "train") -> Measuring:
    """Along filter-normalised directions."""
    directions, steps = (2, 7) if setting.scale == "tiny" else (5, 41)
    return Measuring(
        "landscape", split, (("directions", directions), ("steps", steps), ("span", 1.0)), _images(setting, model)
    )


def line(setting: Setting, start: Config, end: Config, split: Split) -> Line:
    """α from −1 to 2; in the paper in steps of 0.1."""
    steps = 6 if setting.scale == "tiny" else 30
    alphas = tuple(round(-1 + 3 * i / steps, 10) for i in range(steps + 1))
    return Line(start, end, split, alphas, _images(setting, start.model))


def _images(setting: Setting, model: str) -> int | None:
    if setting.scale == "tiny":
        return TINY_IMAGES
    return FEW_IMAGES if model in DEEP else None
