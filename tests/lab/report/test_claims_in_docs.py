"""Claims of README and docs that no table of `docs/results.md` has, made again from the records."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
from scipy import stats

from in_process import smoothout
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.vocabulary import Setting

ROOT = Path(__file__).parents[3]

METHODS = ("plain", "smoothout", "adasmoothout")
F1 = ("f1-flatness", "table1-paper", "table1-paper-again")


def runs(*packs, **settings):
    """Of these packs, with these settings, by seed; what is compared here are a run's own figures."""
    found = []
    for pack in packs:
        for line in (ROOT / "results" / f"{pack}.jsonl").read_text().splitlines():
            run = json.loads(line)
            files = run["files"]
            if "result.json" in files and settings.items() <= files["result.json"].items():
                found.append({"metrics": run["metrics"], **files["result.json"], "files": files})
    return sorted(found, key=lambda run: run["seed"])


def page(name):
    text = (ROOT / (name if name == "README.md" else f"docs/{name}")).read_text()
    return " ".join(text.split())


def lowest(found):
    return f"{np.mean([min(run['metrics']['test_loss']) for run in found]):.3f}"


def last(found):
    return [100 * run["last"]["test_accuracy"] for run in found]


def best(found):
    return [100 * run["best"]["test_accuracy"] for run in found]


def once(found):
    """The training of each seed that began first."""
    by_seed = {}
    for run in sorted(found, key=lambda run: run["provenance"]["started"]):
        by_seed.setdefault(run["seed"], run)
    return [by_seed[seed] for seed in sorted(by_seed)]


def p_value(base, group, paired):
    """Two-sided, of a difference of means; by equal seeds or Welch's."""
    return float((stats.ttest_rel(group, base) if paired else stats.ttest_ind(group, base, equal_var=False)).pvalue)


def compared(baseline, found, value):
    """By pairs of equal seeds if all match."""
    seeds = [run["seed"] for run in found]
    return p_value(value(baseline), value(found), paired=seeds == [run["seed"] for run in baseline])


def test_most_of_the_lower_loss_of_c1_is_the_baselines_overfitting():
    of = {method: runs("c1-cifar10", batch_size=5000, method=method) for method in METHODS}
    plain, smooth, ada = (lowest(found) for found in of.values())
    assert f"loss was {plain} around epoch 14" in page("large-batch.md")
    assert f"SmoothOut's lowest is {smooth}; AdaSmoothOut's, {ada}" in page("large-batch.md")
    gain = np.subtract(*(np.mean(best(of[method])) for method in ("smoothout", "plain")))
    assert f"between the best epochs it is {gain:.1f} points" in page("large-batch.md")


def test_the_baseline_of_c1_is_weaker_than_the_papers():
    below = 77.30 - np.mean(best(runs("c1-cifar10", batch_size=5000, method="plain")))
    assert f"(the baseline's is {below:.1f} points below the paper's)" in page("large-batch.md")


def test_c1_by_learning_rate():
    """At 0.001 the first seeds are those of the choice of strengths."""
    of = {"model": "c1", "batch_size": 5000, "hold_out": 5000, "epochs": 100, "strength_schedule": "constant"}
    rates = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008)

    def by_rate(method, strength):
        packs = ("c1-rates", "choice-ours", "claims-c1")
        found = [once(runs(*packs, **of, method=method, strength=strength, lr=rate)) for rate in rates]
        assert [[run["seed"] for run in each] for each in found] == [[0, 1, 2]] * len(rates)
        return np.array([last(each) for each in found])

    plain, smooth = by_rate("plain", 0.0), by_rate("smoothout", 0.0375)
    text = page("large-batch.md")
    means = plain.mean(1)
    assert means.argmax() == len(rates) - 1
    assert f"**The baseline gains {np.ptp(means):.1f} points from the lowest rate to the highest.**" in text
    within = [f"{np.ptp(each.mean(1)[2:]):.1f}" for each in (smooth, plain)]
    assert f"it varies by {within[0]} points there, the baseline's by {within[1]}" in text
    falls = smooth[2].mean() - smooth[0].mean()
    assert f"Below it falls as well, by {falls:.1f} points to the lowest" in text
    assert f"paper's 0.0375 stays within {within[0]} points" in page("strength.md")
    gains = (smooth - plain).mean(1)
    shown = [p_value(*pair, paired=True) < 0.05 for pair in zip(plain, smooth)]
    assert shown == [True] * 4 + [False] * 2
    assert f"gain is shown, from {min(gains[:4]):.1f} to {max(gains[:4]):.1f} points" in text


def test_c1_at_rates_of_their_own_on_the_test_set():
    plain, smooth = (runs("c1-rates", hold_out=0, method=method) for method in METHODS[:2])
    text = page("large-batch.md")
    assert f"their lowest losses on the way, {lowest(smooth)} and {lowest(plain)}, are not shown to differ" in text
    on_the_way = [[min(run["metrics"]["test_loss"]) for run in each] for each in (plain, smooth)]
    assert p_value(*on_the_way, paired=True) > 0.05
    usual = {method: runs("c1-cifar10", batch_size=5000, method=method) for method in METHODS}
    above = np.mean(last(plain)) - np.mean(last(usual["adasmoothout"]))
    assert f"(the baseline at 0.008 is {above:.1f} points above it)" in text
    assert f"{np.mean(last(plain)) - np.mean(last(usual['plain'])):.1f}" == "3.8"  # "as much", README


def test_f1_by_learning_rate():
    rates = (0.05, 0.1, 0.2, 0.4, 0.8)
    of = {
        method: np.array([last(runs("f1-rates-cpu", method=method, lr=rate)) for rate in rates])
        for method in METHODS[:2]
    }
    plain, smooth = of.values()
    assert plain.shape == smooth.shape == (len(rates), 3)
    text = page("large-batch.md")
    told = [
        ", ".join(f"{each:.1f}" for each in found.mean(1)[:-1]) + f" and {found[-1].mean():.1f} %"
        for found in (smooth, plain)
    ]
    assert f"SmoothOut has {told[0]}, the baseline {told[1]}" in text
    usual, own = plain[1].mean() - smooth[1].mean(), plain.mean(1).max() - smooth.mean(1).max()
    assert f"SmoothOut is {own:.1f} points behind instead of {usual:.1f}" in text
    assert f"(on held-out images {own:.1f} points are left of {usual:.1f})" in page("README.md")
    assert [
        smooth[i].mean() < plain[i].mean() and p_value(plain[i], smooth[i], paired=True) < 0.05 for i in range(4)
    ] == [True] * 4


def test_the_commands_for_resnet44_are_what_preset_ours_reproduces(tmp_path):
    text = page("large-batch.md")
    (command,) = re.findall(r"`smoothout (train --dataset cifar10 [^`]*)`", text)
    found = re.findall(r"- `(--method (\w+) [^`]*)`", text)
    assert [method for _, method in found] == ["smoothout", "adasmoothout"]
    for settings, method in found:
        told = smoothout(*command.split(), *settings.split(), "--dry-run", "--out", "run", cwd=tmp_path).stdout
        assert f'"hash": "{resnet44(Setting("paper", "ours"), method).hash}"' in told


def test_noise_on_normalisation_pays_at_the_papers_strength_and_not_at_twice_as_much():
    def of(**settings):
        return runs("choice-resnet44-finals", stop_after=200, **settings)

    def as_trained(found):
        return [100 * run["as_trained"]["test_accuracy"] for run in found]

    found = {(a, too): of(strength=a, perturb_bn=too) for a in (0.15, 0.3) for too in (False, True)}
    gain = np.mean(last(found[0.15, True])) - np.mean(last(of(method="plain")))
    assert f"AdaSmoothOut gains {gain:.2f} on held-out images" in page("README.md")
    apart = abs(np.mean(last(found[0.15, False])) - np.mean(last(found[0.3, False])))
    assert f"this and twice as much end within {apart:.1f} points of each other" in page("strength.md")
    usual, twice, usual_trained, twice_trained = (
        np.mean(value(found[a, True])) - np.mean(value(found[a, False]))
        for value in (last, as_trained)
        for a in (0.15, 0.3)
    )
    text = page("resnet44.md")
    assert f"by {usual:.1f} points (by {usual_trained:.1f} with the statistics that training left)" in text
    assert f"by {twice:.1f} (−{-twice_trained:.1f} with those statistics)" in text
    assert f"without that it is {(usual_trained + twice_trained) / 2:.1f} points, and not shown" in text
    fitted = {key: 100 * np.mean([run["last"]["train_accuracy"] for run in each]) for key, each in found.items()}
    most = fitted.pop((0.3, True))
    others = min(*fitted.values(), 100 * np.mean([run["last"]["train_accuracy"] for run in of(method="plain")]))
    assert f"{most:.0f} % of the training images are right, against {others:.1f} % and more in the other rows" in text


def test_sam_lowers_the_loss_on_the_digits():
    def loss(method):
        found = runs("rivals-digits-cpu", batch_size=480, method=method, epochs=30)
        return [run["last"]["test_loss"] for run in found]

    plain, smooth, ada, sam, asam = (loss(method) for method in (*METHODS, "sam", "asam"))
    claim = f"lower the test loss ({np.mean(plain):.3f} to {np.mean(sam):.3f} and {np.mean(asam):.3f})"
    assert claim in page("large-batch.md")
    assert max(p_value(plain, each, paired=True) for each in (sam, asam)) < 0.001
    assert min(p_value(plain, each, paired=True) for each in (smooth, ada)) > 0.5


def test_what_adasmoothout_costs_resnets_in_few_updates():
    lost = []
    for pack, model, updates in (("why-resnet44", "resnet44", 2500), ("imagenette", "resnet18", 450)):
        (plain,), (ada,) = (runs(pack, model=model, method=method) for method in ("plain", "adasmoothout"))
        assert plain["last"]["updates"] == ada["last"]["updates"] == updates
        before, after = (100 * run["last"]["test_accuracy"] for run in (plain, ada))
        assert f"{after:.1f} instead of {before:.1f} % on ResNet{model[-2:]}" in page("large-batch.md")
        lost.append(before - after)
    assert f"it lost {min(lost):.0f} and {max(lost):.0f} points" in page("strength.md")


def test_a_strength_that_rises_on_held_out_images():
    def leads(model, batch_size, method):
        """By how much the best that rises is above the best constant one."""
        of = {"model": model, "batch_size": batch_size, "method": method}
        schedules = {run["strength_schedule"] for run in runs("choice-ours", **of)}
        top = {name: max(last(runs("choice-ours", **of, strength_schedule=name))) for name in schedules}
        return max(top["linear"], top["tanh"]) - top["constant"]

    assert max(leads("c1", 5000, method) for method in METHODS[1:]) < 0
    small = {(model, method): leads(model, 256, method) for model in ("f1", "c1") for method in METHODS[1:]}
    assert {place for place, lead in small.items() if lead > 0} == {("f1", "smoothout"), ("c1", "adasmoothout")}
    assert "a rising one was the best for SmoothOut on F1 and for AdaSmoothOut on C1" in page("strength.md")


def test_lowest_losses_of_resnet44():
    plain, smooth, ada = (lowest(runs("table2-ours", method=method)) for method in METHODS)
    assert f"{plain} without noise, {smooth} with SmoothOut and {ada} with AdaSmoothOut" in page("resnet44.md")


def test_gpu_time_within_one_version_of_the_step():
    def seconds(method):
        older = [run for run in runs("table2-ours", method=method) if run["provenance"]["commit"].startswith("318dc0f")]
        return np.log([np.median(run["metrics"]["seconds"]) for run in older])

    plain, *noisy = map(seconds, METHODS)
    more = [f"{100 * np.expm1(each.mean() - plain.mean()):.1f} %" for each in noisy]
    assert f"SmoothOut took {more[0]} and AdaSmoothOut {more[1]} more, which is shown" in page("resnet44.md")
    assert all(p_value(plain, each, paired=False) < 0.05 for each in noisy)


def test_the_last_epochs_vary_without_noise_too():
    packs = [f"choice-resnet44-{name}" for name in ("warmup", "strong", "clean", "finals")]

    def varies(**settings):
        found = [run for run in runs(*packs, strength_schedule="constant", **settings) if not run.get("stop_after")]
        return sorted(np.std(run["metrics"]["test_accuracy"][329:399], ddof=1) * 100 for run in found)

    plain, usual = varies(method="plain"), varies(method="smoothout", strength=0.0375)
    assert len(plain) == len(usual) == 4
    text = page("large-batch.md")
    assert (
        f"by {plain[0]:.2f} to {plain[-1]:.2f} points without noise, by {usual[0]:.2f} to {usual[-1]:.2f} with" in text
    )


def test_what_leads_at_epoch_200():
    def at_200(*packs, **settings):
        return 100 * np.mean([run["metrics"]["test_accuracy"][199] for run in runs(*packs, **settings)])

    good = at_200("table2-ours", method="plain")
    reset = at_200("why-resnet44-authors", method="adasmoothout", reset_optimizer_every_epoch=False)
    warm_up = at_200("why-resnet44-authors", method="adasmoothout", lr_warmup=5.0)
    text = page("resnet44.md")
    assert f"never reset: {reset - good:.1f} points above" in text
    assert f"with warm-up it is {warm_up - good:.1f} above" in text


def traces_and_rises(method, batch_size):
    """Of F1 on MNIST, by seed: the trace, and what the paper's noise adds to the training loss."""
    found = runs(*F1, model="f1", dataset="mnist", method=method, batch_size=batch_size)
    measured = {}
    for run in found:
        names = [f"measurements/{kind}-train.json" for kind in ("curvature", "sensitivity")]
        if all(name in run["files"] for name in names):
            curvature, noise = (run["files"][name]["result"] for name in names)
            rise = noise["losses"][noise["strengths"].index(0.0375)] - noise["losses"][0]
            measured.setdefault(run["seed"], (curvature["trace"], rise))
    assert len(measured) == 5
    return np.array(list(measured.values())).T


def test_the_trace_does_not_say_what_the_papers_noise_costs():
    trace, rise = traces_and_rises("plain", 6000)
    predicted = 0.0375**2 / 6 * trace.mean()
    claim = f"predicts that a = 0.0375 adds {predicted:.2f} to the training loss, and it adds {rise.mean():.2f}."
    assert claim in page("concepts.md")
    assert p_value(np.log(trace), np.log(traces_and_rises("smoothout", 6000)[0]), paired=True) > 0.05
    small = [np.log(traces_and_rises(method, 256)[0]) for method in METHODS[:2]]
    assert f"{np.exp(small[1].mean() - small[0].mean()):.1f} times the baseline's at 256" in page("concepts.md")
    assert p_value(*small, paired=True) < 0.05


def test_what_is_left_of_the_gains_when_all_of_them_are_corrected_for():
    """By Holm's rule, over the comparisons of README's table; AdaSmoothOut on F1 at 6000 stands there twice."""
    p_values = {}
    for model, small, large in (("f1", 256, 6000), ("c1", 256, 5000)):
        packs = {"f1": F1, "c1": ("c1-cifar10", "c1-256-more")}[model]
        of = {"model": model, "dataset": {"f1": "mnist", "c1": "cifar10"}[model], "hold_out": 0}
        for size in (small, large):
            baseline = once(runs(*packs, **of, batch_size=size, method="plain"))
            for method in METHODS[1:]:
                for preset, found in (
                    ("paper", runs(*packs, **of, batch_size=size, method=method)),
                    ("ours", runs("table1-ours", **of, batch_size=size, method=method)),
                ):
                    if found:
                        p_values[model, size, method, preset] = compared(baseline, once(found), last)
    for preset, value in (("ours", last), ("authors", best)):
        of = {method: runs(f"table2-{preset}", method=method) for method in METHODS}
        for method in METHODS[1:]:
            p_values["resnet44", 2048, method, preset] = p_value(value(of["plain"]), value(of[method]), paired=False)
    own = [once(runs("c1-rates", hold_out=0, method=method)) for method in METHODS[:2]]
    p_values["c1", 5000, "smoothout", "own rates"] = compared(*own, last)
    assert f"README's table has {len(p_values)} intervals" in page("large-batch.md")
    ordered = sorted(p_values, key=p_values.get)
    holm = np.maximum.accumulate([p_values[key] * (len(ordered) - i) for i, key in enumerate(ordered)])
    assert set(itertools.compress(ordered, holm < 0.05)) == {
        ("f1", 6000, "smoothout", "paper"),
        ("c1", 5000, "smoothout", "paper"),
        ("c1", 256, "smoothout", "ours"),
        ("resnet44", 2048, "smoothout", "ours"),
    }
    said = "loss on F1 at 6000 and its gains on C1 at 5000 (at the learning rate of batch 256) and, with preset `ours`"
    assert f"SmoothOut's {said}, on C1 at 256 and on ResNet44 remain" in page("large-batch.md")
