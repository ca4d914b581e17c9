"""Figure 9: as Figure 8, for F1 on MNIST."""

from __future__ import annotations

from smoothout.lab.experiments.figure8 import baseline_to_smoothout
from smoothout.lab.experiments.networks import F1
from smoothout.lab.experiments.vocabulary import Experiment, Setting


def figure9(setting: Setting) -> Experiment:
    return baseline_to_smoothout(setting, F1, "figure9", "Figure 9: F1, from the baseline to SmoothOut")
