"""Table 2: ResNet44 on CIFAR-10 and CIFAR-100; AlexNet and ResNet18 on ImageNet, where imagenette may stand in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments import remeasured
from smoothout.lab.experiments.chosen import CHOSEN_BEFORE
from smoothout.lab.experiments.goal import verdict_on
from smoothout.lab.experiments.measuring import BANDS, sensitivity, sharpness
from smoothout.lab.experiments.networks import (
    ALEXNET,
    IMAGENETTE,
    RESNET18,
    RESNET44,
    RESNET44_CIFAR100,
    Network,
    configure,
    configure_as_given,
    label,
)
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Curve, Drawing, Experiment, Row, Setting, Verdict
from smoothout.lab.methods import METHODS

CIFAR: tuple[tuple[Network, int, str, dict[str, float]], ...] = (
    (RESNET44, 400, "sqrt", {"plain": 91.02, "smoothout": 91.95, "adasmoothout": 92.63}),
    (RESNET44_CIFAR100, 200, "sqrt", {"plain": 67.23, "smoothout": 68.68, "adasmoothout": 70.09}),
    (RESNET44_CIFAR100, 400, "sqrt", {"plain": 68.62, "smoothout": 70.01, "adasmoothout": 72.39}),
    (RESNET44_CIFAR100, 400, "linear", {"plain": 71.21, "smoothout": 71.67, "adasmoothout": 72.85}),
)
IMAGENET: tuple[tuple[Network, int, dict[str, float]], ...] = (
    (ALEXNET, 60, {"plain": 47.64, "adasmoothout": 52.53}),
    (ALEXNET, 120, {"plain": 54.24, "adasmoothout": 55.51}),
    (RESNET18, 90, {"plain": 66.75, "adasmoothout": 67.11}),
)
SMALL_BATCH_ALEXNET = 56.15
# Without it ResNet18 learns nothing: an epoch has 5 updates, and the first few at 0.2 spoil the weights (docs/log.md).
WARM_UP = 5.0
BEFORE = ", as chosen before"
PLUMBING = f"plumbing: ten classes, {WARM_UP:g} epochs of warm-up, no accuracy is claimed"


def resnet44(setting: Setting, method: str, **settings: Any) -> Config:
    """The configuration of the CIFAR-10 row, which Tables 3 to 5 vary."""
    return configure(setting, RESNET44, RESNET44.large, method, **{"epochs": 400, **settings})


def cifar_rows(setting: Setting) -> tuple[Row, ...]:
    rows = []
    for network, epochs, scaling, accuracies in CIFAR:
        how: dict[str, Any] = {"epochs": epochs, "lr_scaling": scaling}
        baseline = configure(setting, network, network.large, "plain", **how)
        wanted = (sharpness(setting, network.model), sensitivity(setting, network.model))
        for method, accuracy in accuracies.items():
            config = configure(setting, network, network.large, method, **how)
            more = f", {epochs} epochs, {scaling}"
            versus = None if method == "plain" else baseline
            text = label(network, network.large, method, more)
            rows.append(Row(text, config, accuracy, versus=versus, measurements=wanted))
        if network is RESNET44:
            rows += [
                Row(label(network, network.large, method, BEFORE), config, versus=baseline, measurements=wanted)
                for method, config in _chosen_before(setting).items()
            ]
    return tuple(rows)


def _chosen_before(setting: Setting) -> dict[str, Config]:
    """The row on CIFAR-10 in preset ours as chosen before, by method, where something else is chosen now."""
    if setting.preset != "ours":
        return {}
    of = partial(configure_as_given, setting, RESNET44, RESNET44.large, epochs=CIFAR[0][1])
    before = {method: of(method, **settings) for method, settings in CHOSEN_BEFORE.items()}
    return {method: config for method, config in before.items() if config != resnet44(setting, method)}


def named(setting: Setting) -> dict[str, Config]:
    """The configurations of the row on CIFAR-10, the baseline first, what was chosen before last."""
    now = {METHODS[method].title: resnet44(setting, method) for method in CIFAR[0][3]}
    before = _chosen_before(setting)
    return now | {METHODS[method].title + BEFORE: config for method, config in before.items()}


def imagenet_rows(setting: Setting) -> tuple[Row, ...]:
    rows = []
    note = "" if setting.imagenet else PLUMBING
    how: dict[str, Any] = {"lr_warmup": WARM_UP} if note else {}

    def title(network: Network, config: Config, method: str, epochs: int) -> str:
        on = replace(network, title=network.title.replace("ImageNet", IMAGENETTE)) if note else network
        return label(on, config.batch_size, method, f", {epochs} epochs, sqrt")

    for network, epochs, accuracies in IMAGENET:
        baseline = configure(setting, network, network.large, "plain", epochs=epochs, **how)
        for method, accuracy in accuracies.items():
            config = configure(setting, network, network.large, method, epochs=epochs, **how)
            text = title(network, config, method, epochs)
            versus = None if method == "plain" else baseline
            rows.append(Row(text, config, None if note else accuracy, versus=versus, note=note))
    epochs = IMAGENET[0][1]
    small = configure(setting, ALEXNET, ALEXNET.small, "plain", epochs=epochs, **how)
    return (*rows, Row(title(ALEXNET, small, "plain", epochs), small, None if note else SMALL_BATCH_ALEXNET, note=note))


def _under_noise(setting: Setting) -> Drawing:
    """The row on CIFAR-10 under noise."""
    wanted = sensitivity(setting, RESNET44.model)
    curves = tuple(Curve(name, config, wanted) for name, config in named(setting).items())
    caption = f"ResNet44 on CIFAR-10: the loss on training images under noise. {BANDS}"
    return Drawing("loss under noise", caption, curves)


def _by_epoch(setting: Setting) -> Drawing:
    curves = tuple(Curve(name, config) for name, config in named(setting).items())
    return Drawing("accuracy by epoch", "ResNet44 on CIFAR-10: accuracy on the test set, means over seeds.", curves)


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    """Whether preset ours reaches its goal on CIFAR-10, and what measuring BatchNorm anew has to do with it."""
    configs = {f"{RESNET44.title}: {name}": config for name, config in named(setting).items()}
    baseline = resnet44(setting, "plain")
    goals = (verdict_on(name, baseline, config, records) for name, config in configs.items() if config != baseline)
    return (*goals, *remeasured.verdicts_on(configs, records))


def table2(setting: Setting) -> Experiment:
    return Experiment(
        "table2",
        "Table 2: on top of ghost batch norm, learning-rate scaling and longer training",
        (*cifar_rows(setting), *imagenet_rows(setting)),
        drawings=(_by_epoch(setting), _under_noise(setting)),
        judge=partial(_judge, setting) if setting.preset == "ours" else None,
        compares_costs=True,
    )
