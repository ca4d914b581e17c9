"""What `smoothout train` says of a run before it begins."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.data import Dataset
from smoothout.lab.experiments.choice import PLACES
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.methods import METHODS
from smoothout.lab.presets import PRESETS
from smoothout.lab.train.processes import number_of_processes

WIDEST = 100
BULLET = "  - "


class Introduction:
    """All that matters of the first run that begins; of those after it the seed, in which alone they differ.

    Args:
        asked: the settings that were given as flags.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked, self._is_first = asked, True

    def __call__(self, config: Config, dataset: Dataset) -> str:
        if not self._is_first:
            return f"seed {config.seed}"
        self._is_first = False
        lines = [_what_is_trained(config, self._asked)]
        if config.batch_size > (images := len(dataset.train)):
            lines.append(f"batch {config.batch_size} is more than the {images} training images: one update an epoch")
        lines.append(PRESETS[config.preset].told_of(config))
        if chosen := _chosen(config):
            lines.append(f"{BULLET}{chosen}")
        return wrapped("\n".join(lines))


def wrapped(text: str) -> str:
    """Lines as wide as the terminal or 100 columns; what goes on below a bullet is indented."""
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    filled = [
        textwrap.fill(
            line,
            width,
            subsequent_indent=" " * len(BULLET) if line.startswith(BULLET) else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    ]
    return "\n".join(filled)


def _what_is_trained(config: Config, asked: dict[str, Any]) -> str:
    noise = ""
    if METHODS[config.method].takes_noise:
        where = (
            f"on normalisation layers{', too' if config.perturb_weights else ' alone'}, " if config.perturb_bn else ""
        )
        noise = f"strength {config.strength:g} ({config.strength_schedule}), {_draws_in_words(config)}, {where}"
    elif METHODS[config.method].radius is not None:
        noise = f"ρ = {config.strength:g}, two evaluations a step, "
    elif asked.get("strength"):
        noise = "which takes no noise, "
    ghosts = f" in ghosts of {config.ghost_batch_size} by {config.ghost_by}" if config.ghost_batch_size else ""
    return (
        f"{config.model} on {config.dataset}: {config.method}, {noise}batch {config.batch_size}{ghosts}, "
        f"{config.epochs_in_words}, seed {config.seed}, configuration {config.hash}"
    )


def _draws_in_words(config: Config) -> str:
    ghosts = "ghost batch" if config.ghosts_per_draw == 1 else f"{config.ghosts_per_draw} ghost batches"
    clean = f" but {100 * config.clean_share:g} % of them, which see clean weights" if config.clean_share else ""
    known = {"one": "one draw a step", "ghost": f"a draw for every {ghosts}{clean}"}
    processes = number_of_processes()
    own = config.denoise and not config.shared_noise  # noise that stays is the same in all
    each = f" in each of {processes} processes" if processes > 1 and own else ""
    return known.get(config.draws, f"{config.draws} draws a step") + each


def _chosen(config: Config) -> str:
    """What `reproduce` would take in this place, where it is something else."""
    place = (config.model, config.dataset, config.batch_size)
    if config.preset != "ours" or place not in {(network.model, network.dataset, size) for network, size in PLACES}:
        return ""
    chosen = CHOSEN.get((config.model, config.batch_size, config.method), {})
    other = [f"{name.replace('_', ' ')} {value}" for name, value in chosen.items() if getattr(config, name) != value]
    return (
        f"`smoothout reproduce --preset ours` has {', '.join(other)} here, chosen on held-out images" if other else ""
    )
