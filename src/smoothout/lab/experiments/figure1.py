"""Figure 1: a toy landscape, 1,024 shifted copies of it and their mean; averaging as a low-pass filter beside it."""

from __future__ import annotations

from smoothout.lab.experiments.vocabulary import Drawing, Experiment, Setting


def figure1(setting: Setting) -> Experiment:
    return Experiment(
        "figure1",
        "Figure 1: what averaging over noise does to a landscape",
        drawings=(
            Drawing(
                "toy",
                "A loss with a sharp and a flat minimum (black), some of 1,024 copies of it, each shifted by its own "
                "θ ~ U(−a, a) (grey), and the mean of all 1,024 (blue): the sharp minimum is filled in, the flat one "
                "stays.",
            ),
            Drawing(
                "low-pass",
                "The same as a filter: a wave cos(kw) of the landscape comes out multiplied by sin(ka)/(ka) under "
                "uniform noise U(−a, a), and by exp(−a²k²/2) under Gaussian noise of standard deviation a.",
            ),
        ),
    )
