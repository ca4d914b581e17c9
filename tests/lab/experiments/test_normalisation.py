"""Noise on BatchNorm's parameters of F1 and C1: what is compared with what."""

from smoothout.lab import models
from smoothout.lab.experiments.normalisation import normalisation
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Setting
from smoothout.select import is_normalisation


def test_each_place_of_the_noise_is_a_run_of_its_own():
    rows = normalisation(Setting("paper", "ours")).rows  # whichever is asked for: the paper's strengths
    assert len({row.config for row in rows}) == len(rows) == 4 * 7
    assert {row.config.preset for row in rows} == {"paper"}
    where = [(row.config.method, row.config.perturb_weights, row.config.perturb_bn) for row in rows[:7]]
    assert where == [("plain", True, False)] + [
        (method, weights, bn)
        for method in ("smoothout", "adasmoothout")
        for weights, bn in ((True, False), (True, True), (False, True))
    ]
    for first in range(0, len(rows), 7):
        baseline, *others = rows[first : first + 7]
        assert [row.versus for row in others] == [baseline.config] * 6


def test_at_tiny_scale_every_network_has_normalisation_layers():
    networks = {row.config.model for row in normalisation(Setting("tiny")).rows}
    assert networks
    for name in networks:
        model = models.build(name, classes=10, input_shape=(1, 8, 8))
        assert any(map(is_normalisation, model.modules()))


def test_noise_there_is_held_against_noise_elsewhere(as_if_run):
    experiment, runs = normalisation(Setting()), []
    for number, accuracy in enumerate((0.76, 0.78, 0.77), 1):
        config = experiment.rows[number].config
        runs += [as_if_run(config.with_seed(seed), accuracy + 1e-5 * number * seed) for seed in range(3)]
    too, without, *others = experiment.judge(Records(runs))
    assert (too.verdict, too.evidence.split(" [")[0]) == ("holds", "+2.00 points")
    assert (without.verdict, without.evidence.split(" [")[0]) == ("holds", "+1.00 points")
    assert {verdict.verdict for verdict in others} == {NOT_MEASURED}
