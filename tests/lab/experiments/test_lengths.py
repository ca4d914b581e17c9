"""Whether shorter runs rank alike: the verdict follows the records."""

from dataclasses import replace

from smoothout.lab.experiments import lengths
from smoothout.lab.experiments.choice import DEEP_EPOCHS
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Setting

OURS = Setting("paper", "ours")


def records(as_if_run, short, long):
    """Gains over a baseline of 0.8, of all candidates."""
    runs = []
    for epochs, gains in ((lengths.SHORT[0], short), (DEEP_EPOCHS, long)):
        rows = lengths._candidates(OURS, epochs)
        (baseline,) = {row.versus for row in rows}
        runs.append(as_if_run(baseline, 0.8))
        assert {row.config.epochs for row in rows} == {epochs}
        runs += [as_if_run(row.config, 0.8 + gain) for row, gain in zip(rows, gains)]
    return Records(runs)


def verdict(as_if_run, short, long):
    return lengths.lengths(OURS).judge(records(as_if_run, short, long))[0]


def test_the_verdict_is_that_of_the_records(as_if_run):
    gains = [0.001 * (5 * i % 6) for i in range(6)]
    alike = verdict(as_if_run, gains, [2 * gain for gain in gains])
    assert alike.verdict == "holds"
    assert "τ +1.00" in alike.evidence
    assert "+0.50 and +1.00" in alike.evidence
    assert "over 6 of 6 candidates; the best of 100 epochs is number 1 at 400" in alike.evidence
    assert verdict(as_if_run, gains, [-gain for gain in gains]).verdict == "the opposite order"
    swapped = [sorted(gains)[i] for i in (1, 0, 3, 2, 5, 4)]
    mixed = verdict(as_if_run, sorted(gains), swapped)
    assert mixed.verdict == "no order in common is shown"
    assert "number 2 at 400" in mixed.evidence
    assert "over 5 of 6 candidates" in verdict(as_if_run, gains[:5], gains[:5]).evidence
    assert verdict(as_if_run, gains[:4], gains[:4]).verdict == "not measured yet"


def test_a_candidate_that_diverges_in_the_long_run_is_its_last(as_if_run):
    gains = [0.001 * i for i in range(6)]
    made = records(as_if_run, gains, gains).all()
    best = lengths._candidates(OURS, DEEP_EPOCHS)[-1].config
    runs = [
        replace(found, run=replace(found.run, record=None, failure="nan")) if found.run.config == best else found
        for found in made
    ]
    (verdict,) = lengths.lengths(OURS).judge(Records(runs))
    assert "over 6 of 6 candidates; the best of 100 epochs is number 6 at 400" in verdict.evidence
    assert "+0.50 and diverged" in verdict.evidence
