"""What the judge of flatness says of measurements."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from smoothout.lab.config import resolve
from smoothout.lab.experiments import flatness
from smoothout.lab.experiments.records import Found, Records
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.runs import Run

BASE = resolve(model="mlp", method="plain")
OTHER = resolve(model="mlp", method="smoothout")


class Measured(Found):
    """A run whose three measures are one number (or, of a measure, another one)."""

    def answer(self, wanted):
        value = VALUES[self.run.config.method, self.run.config.seed, wanted.kind]
        return SimpleNamespace(value=value, slope=value, eigenvalues=(value,))


VALUES: dict[tuple[str, int, str], float] = {}


def verdict(base, other, **replaced):
    VALUES.clear()
    for config, values in ((BASE, base), (OTHER, other)):
        for seed, value in enumerate(values):
            for measuring, _ in flatness.MEASURES.values():
                kind = measuring(Setting()).kind
                VALUES[config.method, seed, kind] = replaced.get(f"{kind[:4]}{seed}", value)
    found = [
        Measured(Run(Path(), config.with_seed(seed), (), None), frozenset(), False)
        for config in (BASE, OTHER)
        for seed in range(len(base))
    ]
    return flatness._verdict(Setting(), Records(found), "flatter", BASE, OTHER, -1)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([1.0, 1.1, 0.9, 1.05], "holds by all three"),
        ([4.0, 4.4, 3.6, 4.2], "does not hold: the opposite by all three"),
        ([1.0, 4.0, 1.5, 2.6], "none of the three shows anything"),
    ],
)
def test_in_words(other, words):
    assert verdict([2.0, 2.1, 1.9, 2.0], other).verdict == words


def test_seeds_without_a_logarithm_are_counted_out():
    said = verdict([2.0, 2.1, 1.9, 2.0], [1.0, 1.1, 0.9, 1.05], sens2=-0.1)
    assert said.evidence.endswith("(n = 4, 3, 4)")
