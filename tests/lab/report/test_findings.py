"""What a page says in words is what the runs show, and no more."""

from dataclasses import replace

import pytest

from smoothout.lab import measurements
from smoothout.lab.config import resolve
from smoothout.lab.groups import group_runs
from smoothout.lab.measurements import Measurement
from smoothout.lab.report.findings import findings_section
from smoothout.lab.runs import load_run
from smoothout.lab.train.start import Options, train
from smoothout.measure import Sensitivity


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("findings") / "run"
    train(resolve(model="mlp", method="plain", epochs=1, batch_size=400), folder, Options(device="cpu", quiet=True))
    return load_run(folder)


@pytest.fixture
def told(run, tmp_path):
    """The sentences about runs of given (batch size, method): loss rises of seeds 0, 1, …"""

    def make(size, method, seed, rise):
        config = replace(resolve(model="mlp", method=method, epochs=1, batch_size=size), seed=seed)
        path = tmp_path / f"{size}-{method}-{seed}"
        path.mkdir()
        curve = Sensitivity((0.0, 0.1), (0.5, 0.5 + (rise or 0.0)), (0.0, 0.0), None, 1.0)
        if rise is not None:
            measurements.save(path, Measurement("sensitivity-train", curve, {"strengths": (0.0, 0.1)}))
        return replace(run, path=path, config=config, record=replace(run.record, config=config))

    def sentences(rises):
        runs = [make(*kind, seed, rise) for kind, values in rises.items() for seed, rise in enumerate(values)]
        section = findings_section(group_runs(runs))
        return () if section is None else section.paragraphs

    return sentences


def test_how_much_sharper_the_large_batch_is_stands_first(told):
    first, *_ = told(
        {
            (16, "plain"): (0.01, 0.02, 0.03),
            (16, "smoothout"): (0.01, 0.02, 0.04),
            (400, "plain"): (0.5, 0.6, 0.7),
        }
    )
    assert first == (
        "Without noise the large batch ends in a minimum 30 times as sharp as the small batch's (loss rise 0.6 against "
        "0.02)."
    )


@pytest.mark.parametrize(
    "large",
    [
        pytest.param((0.005, 0.006, 0.007), id="flatter"),
        pytest.param((0.0, 0.02, 0.9), id="not measurably"),
        pytest.param((0.5, 0.6), id="two runs"),
    ],
)
def test_it_is_not_said_where_it_is_not_so(told, large):
    assert not told({(16, "plain"): (0.01, 0.02, 0.03), (400, "plain"): large})


def test_the_lesson_needs_something_flatter(told):
    plain = (0.5, 0.6, 0.7)
    lesson = "that are flatter"
    none = told({(16, "plain"): plain, (16, "smoothout"): (0.5, 0.61, 0.69)})
    assert len(none) == 1
    assert lesson not in none[0]
    some = told({(400, "plain"): plain, (400, "smoothout"): (0.1, 0.2, 0.31)})
    assert some[-1].startswith("Of 1 that are flatter, 0 have a lower test loss")


def test_of_what_was_not_wholly_measured_nothing_is_said(told):
    plain = (0.5, 0.6, 0.7)
    assert not told({(400, "plain"): plain, (400, "smoothout"): (0.1, None, 0.31)})
    assert not told({(16, "plain"): (0.5, None, 0.7), (16, "smoothout"): plain})
