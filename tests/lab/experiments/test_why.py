"""What the study of ResNet44 concludes: from records, with three runs a side, and nothing else."""

from dataclasses import replace

import pytest
from scipy import stats

from smoothout.lab.config import differences, resolve
from smoothout.lab.experiments import choice, why
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.groups import Group, compare, compare_in_study, reported
from smoothout.lab.report import paper

OURS, AUTHORS = Setting("paper", "ours"), Setting("paper", "authors")


def verdicts(as_if_run, accuracies, seeds=3, setting=OURS, more=()):
    """Verdicts by their claims; accuracies of the last epoch and of the best by factor and method, plus a little."""
    runs = list(more)
    for case in why._cases(setting):
        if (case.what, case.method) in accuracies:
            last, best = accuracies[case.what, case.method]
            for seed in range(seeds):
                little = 1e-4 * seed * (1 if case.method == "plain" else 2)
                runs.append(as_if_run(case.config.with_seed(seed), last + little, best + little))
    return {verdict.claim: verdict for verdict in why.why(setting).judge(Records(runs))}


def test_verdicts_follow_the_records(as_if_run):
    preset, decayed, quarter = "as the preset", "weight decay 5e-4", "a = 0.25 × the paper's"
    accuracies = {
        (preset, "plain"): (0.90, 0.90),
        (preset, "smoothout"): (0.89, 0.90),
        (decayed, "plain"): (0.88, 0.90),
        (decayed, "smoothout"): (0.895, 0.90),
        (quarter, "smoothout"): (0.885, 0.90),
    }
    found = verdicts(as_if_run, accuracies)
    weaker = found[f"The baseline without noise changes: {decayed}"]
    assert weaker.verdict == "weaker"
    assert "-2.00 points [" in weaker.evidence
    assert found[f"SmoothOut gains: {preset}"].verdict == "the opposite"
    assert found[f"SmoothOut gains: {decayed}"].verdict == "gains"
    more = found[f"SmoothOut gains more than as the preset: {decayed}"]
    assert (more.verdict, more.evidence.split(" [")[0]) == ("holds", "+2.50 points")  # (89.5 − 88) − (89 − 90)
    less = found[f"SmoothOut gains more than as the preset: {quarter}"]
    assert (less.verdict, less.evidence.split(" [")[0]) == ("the opposite", "-0.50 points")
    assert f"SmoothOut gains more than as the preset: {preset}" not in found
    assert found["SmoothOut gains: one draw a step"].verdict == "not measured yet"
    two = verdicts(as_if_run, accuracies, seeds=2)
    assert {two[claim].verdict for claim in (f"SmoothOut gains: {preset}", weaker.claim)} == {"too few runs"}


def test_around_preset_authors_is_how_ours_trains_otherwise():
    """Each of its differences from ours by itself; what it has and ours has not by itself, too."""
    theirs, ours = (resnet44(setting, "adasmoothout") for setting in (AUTHORS, OURS))
    varied = {}
    for case in why._cases(AUTHORS):
        if case.method == "adasmoothout" and case.what not in why.CENTRES.values():
            (name,) = (line.split(":")[0] for line in differences(replace(theirs, stop_after=200), case.config))
            varied[name] = getattr(case.config, name)
    where_noise_is = {name: varied.pop(name) for name in ("perturb_bn", "perturb_weights")}
    assert where_noise_is == {"perturb_bn": False, "perturb_weights": False}
    assert varied == {name: getattr(ours, name) for name in varied}
    apart = {line.split(":")[0] for line in differences(theirs, ours)}
    not_studied = {"preset", "report", "strength", "clean_share", "scale_epsilon", "remeasure_bn"}
    assert {*varied} <= apart - {*where_noise_is} <= {*varied, *not_studied}


def test_another_preset_is_held_against_the_baseline_of_ours(as_if_run):
    whole = "as the preset, to the end"
    accuracies = {(whole, "plain"): (0.90, 0.90), (whole, "adasmoothout"): (0.91, 0.91)}
    stronger = [as_if_run(resnet44(OURS, "plain").with_seed(i), 0.92 + 1e-4 * i) for i in range(5)]
    found = verdicts(as_if_run, accuracies, setting=AUTHORS, more=stronger)
    weaker = found["Baseline of preset authors, to the end, is weaker than the baseline of preset ours"]
    assert (weaker.verdict, weaker.evidence.split(" [")[0]) == ("holds", "-2.01 points")
    method = found["AdaSmoothOut of preset authors, to the end, is better than the baseline of preset ours"]
    assert (method.verdict, method.evidence.split(" [")[0]) == ("the opposite", "-1.00 points")
    assert found[f"AdaSmoothOut gains: {whole}"].verdict == "gains"
    assert not any("of preset" in claim and "to the end, is" in claim for claim in verdicts(as_if_run, {}))


def test_the_best_epoch_flatters_epochs_as_training_left_them(as_if_run):
    """What is measured anew at the end has no other epochs to be compared with."""
    plain, smooth = (case.config for case in why._cases(OURS) if case.what == "as the preset, to the end")

    def run(config, seed, best, as_trained):
        made = as_if_run(config.with_seed(seed), 0.95)  # measured anew, and higher than every epoch
        epochs = [replace(made.run.metrics[0], test_accuracy=accuracy) for accuracy in (0.1, best, 0.95)]
        record = replace(made.run.record, as_trained={"test_accuracy": as_trained, "test_loss": 1.0})
        return replace(made, run=replace(made.run, metrics=tuple(epochs), record=record))

    runs = [run(plain, seed, 0.90, 0.90 + 1e-4 * seed) for seed in range(3)]
    runs += [run(smooth, seed, 0.91 + 1e-4 * seed, 0.90) for seed in range(3)]
    reporting, *of_others = (v for v in why.why(OURS).judge(Records(runs)) if "best epoch" in v.claim)
    assert reporting.verdict == "holds"
    assert "+1.01 points" in reporting.evidence
    assert {(v.claim.split()[0].rstrip(","), v.verdict) for v in of_others} == {("AdaSmoothOut", "not measured yet")}


def test_no_gain_of_the_runs_that_did_not_diverge(as_if_run):
    case = why._cases(OURS)[1]
    runs = [as_if_run(case.baseline.with_seed(seed), 0.90 + 1e-4 * seed) for seed in range(3)]
    runs += [as_if_run(case.config.with_seed(seed), 0.91 + 2e-4 * seed) for seed in range(3)]
    claim = f"SmoothOut gains: {case.what}"

    def said(records):
        return {verdict.claim: verdict.verdict for verdict in why.why(OURS).judge(Records(records))}[claim]

    lost = as_if_run(case.config.with_seed(3), 0.0)
    lost = replace(lost, run=replace(lost.run, record=None, failure="the loss is nan"))
    assert said(runs) == "gains"
    assert said([*runs, lost]) == "1 runs diverged"
    assert said([*runs[:3], lost]) == "1 runs diverged"


def test_a_strength_that_changes_is_held_against_whole_runs(as_if_run):
    whole, half, linear = "as the preset, to the end", "as the preset", "strength linear, to the end"
    accuracies = {
        (half, "plain"): (0.5, 0.5),
        (half, "smoothout"): (0.6, 0.6),
        (whole, "plain"): (0.90, 0.90),
        (whole, "smoothout"): (0.91, 0.91),
        (linear, "smoothout"): (0.93, 0.93),
    }
    found = verdicts(as_if_run, accuracies)
    assert found[f"SmoothOut gains: {linear}"].evidence.startswith("+3.0")
    more = found[f"SmoothOut gains more than as the preset: {linear}"]
    assert (more.verdict, more.evidence.split(" [")[0]) == ("holds", "+2.00 points")
    assert found[f"SmoothOut gains: {whole}"].evidence.startswith("+1.0")
    assert found[f"SmoothOut gains: {half}"].evidence.startswith("+10.0")


def test_no_factor_is_judged_by_another_length(as_if_run):
    claims = verdicts(as_if_run, {})
    assert any("weight decay" in claim and "baseline" in claim for claim in claims)
    assert not any("800 epochs" in claim and "baseline" in claim for claim in claims)
    assert "SmoothOut gains: half of 800 epochs" in claims


def test_the_picture_shows_where_noise_is_and_nothing_else():
    (drawing,) = why.why(AUTHORS).drawings
    assert [curve.label for curve in drawing.curves] == [
        "baseline, as the preset",
        "AdaSmoothOut, as the preset",
        "AdaSmoothOut, normalisation not perturbed",
        "AdaSmoothOut, normalisation alone perturbed",
    ]


@pytest.mark.parametrize("preset", ["paper", "authors", "ours"])
def test_nothing_is_trained_twice_and_every_baseline_is(monkeypatch, preset):
    for method in ("plain", *choice.OURS):  # with it the baseline of ours is another run than the text's
        strength = {"strength": 0.1} if method != "plain" else {}
        monkeypatch.setitem(CHOSEN, ("resnet44", 2048, method), {**choice.MEASURED_ANEW.settings, **strength})
    cases = why._cases(Setting("paper", preset))
    trained = {replace(case.config, preset=preset) for case in cases}
    assert len(trained) == len(cases)
    assert {case.baseline for case in cases} <= {case.config for case in cases}


def test_a_study_pools_what_trains_equally_long(as_if_run):
    def group(accuracies, **settings):
        config = resolve(model="resnet44", dataset="cifar10", method="plain", **settings)
        runs = [as_if_run(config.with_seed(seed), accuracy).run for seed, accuracy in enumerate(accuracies)]
        return Group(config, tuple(runs))

    base, clipped, shorter = group((0.90, 0.91)), group((0.92, 0.94), clip=1.0), group((0.1, 0.9), epochs=1)
    stopped = group((0.2, 0.8), stop_after=1)
    found = compare_in_study([clipped], [base], reported, [base, clipped, shorter, stopped])
    expected = stats.ttest_ind((0.92, 0.94), (0.90, 0.91), equal_var=True).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    alone, welch = compare_in_study([clipped], [base], reported, [shorter]), compare(base, clipped, reported)
    assert (alone.low, alone.high) == pytest.approx((welch.low, welch.high))


def test_a_row_that_varies_more_than_the_study_is_claimed_by_its_own_interval(as_if_run):
    cases = why._cases(OURS)
    (wild,) = (case for case in cases if "a = 4" in case.what)
    calm = [case for case in cases if case is not wild]
    runs = [as_if_run(case.config.with_seed(i), 0.90 + 1e-4 * i) for case in calm for i in range(3)]
    runs += [as_if_run(wild.config.with_seed(i), accuracy) for i, accuracy in enumerate((0.89, 0.92, 0.95))]
    found = {verdict.claim: verdict for verdict in why.why(OURS).judge(Records(runs))}
    verdict = found[f"SmoothOut gains: {wild.what}"]
    assert "[+" in verdict.evidence  # zero is outside the interval of the study
    assert verdict.verdict == "no difference measured"


def test_table_and_verdict_have_the_interval_of_the_whole_study(as_if_run):
    preset, decayed = why._cases(OURS)[:2], [case for case in why._cases(OURS) if "decay" in case.what]
    values = {preset[0].config: (0.90, 0.91), preset[1].config: (0.92, 0.92), decayed[0].config: (0.88, 0.92)}
    runs = [as_if_run(config.with_seed(i), value) for config, each in values.items() for i, value in enumerate(each)]
    experiment, records = why.why(OURS), Records(runs)
    table, verdicts = paper.sections(experiment, OURS, records, only_measured=True)
    half = 100 * stats.t.ppf(0.975, 3) * ((0.01**2 / 2 + 0.04**2 / 2) / 3) ** 0.5
    interval = f"[{1.5 - half:+.2f}, {1.5 + half:+.2f}]"
    assert any(interval in cell.text for row in table.table.rows for cell in row.cells)
    assert any(interval in cell.text for row in verdicts.table.rows for cell in row.cells)
