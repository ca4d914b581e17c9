"""Figure 8: C1, baseline against SmoothOut, small and large batch."""

from __future__ import annotations

from smoothout.lab.experiments.figure2 import SPLITS
from smoothout.lab.experiments.measuring import line
from smoothout.lab.experiments.networks import C1, Network, configure, label
from smoothout.lab.experiments.vocabulary import Curve, Drawing, Experiment, Line, Row, Setting


def figure8(setting: Setting) -> Experiment:
    return baseline_to_smoothout(setting, C1, "figure8", "Figure 8: C1, from the baseline to SmoothOut")


def baseline_to_smoothout(setting: Setting, network: Network, name: str, title: str) -> Experiment:
    """The line from the baseline's minimum to SmoothOut's: our reading of an axis that the paper does not name."""
    rows: list[Row] = []
    lines: list[Line] = []
    drawings: list[Drawing] = []
    for part, batch_size in (("(a)", network.small), ("(b)", network.large)):
        plain = configure(setting, network, batch_size, "plain")
        smooth = configure(setting, network, batch_size, "smoothout")
        rows.append(Row(label(network, batch_size, "plain"), plain))
        rows.append(Row(label(network, batch_size, "smoothout"), smooth, versus=plain))
        here = [line(setting, plain, smooth, split) for split in SPLITS]
        lines += here
        caption = f"{part} Batch {batch_size}: loss (solid) and accuracy (dotted), baseline at α = 0, SmoothOut at 1."
        curves = tuple(Curve(f"{each.split} images", plain, each) for each in here)
        drawings.append(Drawing("interpolation", caption, curves, ends=("baseline", "SmoothOut")))
    note = "The paper does not name the axis of this figure: the line from the baseline to SmoothOut is our reading."
    return Experiment(name, title, tuple(rows), tuple(lines), tuple(drawings), (note,))
