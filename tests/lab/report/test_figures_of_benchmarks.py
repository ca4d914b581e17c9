"""Ratios of `benchmarks/results/README.md` against the records they name: both times of a ratio from one record."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PAGE = (RESULTS / "README.md").read_text()
RESNET44 = (RESULTS.parents[1] / "docs" / "resnet44.md").read_text()
README = (RESULTS.parents[1] / "README.md").read_text()


def rows(name):
    return json.loads((RESULTS / name).read_text())["rows"]


def line(start):
    (found,) = (text for text in PAGE.splitlines() if text.startswith(f"| {start}"))
    return found


DEVICE, CALLED = "draw + restore, device ms", "draw + restore, ms"


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (DEVICE, DEVICE, "**{:,.0f} × / {:,.0f} ×** by device time"),
        (CALLED, CALLED, "{:,.0f} × / {:,.0f} × as called"),
        (CALLED, DEVICE, "{:,.0f} × / {:,.0f} × our device time"),
    ],
)
def test_how_much_slower_the_2018_way_is(theirs, ours, said):
    found = {row["method"]: row for row in rows("step_overhead-cuda.json") if row["case"] == "ResNet44, batch 2048"}
    ratios = [
        found[f"{method}, 2018"][theirs]["median"] / found[method][ours]["median"]
        for method in ("SmoothOut", "AdaSmoothOut")
    ]
    assert said.format(*ratios) in line("the 2018 way, the same")


def test_how_much_faster_convolutions_of_all_ghosts_are():
    times = {}
    for row in rows("ghost_conv-cuda.json"):
        if row["how"] in ("cuDNN", "ours"):
            times.setdefault((row["layer"], row["what"]), {})[row["how"]] = row["µs"]["median"]
    ratios = [both["cuDNN"] / both["ours"] for both in times.values()]
    assert f"{min(ratios):.1f} to {max(ratios):.0f} times as fast" in line("its convolutions")


def test_what_a_step_costs_beside_the_plain_one():
    text = line("step with AdaSmoothOut ÷ plain")
    ratios = {method: [] for method in ("SmoothOut", "AdaSmoothOut")}
    for row in rows("step_overhead-cuda.json"):
        if row["method"] in ratios:
            ratios[row["method"]].append(row["÷ plain"])
    for ratio in ratios["AdaSmoothOut"]:
        assert f"**{ratio['median']:.3f}** ({ratio['low']:.3f} to {ratio['high']:.3f})" in text
    assert "SmoothOut " + ", ".join(f"{ratio['median']:.3f}" for ratio in ratios["SmoothOut"]) in text
    medians = [ratio["median"] for both in ratios.values() for ratio in both]
    assert f"takes {min(medians):.3f} to {max(medians):.3f} times as long as a plain one" in README


def test_what_noise_costs_resnet44_in_turns():
    said = line("the same for Table 2's rows")
    found = {row["method"]: row["over plain"] for row in rows("methods_in_turns-cuda.json")}
    assert found.pop("plain")["median"] == 1.0
    for ratio in found.values():
        median = f"{ratio['median']:.3f}"
        assert f"{median} ({ratio['low']:.3f} to {ratio['high']:.3f})" in said.replace("*", "")
        assert median in RESNET44


def test_many_tensors_take_time_on_the_host():
    times = {}
    for row in rows("scaling-cuda.json"):
        if row["parameters"] == 10_000_000:
            times.setdefault(row["scale"], []).append((row["tensors"], row["called ms"]["median"]))
    ends = [
        (of[-4][1], of[-1][1])
        for of in times.values()
        if [tensors for tensors, _ in of[-4:]] == [10, 100, 1000, 10_000]
    ]
    said = " and ".join(f"{first:.2f} → {last:.1f}" for first, last in ends)
    assert f"{said} ms" in line("device time in tensors")


def test_how_much_longer_sam_takes():
    ratios = [row["SAM ÷ AdaSmoothOut"]["median"] for row in rows("step_overhead-cuda.json") if row["method"] == "SAM"]
    assert f"**{min(ratios):.2f} to {max(ratios):.2f}**" in line("SAM's step")
