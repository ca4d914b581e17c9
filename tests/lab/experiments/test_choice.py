"""What preset `ours` takes over: the best candidate on held-out images, as the records have it."""

from dataclasses import replace
from pathlib import Path

import pytest

from smoothout.lab import packs
from smoothout.lab.experiments import choice
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, F1, RESNET44, configure
from smoothout.lab.experiments.records import Records, look
from smoothout.lab.experiments.vocabulary import Setting

RESULTS = Path(__file__).parents[3] / "results"
OURS = Setting("paper", "ours")
NETWORKS = {network.model: network for network in (F1, C1, RESNET44)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    files = sorted(file for file in RESULTS.glob("choice*.jsonl"))
    return Records.read([], files, tmp_path_factory.mktemp("unpacked"))


def test_what_is_entered_is_the_best_on_held_out_images(kept):
    for (model, batch_size, method), settings in CHOSEN.items():
        found = choice.best(OURS, NETWORKS[model], batch_size, method, kept)
        assert found is not None, f"not all candidates of {model}, {batch_size}, {method} are in results/choice*.jsonl"
        assert choice.what_is_chosen(found.config) == settings


def test_what_is_entered_is_what_ours_trains_with(monkeypatch):
    monkeypatch.setitem(CHOSEN, ("c1", 5000, "smoothout"), {"strength": 0.075, "strength_schedule": "tanh"})
    config = configure(OURS, C1, 5000, "smoothout")
    assert (config.strength, config.strength_schedule, config.hold_out) == (0.075, "tanh", 0)
    assert configure(OURS, C1, 256, "smoothout").strength == 0.0375
    assert configure(replace(OURS, preset="paper"), C1, 5000, "smoothout").strength == 0.0375
    candidates = choice.candidates(OURS, C1, 5000, "smoothout")
    assert {row.config.strength for row in candidates} == {0.0375 * factor for factor in choice.FACTORS}


def test_the_best_is_the_highest_mean_and_none_while_one_is_missing(tmp_path):
    """Records of a run that was made, under the configurations of all candidates."""
    (folder, *_) = packs.unpack(RESULTS / "c1-cifar10.jsonl", tmp_path / "unpacked")
    made = look(folder)
    rows = choice.candidates(OURS, C1, 5000, "smoothout")
    accuracies = [0.7 + 0.01 * (i % 7) for i in range(len(rows))]

    def found(row, accuracy):
        run = made.run
        record = replace(run.record, config=row.config, last=replace(run.record.last, test_accuracy=accuracy))
        return replace(made, run=replace(run, config=row.config, record=record), measured=frozenset())

    everything = [found(row, accuracy) for row, accuracy in zip(rows, accuracies)]
    assert choice.best(OURS, C1, 5000, "smoothout", Records(everything)) == rows[6]
    assert choice.best(OURS, C1, 5000, "smoothout", Records(everything[1:])) is None
    diverged = replace(everything[6], failure="the loss is nan")
    assert choice.best(OURS, C1, 5000, "smoothout", Records([*everything[:6], diverged, *everything[7:]])) == rows[5]
