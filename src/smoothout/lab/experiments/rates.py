"""Whether gains outlive a learning rate of its own for each side: C1 at the large batch, ResNet44. Not of the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import DECIDED_BY, FINAL_SEEDS, HALF_WAY, HELD_OUT, held_out, mean_accuracy
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.networks import C1, RESNET44, Network, as_published, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.verdicts import on_difference
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Curve, Drawing, Experiment, Row, Setting, Verdict
from smoothout.lab.groups import FEWEST_RUNS, Group, compare, reported, sense_of
from smoothout.lab.methods import METHODS

Settings = dict[str, float]
Best = tuple[Settings, Group]
NAMES = {"lr": "a rate of {:g}", "weight_decay": "weight decay {:g}", "strength": "a = {:g}"}


class Round(NamedTuple):
    """What both sides try on held-out images, and what of it goes to the test set.

    The runs that choose are no judges of the gain: the best of many flatters itself.

    Args:
        beside: what the method tries beyond that, of its noise.
        chosen: of the baseline and of the method, as `best_of` says of the records in results/; None: not known yet.
    """

    what: str
    tried: tuple[Settings, ...]
    beside: tuple[Settings, ...] = ()
    chosen: tuple[Settings, Settings] | None = None


class Contest(NamedTuple):
    """A method against the baseline, on held-out images with seeds of its own, then on the test set."""

    network: Network
    method: str
    seeds: tuple[int, ...]
    rounds: tuple[Round, ...]
    held_out: Callable[..., Config]  # of a setting, a method, and settings by name
    on_the_test_set: Callable[..., Config]

    @property
    def sides(self) -> tuple[str, str]:
        return "plain", self.method

    def tried(self, round_: Round, method: str) -> tuple[Settings, ...]:
        return round_.tried + (round_.beside if method == self.method else ())


# ---- C1 --------------------------------------------------------------------------------------------------------------

_RATES = tuple({"lr": rate} for rate in (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008))
# Of these the baseline's best was the highest, and SmoothOut's strength had been chosen at the paper's rate.
_MORE_RATES = (*_RATES, {"lr": 0.016}, {"lr": 0.032})
_STRONGER = tuple({"lr": rate, "strength": a} for rate in (0.002, 0.004, 0.008, 0.016) for a in (0.075, 0.15))


def _c1_on_the_test_set(setting: Setting, method: str, **settings: float) -> Config:
    return configure(as_published(setting), C1, C1.large, method, **settings)  # the strength at which rates were chosen


def _c1_held_out(setting: Setting, method: str, **settings: float) -> Config:
    return held_out(setting, C1, C1.large, method, **settings)  # the runs at the paper's rate: of `choice`, `claims`


# ---- ResNet44 --------------------------------------------------------------------------------------------------------

# Beside `finals`, whose winner and baseline are the run at the rate and the weight decay of the paper.
_DEEP: tuple[Settings, ...] = ({}, {"lr": 0.05}, {"lr": 0.2}, {"weight_decay": 5e-4})


def _deep_held_out(setting: Setting, method: str, **settings: float) -> Config:
    place = RESNET44.model, RESNET44.large
    how: dict[str, Any] = {**CHOSEN[*place, "plain"], **CHOSEN[*place, method], **settings}
    return held_out(setting, RESNET44, RESNET44.large, method, stop_after=DECIDED_BY, **how)


CONTESTS = (
    Contest(
        C1,
        "smoothout",
        tuple(range(FEWEST_RUNS)),
        (
            Round(
                "each side at its best of six learning rates",
                _RATES,
                chosen=({"lr": 0.008}, {"lr": 0.004}),
            ),
            Round(
                "each side at its best of eight learning rates, SmoothOut at its best strength, too",
                _MORE_RATES,
                beside=_STRONGER,
            ),
        ),
        _c1_held_out,
        _c1_on_the_test_set,
    ),
    Contest(
        RESNET44,
        "adasmoothout",
        FINAL_SEEDS,
        (Round("each side at its best of three learning rates and more weight decay", _DEEP),),
        _deep_held_out,
        resnet44,
    ),
)


def rates(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")
    rows = [row for contest in CONTESTS for row in _rows_of(setting, contest)]
    return Experiment(
        "rates",
        "Learning rates: each side at its own",
        tuple(rows),
        notes=(
            f"Accuracies on {HELD_OUT:,} held-out training images where a row does not name the test set, each row "
            "against the baseline of its rate. SmoothOut has the paper's strength where none is named, ResNet44 trains "
            "as preset ours where nothing is, and its rates are for batch 128, multiplied by 4. Then each side has "
            "what was best for it, on the test set.",
        ),
        drawings=(_by_rate(rows),),
        judge=partial(_judge, setting),
    )


def _rows_of(setting: Setting, contest: Contest) -> list[Row]:
    rows: dict[Config, Row] = {}
    for round_ in contest.rounds:
        for method in contest.sides:
            for settings in contest.tried(round_, method):
                row = _held_out_row(setting, contest, method, settings)
                rows.setdefault(row.config, row)
    return [*rows.values(), *(row for round_ in contest.rounds for row in _on_the_test_set(setting, contest, round_))]


def _held_out_row(setting: Setting, contest: Contest, method: str, settings: Settings) -> Row:
    config = contest.held_out(setting, method, **settings)
    told = "".join(f", {NAMES[name].format(value)}" for name, value in settings.items())
    half = HALF_WAY if config.stop_after else ""
    alike = {name: value for name, value in settings.items() if name != "strength"}
    baseline = None if method == "plain" else contest.held_out(setting, "plain", **alike)
    text = label(contest.network, contest.network.large, method, told + half)
    return Row(text, config, versus=baseline, seeds=contest.seeds)


def _on_the_test_set(setting: Setting, contest: Contest, round_: Round) -> list[Row]:
    """Each side at its own settings, once both are known; the baseline first."""
    if round_.chosen is None:
        return []
    configs = [
        contest.on_the_test_set(setting, method, **settings)
        for method, settings in zip(contest.sides, round_.chosen, strict=True)
    ]
    return [
        Row(
            label(contest.network, contest.network.large, config.method, f", {round_.what}, test set"),
            config,
            versus=None if config == configs[0] else configs[0],
        )
        for config in configs
    ]


def _by_rate(rows: list[Row]) -> Drawing:
    """Of C1."""
    curves = [
        Curve(METHODS[row.config.method].title + (f", a = {row.config.strength:g}" if row.versus else ""), row.config)
        for row in rows
        if row.config.hold_out and row.config.model == C1.model
    ]
    caption = f"C1 on CIFAR-10, batch {C1.large}, by learning rate: accuracy on held-out training images, last epoch."
    return Drawing("accuracy by learning rate", caption, tuple(curves))


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    return tuple(
        judge(setting, contest, round_, records)
        for contest in CONTESTS
        for round_ in contest.rounds
        for judge in (_judged_on_held_out_images, _judged_on_the_test_set)
    )


def _claim(contest: Contest, round_: Round) -> str:
    on = f"{contest.network.title}, batch {contest.network.large}"
    return f"{on}: {METHODS[contest.method].title} gains over the baseline, {round_.what}"


def _judged_on_the_test_set(setting: Setting, contest: Contest, round_: Round, records: Records) -> Verdict:
    claim = f"{_claim(contest, round_)}, test set"
    rows = _on_the_test_set(setting, contest, round_)
    if not rows:
        return Verdict(claim, NOT_MEASURED, "")
    return on_difference(claim, rows[0].config, rows[1].config, records, reported)


def _judged_on_held_out_images(setting: Setting, contest: Contest, round_: Round, records: Records) -> Verdict:
    claim = _claim(contest, round_)
    best = _best_of_both(setting, contest, round_, records)
    if best is None:
        return Verdict(claim, NOT_MEASURED, "")
    (of_baseline, baseline), (of_method, smoothed) = best
    gain = compare(baseline, smoothed, reported)
    points = "one run a side" if gain is None else gain.in_points()
    at = " against ".join(
        ", ".join(f"{name} {value:g}" for name, value in each.items()) or "as it is"
        for each in (of_method, of_baseline)
    )
    return Verdict(claim, sense_of(gain), f"held-out images, {at}: {points}")


def best_of(setting: Setting, contest: Contest, round_: Round, records: Records) -> tuple[Settings, Settings] | None:
    """Of the baseline and of the method, as soon as everything has been tried by all seeds that choose."""
    tried = [
        contest.held_out(setting, method, **each) for method in contest.sides for each in contest.tried(round_, method)
    ]
    if min(len(records.seeds_of(config)) for config in tried) < len(contest.seeds):
        return None
    best = _best_of_both(setting, contest, round_, records)
    return best and (best[0][0], best[1][0])


def _best_of_both(setting: Setting, contest: Contest, round_: Round, records: Records) -> tuple[Best, Best] | None:
    of_baseline, of_method = (_best(setting, contest, round_, method, records) for method in contest.sides)
    return None if of_baseline is None or of_method is None else (of_baseline, of_method)


def _best(setting: Setting, contest: Contest, round_: Round, method: str, records: Records) -> Best | None:
    """The highest mean over the seeds that all have; what a run diverged of is out."""
    tried = [(each, contest.held_out(setting, method, **each)) for each in contest.tried(round_, method)]
    tried = [(each, config) for each, config in tried if not records.diverged(config)]
    common = records.in_common([config for _, config in tried])
    if common is None:
        return None
    groups, seeds = common
    found = zip((each for each, _ in tried), groups, strict=True)
    return max(found, key=lambda one: mean_accuracy(one[1], seeds))
