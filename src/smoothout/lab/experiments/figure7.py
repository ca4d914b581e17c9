"""Figure 7: ResNet44 under noise, small batch against large, on CIFAR-10 and CIFAR-100."""

from __future__ import annotations

from smoothout.lab.experiments.figure2 import SPLITS, noise_drawings
from smoothout.lab.experiments.measuring import sensitivity
from smoothout.lab.experiments.networks import RESNET44, RESNET44_CIFAR100, configure, label
from smoothout.lab.experiments.vocabulary import Drawing, Experiment, Row, Setting

EPOCHS = {RESNET44: 400, RESNET44_CIFAR100: 200}  # of the large batch, as in Table 2; the small one has the usual 200


def figure7(setting: Setting) -> Experiment:
    rows: list[Row] = []
    drawings: list[Drawing] = []
    for network, epochs in EPOCHS.items():
        small = configure(setting, network, network.small, "plain")
        large = configure(setting, network, network.large, "plain", epochs=epochs)
        both = ((network.small, small), (network.large, large))
        wanted = tuple(sensitivity(setting, network.model, split) for split in SPLITS)
        rows += [Row(label(network, size, "plain"), config, measurements=wanted) for size, config in both]
        drawings += noise_drawings(network, both, setting)
    title = "Figure 7: ResNet44 under noise, small against large batch"
    return Experiment("figure7", title, tuple(rows), drawings=tuple(drawings))
