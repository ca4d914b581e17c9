"""The comparison of methods: its numbers were chosen on held-out images, and its costs are what methods cost."""

import sys
from pathlib import Path

import pytest

from smoothout.lab.cli import run
from smoothout.lab.experiments.catalogue import EXPERIMENTS
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.rivals import BATCHES, CHOSEN, GRIDS, best
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.methods import METHODS
from smoothout.lab.report import paper
from smoothout.lab.runs import find_runs, load_run

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    packs = [RESULTS / "rivals-digits-cpu.jsonl", RESULTS / "rivals-choice-digits-cpu.jsonl"]
    return Records.read([], packs, tmp_path_factory.mktemp("unpacked"))


def test_every_method_of_the_lab_is_compared():
    assert set(METHODS) - {"plain", "ensemble"} == set(GRIDS) == set(CHOSEN)
    assert len({len(values) for _, values in GRIDS.values()}) == 1  # as many tries for each


@pytest.mark.parametrize("method", GRIDS)
def test_the_numbers_are_those_that_held_out_images_chose(packed, method):
    assert tuple(best(Setting(), method, batch_size, packed) for batch_size in BATCHES) == CHOSEN[method]


def test_nothing_is_chosen_from_half_of_the_runs(packed):
    last = EXPERIMENTS["rivals_choice"](Setting()).rows[-1].config  # of ema at the large batch
    some = Records(found for found in packed.all() if found.run.config != last)
    with pytest.raises(ValueError, match=r"ema, batch 480: the values have \[4, 5\] runs"):
        best(Setting(), "ema", 480, some)
    with pytest.raises(ValueError, match=r"\[0\] runs"):
        best(Setting(), "sam", 48, Records([]))


def test_all_is_measured_and_costs_stand_beside_it(packed):
    (section,) = paper.sections(EXPERIMENTS["rivals"](Setting()), Setting(), packed)
    rows = {row.cells[0].text: dict(zip(section.table.header, row.cells)) for row in section.table.rows}
    assert len(rows) == 20
    assert all(row["n"].text == "5" and " of 5)" in row["sharpness⁴"].text for row in rows.values())
    evaluations = {name: row["gradient evaluations"].text for name, row in rows.items() if "batch 48:" in name}
    twice = {name for name, count in evaluations.items() if count == "1,800"}
    assert {name.split(": ")[1] for name in twice} == {"SAM, ρ = 0.2", "ASAM, ρ = 1"}
    assert {count for name, count in evaluations.items() if name not in twice} == {"900"}  # half the epochs too
    assert all(" ± " in row["seconds"].text for row in rows.values())


def test_a_diverged_run_is_counted(packed):
    (section,) = paper.sections(EXPERIMENTS["rivals_choice"](Setting()), Setting(), packed)
    numbers = {row.cells[0].text: row.cells[1:3] for row in section.table.rows}
    assert numbers["MLP, digits, batch 48: LPF-SGD, a = 0.8"][0].text == "4, 1 more diverged"
    assert numbers["MLP, digits, batch 48: LPF-SGD, a = 1.6"][1].text == "diverged (5 runs)"
    assert "seconds" not in section.table.header


def test_tiny_scale_runs_every_method(tmp_path, monkeypatch):
    out = tmp_path / "out"
    command = ["smoothout", "reproduce", "rivals", "--scale=tiny", "--device=cpu", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", [*command, f"--results={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        run()
    assert not end.value.code
    assert {load_run(path).record.config.method for path in find_runs(out)} == {"plain", *GRIDS}
