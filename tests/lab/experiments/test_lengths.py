"""Whether shorter runs rank alike: the verdict follows the records."""

from dataclasses import replace

import pytest

from smoothout.lab.experiments import lengths
from smoothout.lab.experiments.choice import DEEP_EPOCHS, held_out
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import RESNET44
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Setting

OURS = Setting("paper", "ours")


def records(as_if_run, short, long):
    """Gains over a baseline of 0.8, of all candidates."""
    runs = []
    for epochs, gains in ((lengths.SHORT[0], short), (DEEP_EPOCHS, long)):
        runs.append(as_if_run(held_out(OURS, RESNET44, 2048, "plain", epochs=epochs), 0.8))
        rows = lengths._candidates(OURS, epochs)
        assert {row.config.epochs for row in rows} == {epochs}
        runs += [as_if_run(row.config, 0.8 + gain) for row, gain in zip(rows, gains)]
    return Records(runs)


def verdict(as_if_run, short, long):
    return lengths.lengths(OURS).judge(records(as_if_run, short, long))[0]


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.delitem(CHOSEN, ("resnet44", 2048, "plain"), raising=False)


def test_the_verdict_is_that_of_the_records(as_if_run):
    gains = [0.001 * (5 * i % 14) for i in range(14)]
    alike = verdict(as_if_run, gains, [2 * gain for gain in gains])
    assert alike.verdict == "holds"
    assert "τ +1.00" in alike.evidence
    assert "+0.50 and +1.00" in alike.evidence
    assert "over 14 of 14 candidates; the best of 100 epochs is number 1 at 400" in alike.evidence
    assert verdict(as_if_run, gains, [-gain for gain in gains]).verdict == "the opposite order"
    mixed = [gains[i] for i in (1, 0, 3, 2, 13, 12, 5, 4, 11, 10, 7, 6, 9, 8)]
    assert verdict(as_if_run, sorted(gains), mixed).verdict == "no order in common is shown"
    swapped = [sorted(gains)[i] for i in (3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 13, 12)]
    in_part = verdict(as_if_run, sorted(gains), swapped)
    assert in_part.verdict == "in part: an order in common, with exceptions"
    assert "number 2 at 400" in in_part.evidence
    assert "over 12 of 14 candidates" in verdict(as_if_run, gains[:12], gains[:12]).evidence
    assert verdict(as_if_run, gains[:4], gains[:4]).verdict == "not measured yet"


def test_a_candidate_that_diverges_in_the_long_run_is_its_last(as_if_run):
    gains = [0.001 * i for i in range(14)]
    made = records(as_if_run, gains, gains).all()
    best = lengths._candidates(OURS, DEEP_EPOCHS)[-1].config
    runs = [
        replace(found, run=replace(found.run, record=None, failure="nan")) if found.run.config == best else found
        for found in made
    ]
    (verdict,) = lengths.lengths(OURS).judge(Records(runs))
    assert "over 14 of 14 candidates; the best of 100 epochs is number 14 at 400" in verdict.evidence
    assert "+1.30 and diverged" in verdict.evidence
