"""Figure 4: as Figure 8, for C3 on CIFAR-100."""

from __future__ import annotations

from smoothout.lab.experiments.figure8 import baseline_to_smoothout
from smoothout.lab.experiments.networks import C3
from smoothout.lab.experiments.vocabulary import Experiment, Setting


def figure4(setting: Setting) -> Experiment:
    return baseline_to_smoothout(setting, C3, "figure4", "Figure 4: C3, from the baseline to SmoothOut")
