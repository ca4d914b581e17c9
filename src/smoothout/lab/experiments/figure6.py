"""Figure 6: as Figure 2, for C3 on CIFAR-100."""

from __future__ import annotations

from smoothout.lab.experiments.figure2 import small_to_large
from smoothout.lab.experiments.networks import C3
from smoothout.lab.experiments.vocabulary import Experiment, Setting


def figure6(setting: Setting) -> Experiment:
    return small_to_large(setting, C3, "figure6", "Figure 6: C3, small against large batch")
