"""Our numbers beside the paper's: against arithmetic done here, and docs/results.md against the records."""

import json
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from in_process import smoothout
from smoothout.lab.experiments.catalogue import EXPERIMENTS
from smoothout.lab.experiments.networks import C1, configure
from smoothout.lab.experiments.pages import results_markdown, write_page
from smoothout.lab.experiments.records import Found, Records
from smoothout.lab.experiments.table1 import COMPARED as table1_methods
from smoothout.lab.experiments.table1 import table1
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.presets import PRESETS
from smoothout.lab.report import paper
from smoothout.lab.report.digest import digest

ROOT = Path(__file__).parents[3]
PACK = ROOT / "results" / "c1-cifar10.jsonl"


def reproduce(*arguments):
    """From the repository's root: (exit code, stdout, stderr)."""
    done = smoothout("reproduce", *arguments, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def accuracies(method, batch_size, epoch="last"):
    """Straight from the file, by seed."""
    results = [json.loads(line)["files"]["result.json"] for line in PACK.read_text().splitlines()]
    chosen = [r for r in results if (r["method"], r["batch_size"]) == (method, batch_size)]
    return [100 * r[epoch]["test_accuracy"] for r in sorted(chosen, key=lambda r: r["seed"])]


def table_1(packed):
    (section,) = paper.sections(EXPERIMENTS["table1"](Setting()), Setting(), packed)
    return {row.cells[0].text: dict(zip(section.table.header, row.cells)) for row in section.table.rows}


@pytest.mark.parametrize(
    ("accuracy", "loss", "effects"),
    [
        (+0.02, -0.3, ("good", "good")),
        (+0.02, +0.3, ("good", "bad")),
        (-0.02, +0.3, ("bad", "bad")),
        (-0.02, -0.3, ("bad", "faint")),  # less sure of everything, and no better
        (0.0, -0.3, ("faint", "good")),
    ],
)
def test_a_loss_is_better_where_it_falls_and_accuracy_does_not(as_if_run, accuracy, loss, effects):
    runs = []
    for method, change, lower in (("plain", 0.0, 0.0), ("smoothout", accuracy, loss)):
        for seed in range(3):
            config = configure(Setting(), C1, 5000, method).with_seed(seed)
            found = as_if_run(config, 0.8 + change + 1e-4 * seed * (1 if method == "plain" else -1))
            last = replace(found.run.record.last, test_loss=1.0 + lower + 1e-3 * seed)
            runs.append(replace(found, run=replace(found.run, record=replace(found.run.record, last=last))))
    table = table_1(Records(runs))
    row = table["C1, CIFAR-10, batch 5000: SmoothOut"]
    assert (row["effect³"].tone, row["effect on it⁵"].tone) == effects
    assert row["loss⁵"].text == f"{1.001 + loss:.3f} ± 0.001"
    nothing = table["C1, CIFAR-10, batch 256: SmoothOut"]  # no run, and every cell in its column
    assert (nothing["n"].text, nothing["loss⁵"].text, nothing["paper's"].text) == ("0", "–", "0.0003")


def test_a_row_says_what_the_records_say(packed):
    row = table_1(packed)["C1, CIFAR-10, batch 5000: SmoothOut"]
    values, base = accuracies("smoothout", 5000), accuracies("plain", 5000)
    mean, best = statistics.mean(values), accuracies("smoothout", 5000, "best")
    assert row["n"].text == "5"
    assert row["last epoch"].text == f"{mean:.2f} ± {statistics.stdev(values):.2f} %"
    assert row["best epoch¹"].text == f"{statistics.mean(best):.2f} ± {statistics.stdev(best):.2f} %"
    assert row["paper"].text == "80.34 %"
    assert row["gap to the paper²"].text == f"{mean - 80.34:+.2f}"
    assert row["effect³"].text.startswith(f"{mean - statistics.mean(base):+.2f} [")
    assert row["effect³"].tone == "good"
    assert (row["paper's effect"].text, row["sign"].text) == ("+3.04", "as the paper's")


def test_the_gpu_minutes_are_the_sum_over_the_runs_that_know_theirs(packed):
    """Those of the pack do not: fifteen at a time shared a GPU, and each counted all of the time."""
    (section,) = paper.sections(EXPERIMENTS["table1"](Setting()), Setting(), packed)
    assert not any("GPU minutes" in text for text in section.paragraphs)
    known, unknown = packed.all()[:20], packed.all()[20:]
    known = [_with_record(found, provenance=replace(found.run.record.provenance, together=5)) for found in known]
    (section,) = paper.sections(EXPERIMENTS["table1"](Setting()), Setting(), Records([*known, *unknown]))
    minutes = sum(found.run.record.seconds for found in known) / 60
    told = f"Training took {minutes:.1f} GPU minutes for 20 runs; of 10 more, which shared a GPU, it is not known."
    assert section.paragraphs[-1] == told


def _with_record(found, **changes):
    return replace(found, run=replace(found.run, record=replace(found.run.record, **changes)))


def test_sharpness_has_its_status_and_no_gain_is_claimed_where_zero_is_inside(packed):
    rows = table_1(packed)
    assert rows["C1, CIFAR-10, batch 5000: baseline"]["sharpness⁴"].text == "3,083 (1 of 1)"
    small = rows["C1, CIFAR-10, batch 256: SmoothOut"]
    assert (small["effect³"].tone, small["sign"].text) == ("faint", "no difference")
    unmeasured = rows["F1, MNIST, batch 256: baseline"]
    assert (unmeasured["n"].text, unmeasured["last epoch"].text, unmeasured["paper"].text) == ("0", "–", "98.49 %")


def test_verdicts_come_from_the_records(packed):
    verdicts = {v.claim: v for v in EXPERIMENTS["claims"](Setting()).judge(packed)}
    more = next(v for claim, v in verdicts.items() if "gains more" in claim)
    gains = [statistics.mean(accuracies("smoothout", b)) - statistics.mean(accuracies("plain", b)) for b in (256, 5000)]
    assert more.verdict == "holds"
    assert f"gain {gains[0]:+.2f} points at 256, {gains[1]:+.2f} at 5000" in more.evidence
    reaches = next(v for claim, v in verdicts.items() if "reaches" in claim)
    assert reaches.verdict == "does not hold: it stays below"
    spread = next(v for claim, v in verdicts.items() if "standard deviations" in claim)
    assert f"SmoothOut 5000: {statistics.stdev(accuracies('smoothout', 5000)):.2f} [" in spread.evidence
    assert sum(v.verdict == "not measured yet" for v in verdicts.values()) == 4


def smoothed(as_if_run, accuracies, method="smoothout", batch_size=5000, measured=()):
    """Runs of C1 by their accuracies, the first with seed 0."""
    config = configure(Setting(), C1, batch_size, method)
    runs = [as_if_run(config.with_seed(seed), accuracy) for seed, accuracy in enumerate(accuracies)]
    return [replace(run, measured=frozenset(measured)) for run in runs]


def row_of(runs, method="SmoothOut"):
    return table_1(Records(runs))[f"C1, CIFAR-10, batch 5000: {method}"]


def test_a_single_run_is_compared_with_the_baseline_of_its_seed(as_if_run):
    runs = [*smoothed(as_if_run, (0.76, 0.72, 0.71), "plain"), *smoothed(as_if_run, (0.75,))]
    assert row_of(runs)["effect³"].text == "-1.00 (too few runs)"
    assert "effect³" not in row_of(runs[1:])  # no baseline of that seed


def test_no_gain_is_claimed_where_runs_diverged(as_if_run):
    runs = [*smoothed(as_if_run, (0.700, 0.701, 0.702), "plain"), *smoothed(as_if_run, (0.750, 0.751, 0.753, 0.0))]
    finished, lost = runs[:-1], replace(runs[-1], run=replace(runs[-1].run, record=None, failure="the loss is nan"))
    assert (row_of(finished)["effect³"].tone, row_of(finished)["sign"].text) == ("good", "as the paper's")
    with_lost = row_of([*finished, lost])
    assert (with_lost["effect³"].tone, with_lost["sign"].text) == ("faint", "no claim: runs diverged")
    assert with_lost["n"].text == "3, 1 more diverged"
    shown, hidden = (
        digest([(Setting(), table1(Setting()))], Records(each)).to_markdown() for each in (finished, [*finished, lost])
    )
    assert "**" in shown
    assert "**" not in hidden
    assert "1 more diverged" in hidden


def test_nothing_is_claimed_against_a_baseline_of_which_runs_diverged(as_if_run):
    base = smoothed(as_if_run, (0.700, 0.701, 0.702, 0.0), "plain")
    base[-1] = replace(base[-1], run=replace(base[-1].run, record=None, failure="the loss is nan"))
    for accuracies in ((0.750, 0.751, 0.753), (0.650, 0.651, 0.653)):
        runs = [*base, *smoothed(as_if_run, accuracies)]
        assert row_of(runs[:3] + runs[4:])["effect³"].tone in ("good", "bad")
        assert (row_of(runs)["effect³"].tone, row_of(runs)["sign"].text) == ("faint", "no claim: runs diverged")
        assert "**" not in digest([(Setting(), table1(Setting()))], Records(runs)).to_markdown()


def test_tables_4_and_5_compare_what_the_paper_reads_from_them(as_if_run):
    for name, above, below in (("table4", 1, 2), ("table5", 1, 2), ("table5", 3, 4)):
        experiment = EXPERIMENTS[name](Setting("paper", "authors"))
        values = {above: (0.920, 0.921, 0.922), below: (0.910, 0.911, 0.912)}
        runs = [
            as_if_run(experiment.rows[row].config.with_seed(seed), value)
            for row, each in values.items()
            for seed, value in enumerate(each)
        ]
        (verdict,) = (v for v in experiment.judge(Records(runs)) if v.verdict != "not measured yet")
        assert (verdict.verdict, verdict.evidence.split(" [")[0]) == ("holds", "+1.00 points")


def test_gains_at_two_batch_sizes_are_compared_over_the_seeds_that_have_both(as_if_run):
    runs = [*smoothed(as_if_run, (0.790, 0.791, 0.792, 0.5), "plain", 256)]
    runs += smoothed(as_if_run, (0.800, 0.802, 0.801), batch_size=256)
    runs += [*smoothed(as_if_run, (0.750, 0.751, 0.752), "plain"), *smoothed(as_if_run, (0.780, 0.782, 0.781))]
    verdict = next(v for v in EXPERIMENTS["claims"](Setting()).judge(Records(runs)) if "gains more" in v.claim)
    assert verdict.verdict == "holds"
    assert "gain +1.00 points at 256, +3.00 at 5000" in verdict.evidence


def test_seeds_are_no_further_evidence_of_a_ranking(as_if_run, monkeypatch):
    """Six configurations whose sharpness says nothing of their accuracy: many seeds of each do not change that."""
    sharp = dict(zip(((m, b) for b in (256, 5000) for m in table1_methods), (1.0, 2.0, 4.0, 3.0, 6.0, 5.0)))
    accuracy = dict(zip(sharp, (0.76, 0.80, 0.78, 0.74, 0.77, 0.75)))

    def answer(found, wanted):
        return SimpleNamespace(value=sharp[at(found)], slope=sharp[at(found)])

    def at(found):
        return found.run.config.method, found.run.config.batch_size

    monkeypatch.setattr(Found, "answer", answer)
    runs = [run for m, b in sharp for run in smoothed(as_if_run, [accuracy[m, b] + 1e-5 * s for s in range(9)], m, b)]
    verdict = next(v for v in EXPERIMENTS["claims"](Setting()).judge(Records(runs)) if "rank the minima" in v.claim)
    assert verdict.verdict == "no common ranking measured"
    assert "over the means of 6 configurations (54 runs)" in verdict.evidence


def test_table_2_is_in_the_markdown_although_it_has_a_picture(as_if_run):
    experiment = EXPERIMENTS["table2"](Setting())
    assert experiment.drawings
    wanted = [(Setting(), experiment), (Setting(), EXPERIMENTS["figure2"](Setting()))]
    assert "- Table 2: " in results_markdown(wanted, Records([]), "smoothout").split("## Not measured yet")[1]
    said = results_markdown(wanted, Records([as_if_run(experiment.rows[0].config, 0.92)]), "smoothout")
    assert "| ResNet44, CIFAR-10, batch 2048: baseline, 400 epochs, sqrt | 1 | 92.00 % |" in said
    assert "Figure" not in said


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_without_a_record_nothing_is_claimed(name, tmp_path):
    settings = [Setting("paper", preset) for preset in PRESETS]
    experiments = [(setting, EXPERIMENTS[name](setting)) for setting in settings]
    html = write_page(tmp_path, experiments, Records([]), "smoothout reproduce").read_text()
    assert 'class="good"' not in html
    assert "<h2>" in html
    judge = experiments[0][1].judge
    assert all(v.verdict == "not measured yet" for v in (judge(Records([])) if judge else ()))


@pytest.fixture(scope="module")
def tables():
    """Of all records, which takes seconds to make."""
    code, said, error = reproduce("results", "--markdown")
    assert (code, error) == (0, "")
    return said


@pytest.fixture(scope="module")
def in_short(tables):
    """The first table."""
    return next(part for part in tables.split("\n\n") if part.startswith("| accuracy on the test set |"))


def test_the_digest_is_the_table_of_the_results_in_short(tmp_path):
    shutil.copy(PACK, tmp_path)
    (_, digested, _), (_, whole, _) = (
        reproduce("results", how, "--results", tmp_path) for how in ("--digest", "--markdown")
    )
    assert f"\n\n{digested}\n## " in whole


def test_the_results_in_the_docs_are_those_of_the_records(tables):
    assert tables == (ROOT / "docs" / "results.md").read_text(), "run: make results"


def test_what_only_repeats_the_runs_of_another_table_or_preset_is_left_out(tables, in_short):
    headings = [line for line in tables.splitlines() if line.startswith("## ")]
    assert sum("Table 1" in heading and "preset ours" in heading for heading in headings) == 1
    flatness = [heading for heading in headings if "Flatness" in heading and "preset ours" in heading]
    assert len(flatness) == 1  # the rows stand in Table 1, so verdicts alone
    assert flatness[0].endswith("verdicts")
    assert "batch 5000: baseline (the run of preset paper)" in tables
    assert "C1, CIFAR-10, batch 256, preset ours" in in_short
    assert "C1, CIFAR-10, batch 5000, preset ours" not in in_short  # chosen: the paper's strengths
    assert "too few runs" not in in_short


def test_the_digest_in_readme_is_that_of_the_records(in_short):
    _, _, begun = (ROOT / "README.md").read_text().partition("<!-- smoothout reproduce results --digest -->")
    in_readme, _, _ = begun.partition("<!-- end of what it prints -->")
    assert in_short == in_readme.strip(), "run: make results"


def test_the_list_counts_and_estimates(tmp_path):
    shutil.copy(PACK, tmp_path)
    code, said, _ = reproduce("--list", "--seeds", 5, "--out", tmp_path / "out", "--results", tmp_path)
    assert code == 0
    for name in EXPERIMENTS:
        assert name in said
    (line,) = [line for line in said.splitlines() if line.strip().startswith("table1 ")]
    assert " 90 " in line
    assert " 30 " in line


def test_the_help_names_every_experiment():
    code, said, _ = reproduce("--help")
    names = (
        said.split("NAMES:")[1]
        .split("or `all`")[0]
        .replace("…", "figure5 figure6 figure7 figure8 table2 table3 table4")
    )
    assert code == 0
    assert set(EXPERIMENTS) <= set(re.findall(r"\w+", names))


def test_a_dry_run_prints_every_configuration(tmp_path):
    nothing = ("--out", tmp_path, "--results", tmp_path)
    code, said, _ = reproduce("all", "--preset", "all", "--imagenet", "some/folder", "--dry-run", *nothing)
    assert code == 0
    for preset in PRESETS:
        setting = Setting("paper", preset, "some/folder")
        hashes = {row.config.hash for make in EXPERIMENTS.values() for row in make(setting).rows}
        assert all(each in said for each in hashes)
    assert "dataset=imagefolder:some/folder" in said
    assert "ResNet44, CIFAR-10, batch 2048: AdaSmoothOut, 400 epochs, sqrt  paper 92.63 %" in said


def test_wrong_names_get_the_nearest_right_one():
    code, _, error = reproduce("figure3")
    assert code == 1
    assert "there is no experiment 'figure3'" in error
    code, _, error = reproduce("table1", "--preset", "author")
    assert code == 1
    assert "did you mean 'authors'?" in error
    code, _, error = reproduce()
    assert code == 1
    assert "--list" in error


def test_rows_that_share_a_configuration_keep_their_own_baseline_of_the_paper():
    (section,) = paper.sections(EXPERIMENTS["table1"](Setting("tiny")), Setting("tiny"), Records([]))
    column = section.table.header.index("paper's effect")
    effects = [row.cells[column].text for row in section.table.rows]
    assert [effect for effect in effects if effect != "–"] == ["+0.12", "+0.41", "+2.05", "+3.04", "+3.18", "+4.06"]
