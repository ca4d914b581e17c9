"""What a row of a page is called: all that tells it from the others, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from smoothout.lab.config import Config, resolve
from smoothout.lab.groups import Group, settings_that_train
from smoothout.lab.methods import METHODS

NAMED_ANYWAY = ("dataset", "model", "batch_size", "epochs", "stop_after")


def name_of(group: Group, groups: Sequence[Group]) -> str:
    """What tells a configuration from the others on the page, and how it was trained otherwise than they were."""
    name = _usual_name(group, groups)
    namesakes = [other.config for other in groups if _usual_name(other, groups) == name]
    telling = {each.name for each in fields(Config) if len({getattr(c, each.name) for c in namesakes}) > 1}
    telling |= set(_trained_otherwise(group, groups))
    told = [each.name for each in fields(Config) if each.name in telling]
    return name + "".join(f", {setting} {in_words(getattr(group.config, setting))}" for setting in told)


def in_words(value: Any) -> str:
    """The value of a setting, as a flag takes it."""
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def judged_on(groups: Sequence[Group]) -> str:
    """What accuracies are of: training images that were held out, where that is so of all."""
    return "held-out" if groups and all(group.config.hold_out for group in groups) else "test"


def _usual_name(group: Group, groups: Sequence[Group]) -> str:
    config = group.config
    several = [name for name in ("dataset", "model", "preset") if len({getattr(g.config, name) for g in groups}) > 1]
    before = "".join(f"{getattr(config, name)}, " for name in several)
    symbol = METHODS[config.method].symbol
    strength = f", {symbol} = {config.strength:g}" if config.strength else ""
    length = f", {config.epochs_in_words}" if len({g.config.epochs_in_words for g in groups}) > 1 else ""
    judged = ", on held-out images" if config.hold_out and judged_on(groups) == "test" else ""
    ranks = f", {group.processes} processes" if len({g.processes for g in groups}) > 1 else ""
    return f"{before}batch {config.batch_size}: {group.method_name}{strength}{length}{judged}{ranks}"


def _trained_otherwise(group: Group, groups: Sequence[Group]) -> list[str]:
    """Settings of training, not of the method, in which rows of one network on its data differ.

    What the network's regime and the preset give by themselves goes without saying: decay points that move with the
    epochs, ghost batches of a large batch.
    """
    named = (*NAMED_ANYWAY, *(("hold_out",) if judged_on(groups) == "test" else ()))
    config = group.config
    others = [g.config for g in groups if (g.config.dataset, g.config.model) == (config.dataset, config.model)]
    differ = [
        name
        for name in settings_that_train()
        if name not in named and any(getattr(other, name) != getattr(config, name) for other in others)
    ]
    if not differ:
        return []
    usual = _usual(config.dataset, config.model, config.method, config.batch_size, config.epochs, config.preset)
    return [name for name in differ if getattr(config, name) != getattr(usual, name)]


@cache
def _usual(dataset: str, model: str, method: str, batch_size: int, epochs: int, preset: str) -> Config:
    return resolve(dataset=dataset, model=model, method=method, batch_size=batch_size, epochs=epochs, preset=preset)
