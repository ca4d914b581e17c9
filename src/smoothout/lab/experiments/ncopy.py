"""Eq. 1 against Algorithm 1 on F1: N fixed copies and one stochastic draw a step, the same objective."""

from __future__ import annotations

from smoothout.lab.experiments.measuring import sensitivity, sharpness
from smoothout.lab.experiments.networks import F1, configure, label
from smoothout.lab.experiments.vocabulary import Experiment, Row, Setting

COPIES = (1, 2, 4, 8, 16, 32, 64)
TINY_COPIES = (1, 4)


def ncopy(setting: Setting) -> Experiment:
    """At the large batch: N copies cost N passes a step, and the small batch has 25 times the steps."""
    baseline = configure(setting, F1, F1.large, "plain")
    stochastic = configure(setting, F1, F1.large, "smoothout")
    wanted = (sharpness(setting), sensitivity(setting))
    rows = [
        Row(label(F1, F1.large, "plain"), baseline, measurements=wanted),
        Row(label(F1, F1.large, "smoothout", ", stochastic"), stochastic, versus=baseline, measurements=wanted),
    ]
    for copies in TINY_COPIES if setting.scale == "tiny" else COPIES:
        # No ghosts in any preset: an identical batch goes to all copies, and released code has no such method.
        config = configure(setting, F1, F1.large, "ensemble", draws=str(copies), ghost_batch_size=0)
        text = label(F1, F1.large, "ensemble", f", N = {copies}").replace("ensemble", "fixed copies")
        rows.append(Row(text, config, versus=stochastic, measurements=wanted))
    notes = (
        "Both descend the same objective, the mean loss over the box; N fixed copies see N points of it for good, the "
        "stochastic method a new one every step, at the cost of one. The loss under noise compares them on it.",
    )
    return Experiment(
        "ncopy", "Deterministic N-copy SmoothOut against the stochastic one, F1", tuple(rows), notes=notes
    )
