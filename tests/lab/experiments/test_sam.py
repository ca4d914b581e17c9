"""SAM beside our methods: what is compared, and that it waits for its radius."""

from in_process import smoothout
from smoothout.lab.experiments.catalogue import EXPERIMENTS
from smoothout.lab.experiments.choice import RADII, candidates
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1
from smoothout.lab.experiments.vocabulary import Setting


def test_sam_has_its_chosen_radius_and_as_many_evaluations_with_half_the_epochs(monkeypatch):
    monkeypatch.delitem(CHOSEN, ("c1", 256, "sam"), raising=False)
    monkeypatch.setitem(CHOSEN, ("c1", 5000, "sam"), {"strength": 0.2})
    rows = EXPERIMENTS["sam"](Setting()).rows
    assert {row.config.batch_size for row in rows} == {5000}  # the other waits
    plain, *_, whole, half = rows
    assert [row.config.method for row in rows] == ["plain", "smoothout", "adasmoothout", "sam", "sam"]
    assert (whole.config.strength, whole.config.epochs, half.config.epochs) == (0.2, 100, 50)
    assert whole.label == "C1, CIFAR-10, batch 5000: SAM, ρ = 0.2"
    assert half.label == f"{whole.label}, half the epochs"
    assert all(row.versus == plain.config for row in rows[1:])
    assert all(row.config.hold_out == 0 for row in rows)


def test_its_radii_are_judged_on_held_out_images():
    rows = candidates(Setting("paper", "ours"), C1, 256, "sam")
    assert [row.config.strength for row in rows] == [0.05 * factor for factor in RADII]
    assert {(row.config.method, row.config.hold_out) for row in rows} == {("sam", 5000)}
    assert rows[0].label.endswith("SAM, ρ = 0.0125")


def test_without_a_radius_there_is_nothing_to_run_and_that_is_said(tmp_path, monkeypatch):
    for batch_size in (256, 5000):
        monkeypatch.delitem(CHOSEN, ("c1", batch_size, "sam"), raising=False)
    refused = smoothout("reproduce", "sam", "--out", "runs", cwd=tmp_path)
    assert refused.returncode == 1
    assert "sam: nothing to run yet" in refused.stderr
    assert EXPERIMENTS["sam"](Setting("tiny")).rows
