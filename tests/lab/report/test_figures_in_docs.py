"""Figures in README and docs: every accuracy, mean ± deviation and interval must be in `docs/results.md`."""

import html
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from smoothout.lab.experiments.catalogue import EXPERIMENTS
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.vocabulary import Setting
from smoothout.lab.report.paper_figures import drawn, to_png

ROOT = Path(__file__).parents[3]
# The log tells history: figures of records that were measured again since.
PAGES = [ROOT / "README.md", *sorted(p for p in ROOT.glob("docs/**/*.md") if p.name not in ("log.md", "results.md"))]
FIGURES = re.compile(
    r"[+-]\d+\.\d+(?: points)? \[[+-]\d+\.\d+, [+-]\d+\.\d+\]|× \d+\.\d+ \[\d+\.\d+, \d+\.\d+\]"
    r"|\d[\d,]*(?:\.\d+)? ± \d[\d,]*(?:\.\d+)?(?: %)?|\d\d\.\d\d %"
)


def figures_of(text):
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)  # what blocks print is compared where they are run
    found = FIGURES.findall(re.sub(r"\s+", " ", text.replace("−", "-").replace("**", "")))
    return {figure.replace(" points", "") for figure in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_accuracy_and_interval_is_among_the_results(page):
    """`docs/results.md` itself is made from the records, by another test."""
    assert figures_of(page.read_text()) <= figures_of((ROOT / "docs" / "results.md").read_text())


def test_a_figure_from_nowhere_is_noticed():
    text = (ROOT / "docs" / "concepts.md").read_text()
    assert len(figures_of(text)) >= 3
    known = figures_of((ROOT / "docs" / "results.md").read_text())
    assert not figures_of(text.replace("+3.78", "+3.79")) <= known
    for kind in ("×", "±"):
        figure = next(figure for figure in sorted(known) if kind in figure)
        assert figures_of(figure) <= known
        assert figures_of(figure.translate(str.maketrans("0123456789", "1234567890"))) - known


def test_the_best_epoch_flatters_some_methods_more_than_others():
    """As the notes of the tables say: what it adds to the last one, by row."""
    text = (ROOT / "docs" / "results.md").read_text()
    tables = text.split("## In short")[0] + text.split("## In short")[1].split("\n## ", 1)[1]
    lines = [line for line in tables.splitlines() if " against " not in line]
    rows = [re.findall(r"(\d+\.\d+) (?:± \d+\.\d+ )?%", line) for line in lines]
    added = [float(row[1]) - float(row[0]) for row in rows if len(row) >= 2]
    assert min(added) >= 0.0
    assert max(added) > 10 > 1 > sorted(added)[len(added) // 2]
    assert "some more than others" in (ROOT / "docs" / "results.md").read_text()


def test_the_kept_page_has_all_results_and_names_no_place_of_a_machine():
    page = html.unescape((ROOT / "results" / "index.html").read_text())
    assert figures_of((ROOT / "docs" / "results.md").read_text()) <= figures_of(page)
    assert not re.search(r"--[a-z-]+ /", page)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    packs = sorted((ROOT / "results").glob("*.jsonl"))
    return Records.read([], packs, tmp_path_factory.mktemp("unpacked"))


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "img").glob("*.png")), ids=lambda picture: picture.stem)
def test_pictures_are_of_the_newest_records(picture, records):
    """As `smoothout reproduce results --out FOLDER` draws and names them; another font may differ by a shade."""
    name, preset, number = picture.stem.split("-")
    drawing = EXPERIMENTS[name](Setting("paper", preset)).drawings[int(number)]
    now, kept = (grey(content) for content in (to_png(drawn(drawing, records)), picture.read_bytes()))
    assert now.shape == kept.shape
    assert np.abs(now - kept).mean() < 0.5, "run: make results"


def grey(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), float)
