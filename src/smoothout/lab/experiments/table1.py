"""Table 1: sharpness and accuracy of F1, C1 and C3, small and large batch; AdaSmoothOut beside what the paper has."""

from __future__ import annotations

from smoothout.lab.experiments.measuring import BANDS, sensitivity, sharpness
from smoothout.lab.experiments.networks import C1, C3, F1, Network, configure, label
from smoothout.lab.experiments.vocabulary import Curve, Drawing, Experiment, Row, Setting
from smoothout.lab.methods import METHODS

# (accuracy in per cent, sharpness) of baseline and SmoothOut.
PAPER: dict[tuple[str, int], dict[str, tuple[float, float]]] = {
    ("f1", 256): {"plain": (98.49, 0.0), "smoothout": (98.61, 0.0)},
    ("f1", 6000): {"plain": (98.01, 57.8246), "smoothout": (98.42, 5.4128)},
    ("c1", 256): {"plain": (79.67, 27.7448), "smoothout": (81.72, 0.0003)},
    ("c1", 5000): {"plain": (77.30, 117.8266), "smoothout": (80.34, 0.0004)},
    ("c3", 256): {"plain": (47.99, 23.5103), "smoothout": (51.17, 0.0001)},
    ("c3", 5000): {"plain": (44.37, 62.0682), "smoothout": (48.43, 10.7303)},
}
NETWORKS = F1, C1, C3
COMPARED = ("plain", "smoothout", "adasmoothout")


def rows_of(setting: Setting, network: Network) -> tuple[Row, ...]:
    """The rows of one network."""
    rows = []
    for batch_size in (network.small, network.large):
        baseline = configure(setting, network, batch_size, "plain")
        for method in COMPARED:
            accuracy, sharp = PAPER[network.model, batch_size].get(method, (None, None))
            rows.append(
                Row(
                    label(network, batch_size, method),
                    configure(setting, network, batch_size, method),
                    accuracy,
                    sharp,
                    versus=None if method == "plain" else baseline,
                    measurements=(sharpness(setting), sensitivity(setting)),
                )
            )
    return tuple(rows)


def _under_noise(setting: Setting, network: Network) -> Drawing:
    """Its large batch under noise."""
    configs = {method: configure(setting, network, network.large, method) for method in COMPARED}
    return Drawing(
        "loss under noise",
        f"{network.title}, batch {network.large}: the loss on training images under noise. {BANDS}",
        tuple(Curve(METHODS[method].title, config, sensitivity(setting)) for method, config in configs.items()),
    )


def table1(setting: Setting) -> Experiment:
    return Experiment(
        "table1",
        "Table 1: small and large batch on F1, C1 and C3",
        tuple(row for network in NETWORKS for row in rows_of(setting, network)),
        drawings=tuple(_under_noise(setting, network) for network in NETWORKS),
        notes=(
            "The paper's sharpness is a target in sense only (SmoothOut flatter than the baseline): its solver was "
            "given the gradient of the wrong sign and gave 0 except at very sharp points.",
        ),
    )
