"""Figure 2: C1 from the small-batch to the large-batch minimum, and loss and accuracy under noise."""

from __future__ import annotations

from collections.abc import Iterable

from smoothout.lab.config import Config
from smoothout.lab.experiments.measuring import BANDS, line, sensitivity
from smoothout.lab.experiments.networks import C1, Network, configure, label
from smoothout.lab.experiments.vocabulary import Curve, Drawing, Experiment, Row, Setting, Split

SPLITS: tuple[Split, ...] = ("train", "test")


def figure2(setting: Setting) -> Experiment:
    return small_to_large(setting, C1, "figure2", "Figure 2: C1, small against large batch")


def small_to_large(setting: Setting, network: Network, name: str, title: str) -> Experiment:
    """(a) the line between the minima of the two batch sizes; (b) noise of growing strength on each."""
    small = configure(setting, network, network.small, "plain")
    large = configure(setting, network, network.large, "plain")
    noise = {split: sensitivity(setting, network.model, split) for split in SPLITS}
    rows = tuple(
        Row(label(network, batch_size, "plain"), config, measurements=tuple(noise.values()))
        for batch_size, config in ((network.small, small), (network.large, large))
    )
    lines = tuple(line(setting, small, large, split) for split in SPLITS)
    between = Drawing(
        "interpolation",
        f"(a) Loss (solid) and accuracy (dotted) on the line from the minimum of batch {network.small} (α = 0) to that "
        f"of batch {network.large} (α = 1). The whole state is interpolated: beyond the ends BatchNorm's variances fit "
        "no network, and the loss may leave the picture.",
        tuple(Curve(f"{each.split} images", small, each) for each in lines),
        ends=(f"batch {network.small}", f"batch {network.large}"),
    )
    under_noise = noise_drawings(network, ((network.small, small), (network.large, large)), setting)
    return Experiment(name, title, rows, lines, (between, *under_noise))


def noise_drawings(
    network: Network, configs: Iterable[tuple[int, Config]], setting: Setting
) -> tuple[Drawing, Drawing]:
    """Loss and accuracy against the strength of the noise, for each batch size and split."""
    curves = tuple(
        Curve(f"batch {batch_size}, {split}", config, sensitivity(setting, network.model, split))
        for batch_size, config in configs
        for split in SPLITS
    )
    return (
        Drawing(
            "loss under noise",
            f"(b) {network.title}: the loss under uniform noise of strength a. {BANDS}",
            curves,
        ),
        Drawing("accuracy under noise", f"(b) {network.title}: the accuracy under the same noise.", curves),
    )
