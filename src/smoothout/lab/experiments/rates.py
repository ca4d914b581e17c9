"""Whether gains outlive a learning rate of its own for each side; not of the paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from smoothout.lab.config import Config
from smoothout.lab.experiments.choice import HELD_OUT, USUAL, held_out, mean_accuracy
from smoothout.lab.experiments.chosen import CHOSEN
from smoothout.lab.experiments.measuring import sensitivity, sharpness
from smoothout.lab.experiments.networks import C1, F1, RESNET44, Network, as_published, configure, label
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.table2 import resnet44
from smoothout.lab.experiments.verdicts import on_difference
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Curve, Drawing, Experiment, Row, Setting, Verdict
from smoothout.lab.groups import reported
from smoothout.lab.methods import METHODS

Values = dict[str, float]  # of settings, by name
WORDS = {"lr": "a rate of {:g}", "weight_decay": "weight decay {:g}", "strength": "a = {:g}"}
TEST_SEEDS = tuple(range(5))


@dataclass(frozen=True)
class Round:
    """What each side tries on held-out images, and what of it goes to the test set.

    The runs that choose are no judges of the gain: the best of many flatters itself.

    Args:
        name: ends the names of rows on the test set.
        tried: by method, the baseline among them. A strength that is not named is the paper's.
        chosen: by method, what `best_of` finds in results/; empty: not known yet.
    """

    name: str
    tried: Mapping[str, Sequence[Values]]
    chosen: Mapping[str, Values] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """Methods against the baseline, on held-out images with these seeds, then on the test set with five."""

    network: Network
    batch_size: int
    seeds: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def title(self) -> str:
        return f"{self.network.title}, batch {self.batch_size}"

    def held_out(self, setting: Setting, method: str, values: Values) -> Config:
        """Where these are the usual ones, a run of `choice`, `claims` or `finals`."""
        how: dict[str, Any] = dict(values)
        if self.network is RESNET44:
            how = {**CHOSEN[RESNET44.model, RESNET44.large, method], **values}
        return held_out(setting, self.network, self.batch_size, method, **how)

    def on_the_test_set(self, setting: Setting, method: str, values: Values) -> Config:
        if self.network is RESNET44:
            return resnet44(setting, method, **values)
        # With the paper's strengths: those at which the rates were chosen, whatever preset ours takes later.
        return configure(as_published(setting), self.network, self.batch_size, method, **values)


def _rates(*rates: float, **more: float) -> tuple[Values, ...]:
    return tuple({"lr": rate, **more} for rate in rates)


_SIX, _HIGHER = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008), (0.002, 0.004, 0.008, 0.016)
_NINE = (*_SIX, 0.016, 0.032, 0.064)
_F1_RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
_OWN_RATES = "each side at its best of {} learning rates"
CONTESTS = (
    Contest(
        C1,
        C1.large,
        (0, 1, 2),
        (
            Round(
                _OWN_RATES.format("six"),
                {"plain": _rates(*_SIX), "smoothout": _rates(*_SIX)},
                {"plain": {"lr": 0.008}, "smoothout": {"lr": 0.004}},
            ),
            # The highest was the baseline's best, and strengths had been chosen at the paper's rate.
            Round(
                _OWN_RATES.format("nine") + ", and at the strength that is best there",
                {
                    "plain": _rates(*_NINE),
                    "smoothout": (*_rates(*_NINE), *(s for a in (0.075, 0.15) for s in _rates(*_HIGHER, strength=a))),
                    "adasmoothout": (
                        *_rates(0.001, strength=0.15),
                        *(s for a in (0.15, 0.3, 0.6) for s in _rates(*_HIGHER, strength=a)),
                    ),
                },
            ),
        ),
    ),
    Contest(
        F1,
        F1.large,
        (100, 101, 102),
        (
            Round(
                _OWN_RATES.format("five"),
                dict.fromkeys(("plain", "smoothout"), _rates(*_F1_RATES)),
                {"plain": {"lr": 0.4}, "smoothout": {"lr": 0.2}},
            ),
        ),
    ),
    Contest(
        C1,
        C1.small,
        (100, 101, 102),
        (
            Round(
                _OWN_RATES.format("five") + ", and at the strength that is best there",
                {"plain": _rates(*_SIX[:5]), "smoothout": (*_rates(*_SIX[:5]), *_rates(*_SIX[:5], strength=0.15))},
            ),
        ),
    ),
    # The baseline alone, before anything is compared with another one; to the end, for the rate falls twice more after
    # the first half. At the paper's rate and decay both seeds are those of `choice` and `finals`.
    Contest(
        RESNET44,
        RESNET44.large,
        (100, 101),
        (
            Round(
                "at the best of three learning rates and two weight decays",
                {"plain": (*_rates(0.05, 0.1, 0.2), {"lr": 0.1, "weight_decay": 5e-4})},
            ),
        ),
    ),
)


def rates(setting: Setting) -> Experiment:
    setting = replace(setting, preset="ours")
    return Experiment(
        "rates",
        "Learning rates: each side at its own",
        _rows(setting),
        notes=(
            f"Accuracies are on {HELD_OUT:,} held-out training images, where each row is compared with the baseline of "
            "its rate; in rows at the best of several rates they are on the test set. Strengths are the paper's where "
            "none is named; ResNet44's rates are for batch 128, multiplied by 4.",
        ),
        drawings=tuple(_by_rate(setting, contest) for contest in CONTESTS if contest.network is not RESNET44),
        judge=partial(_judge, setting),
    )


def _rows(setting: Setting) -> tuple[Row, ...]:
    """Each comparison once, those on the test set last."""
    rows: dict[tuple[Config, Config | None], Row] = {}
    of_rounds = [(contest, round_) for contest in CONTESTS for round_ in contest.rounds]
    for which in (_on_held_out_images, _on_the_test_set):
        for contest, round_ in of_rounds:
            for row in which(setting, contest, round_):
                rows.setdefault((row.config, row.versus), row)
    return tuple(rows.values())


def _on_held_out_images(setting: Setting, contest: Contest, round_: Round) -> Iterator[Row]:
    for method, tried in round_.tried.items():
        for values in tried:
            told = "".join(f", {WORDS[name].format(value)}" for name, value in values.items())
            without_noise = {name: value for name, value in values.items() if name != "strength"}
            baseline = contest.held_out(setting, "plain", without_noise)
            yield Row(
                label(contest.network, contest.batch_size, method, told),
                contest.held_out(setting, method, values),
                versus=None if method == "plain" else baseline,
                seeds=contest.seeds,
            )


def _on_the_test_set(setting: Setting, contest: Contest, round_: Round) -> Iterator[Row]:
    """Each side at its own values, the baseline first; nothing before that is known."""
    if "plain" not in round_.chosen:
        return
    wanted = (sharpness(setting, contest.network.model), sensitivity(setting, contest.network.model))
    configs = {method: contest.on_the_test_set(setting, method, values) for method, values in round_.chosen.items()}
    for method, config in configs.items():
        yield Row(
            label(contest.network, contest.batch_size, method, f", {round_.name}"),
            config,
            versus=None if method == "plain" else configs["plain"],
            measurements=wanted,
            seeds=TEST_SEEDS,
        )


def _by_rate(setting: Setting, contest: Contest) -> Drawing:
    curves: dict[Config, Curve] = {}
    for round_ in contest.rounds:
        for row in _on_held_out_images(setting, contest, round_):
            method, a = row.config.method, row.config.strength
            name = METHODS[method].title + ("" if method == "plain" else f", a = {a:g}")
            curves.setdefault(row.config, Curve(name, row.config))
    caption = f"{contest.title}, by learning rate: accuracy on held-out training images, last epoch."
    return Drawing("accuracy by learning rate", caption, tuple(curves.values()))


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _judge(setting: Setting, records: Records) -> tuple[Verdict, ...]:
    verdicts = []
    for contest in CONTESTS:
        for round_ in contest.rounds:
            verdicts += [_choice(setting, contest, round_, method, records) for method in round_.tried]
            verdicts += [
                _gain(setting, contest, round_, method, records) for method in round_.tried if method != "plain"
            ]
    return tuple(verdicts)


def _choice(setting: Setting, contest: Contest, round_: Round, method: str, records: Records) -> Verdict:
    """What is best, and whether something beyond it might be better still."""
    tried = round_.tried[method]
    claim = f"{label(contest.network, contest.batch_size, method)}: the best of {len(tried)} on held-out images"
    best = best_of(setting, contest, round_, method, records)
    if best is None:
        return Verdict(claim, NOT_MEASURED, "")
    group = records.group(contest.held_out(setting, method, best))
    assert group is not None
    accuracy = mean_accuracy(group, contest.seeds)
    usual = {} if method == "plain" else {"strength": USUAL[method]}
    full, others = {**usual, **best}, [{**usual, **values} for values in tried]
    told = ", ".join(f"{name} {value:g}{_edge(name, full, others)}" for name, value in full.items())
    return Verdict(claim, told, f"{100 * accuracy:.2f} %, n = {len(contest.seeds)}")


def _edge(name: str, best: Values, tried: Sequence[Values]) -> str:
    """Whether it is the highest or the lowest of what was tried while all else was as in the best."""
    others = {values[name] for values in tried if values.keys() == best.keys() and {**values, name: best[name]} == best}
    if len(others) < 2 or min(others) < best[name] < max(others):
        return ""
    return " (the highest tried)" if best[name] == max(others) else " (the lowest tried)"


def _gain(setting: Setting, contest: Contest, round_: Round, method: str, records: Records) -> Verdict:
    claim = f"{contest.title}: {METHODS[method].title} gains over the baseline on the test set, {round_.name}"
    configs = {row.config.method: row.config for row in _on_the_test_set(setting, contest, round_)}
    if not {"plain", method} <= configs.keys():
        return Verdict(claim, NOT_MEASURED, "")
    return on_difference(claim, configs["plain"], configs[method], records, reported)


def best_of(setting: Setting, contest: Contest, round_: Round, method: str, records: Records) -> Values | None:
    """The highest mean, the first of equals, as soon as all that a method tries has run with all seeds that choose.

    What a run of these diverged with is out.
    """
    accuracies: list[tuple[float, Values]] = []
    for values in round_.tried[method]:
        config = contest.held_out(setting, method, values)
        if any(found.failure for found in records.seeds_of(config) if found.run.config.seed in contest.seeds):
            continue
        group = records.group(config)
        if group is None or not set(contest.seeds) <= set(group.seeds):
            return None
        accuracies.append((mean_accuracy(group, contest.seeds), values))
    return max(accuracies, key=lambda one: one[0])[1] if accuracies else None
