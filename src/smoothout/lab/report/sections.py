"""From finished runs to the sections of a page: figures, what they allow to be said, curves, provenance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields

from smoothout.lab import measurements
from smoothout.lab.config import Config
from smoothout.lab.methods import METHODS
from smoothout.lab.report import figures
from smoothout.lab.report.groups import (
    Difference,
    Group,
    Sample,
    are_pairs,
    baseline_of,
    compare,
    difference,
    has_its_own_seconds,
)
from smoothout.lab.report.page import Cell, Figure, Row, Section, Table
from smoothout.lab.runs import EpochMetrics, Record
from smoothout.measure import Sensitivity

SENSITIVITY = "sensitivity-train"
MOST_CURVES = 12  # in a picture


def results_section(groups: Sequence[Group], lost: Sequence[Group] = ()) -> Section:
    """One row a configuration.

    Args:
        lost: of which every run diverged.
    """
    rises = _loss_rises(groups)
    with_rise = any(rise is not None for rise in rises)
    judged = _judged_on(groups)
    header = ("", "n", f"{judged} accuracy, last epoch", *(["loss rise under noise†"] if with_rise else []))
    header += (f"{judged} loss", "train loss", "best epoch*", "gradient evaluations", "seconds")
    rows = []
    for i, (group, rise) in enumerate(zip(groups, rises)):
        texts = [
            name_of(group, groups),
            str(len(group.records)) + (f", {group.diverged} more diverged" if group.diverged else ""),
            percent(group.sample(_accuracy)),
            *(["–" if rise is None else number(rise)] if with_rise else []),
            number(group.sample(_test_loss)),
            number(group.sample(lambda r: r.last.train_loss)),
            percent(group.sample(lambda r: r.best.test_accuracy)),
            f"{group.sample(lambda r: r.last.evaluations).mean:,.0f}",
            f"{group.sample(lambda r: r.seconds).mean:.1f}" if all(map(has_its_own_seconds, group.records)) else "–",
        ]
        starts = i > 0 and group.config.batch_size != groups[i - 1].config.batch_size
        rows.append(Row(tuple(map(Cell, texts)), starts))
    notes = (
        "Mean ± standard deviation over n runs that differ in nothing but their seed. The train loss is what training "
        f"saw, with its noise. * The best epoch is chosen on the {judged} images themselves and flatters every method, "
        "some more than others: read the last epoch.",
        *([f"† {_rise_in_words(groups)}"] if with_rise else []),
        *(f"{name_of(group, (*groups, *lost))}: all {group.diverged} runs diverged." for group in lost),
    )
    return Section("Results", notes, Table(header, tuple(rows)))


def differences_section(groups: Sequence[Group]) -> Section | None:
    """What the figures allow to be said: every method against the plain runs of the same batch size."""
    rows, ns, with_rise = [], set(), False
    rises = _loss_rises(groups)
    for group, ours in zip(groups, rises):
        base = baseline_of(group, groups)
        if base is None or base is group:
            continue
        theirs = rises[groups.index(base)]
        rise = difference(theirs.values, ours.values, are_pairs(base, group)) if ours and theirs else None
        with_rise = with_rise or rise is not None
        accuracy, loss = compare(base, group, _accuracy), compare(base, group, _test_loss)
        ns |= {f"{d.n} {'pairs of equal seeds' if d.paired else 'runs a side'}" for d in (accuracy, loss, rise) if d}
        cells = [_difference(accuracy, group, points=True), _difference(rise, group), _difference(loss, group)]
        rows.append((Cell(name_of(group, groups)), *cells))
    if not rows:
        return None
    judged = _judged_on(groups)
    header = ("", f"{judged} accuracy, points", "loss rise under noise (less is flatter)", f"{judged} loss")
    if not with_rise:
        header, rows = (*header[:2], header[3]), [(*row[:2], row[3]) for row in rows]
    survivors = ", or a better one of the runs that did not diverge" if any(g.diverged for g in groups) else ""
    note = (
        f"Difference of the means with its 95 % interval (Student's t; {', '.join(sorted(ns)) or 'n = 1'}). Bold: zero "
        "lies outside and there are at least three runs a side (green: better, orange: worse). Grey: no difference "
        f"measured{survivors}."
    )
    return Section("Against the baseline", (note,), Table(header, tuple(Row(row) for row in rows)))


def findings_section(groups: Sequence[Group]) -> Section | None:
    """The same in words, for who reads one page in a minute."""
    sentences, flatter, better = [], 0, 0
    rises = _loss_rises(groups)
    for group, ours in zip(groups, rises):
        base = baseline_of(group, groups)
        theirs = None if base is None else rises[groups.index(base)]
        if base is None or base is group or ours is None or theirs is None:
            continue
        rise = difference(theirs.values, ours.values, are_pairs(base, group))
        accuracy, loss = compare(base, group, _accuracy), compare(base, group, _test_loss)
        flat = _in_words(rise, group, "sharper than", "flatter than", "not measurably flatter than")
        on_loss = _in_words(loss, group, "higher", "lower", "not measurably different")
        on_accuracy = _in_words(accuracy, group, "higher", "lower", "not measurably different", more_is_better=True)
        name = name_of(group, groups)
        sentences.append(
            f"{name[0].upper()}{name[1:]}: its minima are {flat} the baseline's; test loss {on_loss}, accuracy "
            f"{on_accuracy}."
        )
        flatter += flat == "flatter than"
        better += flat == "flatter than" and on_loss == "lower"
    if not sentences:
        return None
    lesson = (
        f"Of {flatter} that are flatter, {better} have a lower test loss: flatness is measured apart from accuracy, "
        "since the one does not promise the other."
    )
    return Section("What came out", (*sentences, lesson))


def _is_claimed(d: Difference | None, group: Group, more_is_better: bool = False) -> bool:
    """Whether a difference may be: nothing is better by leaving the runs out that diverged."""
    if d is None or not d.is_shown:
        return False
    return not group.diverged or (d.mean > 0) != more_is_better


def _in_words(
    d: Difference | None, group: Group, more: str, less: str, neither: str, more_is_better: bool = False
) -> str:
    return neither if d is None or not _is_claimed(d, group, more_is_better) else more if d.mean > 0 else less


def _difference(d: Difference | None, group: Group, points: bool = False) -> Cell:
    """Of a loss, of which less is better; of an accuracy in points."""
    if d is None:
        return Cell("–", "faint")
    if points:
        text = f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]"
    else:
        text = f"{d.mean:+.3g} [{d.low:+.2g}, {d.high:+.2g}]"
    if not _is_claimed(d, group, more_is_better=points):
        return Cell(text, "faint")
    return Cell(text, "good" if (d.mean > 0) == points else "bad")


def percent(sample: Sample) -> str:
    """98.12 ± 0.34 %."""
    return f"{100 * sample.mean:.2f} %" if sample.sd is None else f"{100 * sample.mean:.2f} ± {100 * sample.sd:.2f} %"


def number(sample: Sample) -> str:
    """0.0123 ± 0.0045."""
    return f"{sample.mean:.3g}" if sample.sd is None else f"{sample.mean:.3g} ± {sample.sd:.1g}"


def name_of(group: Group, groups: Sequence[Group]) -> str:
    """What tells a configuration from the others on the page."""
    name = _usual_name(group, groups)
    namesakes = [other.config for other in groups if _usual_name(other, groups) == name]
    telling = [each.name for each in fields(Config) if len({getattr(c, each.name) for c in namesakes}) > 1]
    return name + "".join(f", {setting} {getattr(group.config, setting)}" for setting in telling)


def _usual_name(group: Group, groups: Sequence[Group]) -> str:
    config = group.config
    several = [name for name in ("dataset", "model", "preset") if len({getattr(g.config, name) for g in groups}) > 1]
    before = "".join(f"{getattr(config, name)}, " for name in several)
    symbol = METHODS[config.method].symbol
    strength = f", {symbol} = {config.strength:g}" if config.strength else ""
    length = f", {config.epochs_in_words}" if len({g.config.epochs_in_words for g in groups}) > 1 else ""
    judged = ", on held-out images" if config.hold_out and _judged_on(groups) == "test" else ""
    ranks = f", {group.processes} processes" if len({g.processes for g in groups}) > 1 else ""
    return f"{before}batch {config.batch_size}: {group.method_name}{strength}{length}{judged}{ranks}"


def _judged_on(groups: Sequence[Group]) -> str:
    """What accuracies are of: training images that were held out, where that is so of all."""
    return "held-out" if groups and all(group.config.hold_out for group in groups) else "test"


def _accuracy(record: Record) -> float:
    return record.last.test_accuracy


def _test_loss(record: Record) -> float:
    return record.last.test_loss


# ---- sensitivity -----------------------------------------------------------------------------------------------------


def _curves(group: Group) -> list[measurements.Measurement]:
    there = [run.path for run in group.runs if (run.path / measurements.FOLDER / f"{SENSITIVITY}.json").exists()]
    return [measurements.load(path, SENSITIVITY) for path in there]


def _loss_rises(groups: Sequence[Group]) -> list[Sample | None]:
    """C̄(w; a) − C(w) at the strongest noise of the grid, for every run of each group.

    None where not all of a group were measured, and for all where not all were measured in the same way, or not both at
    noise and without.
    """
    by_group = [_curves(group) for group in groups]
    every = [each for curves in by_group for each in curves]
    if any(each.settings != every[0].settings for each in every) or not all(map(_has_both_ends, every)):
        return [None] * len(groups)
    return [
        Sample(tuple(_rise(each.result) for each in curves)) if curves and len(curves) == len(group.runs) else None
        for group, curves in zip(groups, by_group)
    ]


def _has_both_ends(each: measurements.Measurement) -> bool:
    return 0.0 in each.result.strengths and max(each.result.strengths) > 0.0


def _rise(curve: Sensitivity) -> float:
    losses = dict(zip(curve.strengths, curve.losses))
    return losses[max(losses)] - losses[0.0]


def _rise_in_words(groups: Sequence[Group]) -> str:
    (curve, *_) = [each.result for group in groups for each in _curves(group)]
    relative = " times the norm of its filter" if curve.scale == "filter" else ""
    return (
        f"How much the training loss rises when every weight is pushed by {curve.noise} noise of strength "
        f"{max(curve.strengths):g}{relative}, the mean of {curve.draws} pushes, the same for every network: a small "
        "rise is a flat minimum."
    )


def figures_sections(groups: Sequence[Group]) -> tuple[Section, ...]:
    """How training went, and how flat the minima are: for each network on its data, and batch size if need be."""
    sections = []
    for heading, members in _apart(groups, "Curves", ("model", "dataset"), ("batch_size",)):
        if len(members) > MOST_CURVES:
            text = f"{len(members)} configurations are too many for a picture: report {MOST_CURVES} or fewer together."
            sections.append(Section(heading, (text,)))
        else:
            sections.append(Section(heading, figures=_figures(members)))
    return tuple(sections)


def _apart(
    groups: Sequence[Group], heading: str, names: tuple[str, ...], *more: tuple[str, ...]
) -> list[tuple[str, list[Group]]]:
    """By these settings; what is still too much for a picture, by more of them."""
    by_settings: dict[tuple[object, ...], list[Group]] = defaultdict(list)
    for group in groups:
        by_settings[tuple(getattr(group.config, name) for name in names)].append(group)
    parts = []
    for values, members in by_settings.items():
        told = ", ".join(f"{name.replace('_size', '')} {value}" for name, value in zip(names, values))
        title = heading if len(by_settings) == 1 else f"{heading}, {told}"
        parts += _apart(members, title, *more) if more and len(members) > MOST_CURVES else [(title, members)]
    return parts


def _figures(groups: Sequence[Group]) -> tuple[Figure, ...]:
    drawn = []
    names = [name_of(group, groups) for group in groups]
    curves = [[each.result for each in _curves(group)] for group in groups]
    if all(curves) and any(_loss_rises(groups)):
        axis = "noise strength a"
        if curves[0][0].scale == "filter":
            axis += " (relative to filter norms)"
        caption = (
            "Flatness, seen: the training loss under noise of growing strength. The lower a curve stays, the flatter "
            "the minimum. Bands: one standard deviation over seeds."
        )
        drawn.append(Figure(figures.sensitivity_curves(groups, names, curves, axis), caption))
    judged = _judged_on(groups)
    pictures: tuple[tuple[Callable[[EpochMetrics], float], str, bool, str], ...] = (
        (lambda m: m.test_loss, f"{judged} loss", True, "The loss on images that training never saw."),
        (lambda m: 100 * m.test_accuracy, f"{judged} accuracy, %", False, "Accuracy on the same images."),
        (lambda m: m.train_loss, "training loss", True, "The training loss as training saw it, with noise if any."),
    )
    for value, name, log, caption in pictures:
        drawn.append(Figure(figures.training_curves(groups, names, value, name, log), f"{caption} Means over seeds."))
    return tuple(drawn)


def all_sections(groups: Sequence[Group]) -> tuple[Section, ...]:
    """The sections of an ordinary page."""
    lost, groups = [g for g in groups if not g.runs], [g for g in groups if g.runs]
    tables = (results_section(groups, lost), differences_section(groups))
    return (*(section for section in tables if section is not None), *figures_sections(groups))


# ---- where it comes from ---------------------------------------------------------------------------------------------


_VERSIONS = ("smoothout", "torch", "numpy", "python")


def provenance(records: Sequence[Record], command: str) -> tuple[tuple[str, str], ...]:
    """For the foot of a page: what ran, on what, by which command."""

    def all_of(value: Callable[[Record], object]) -> str:
        return ", ".join(sorted({str(value(record)) for record in records}))

    return (
        ("This page", command),
        ("Runs", f"{len(records)}, seeds {all_of(lambda r: r.config.seed)}"),
        ("Judged on", all_of(lambda r: r.test_origin)),
        ("Trained on", f"{all_of(lambda r: r.provenance.device)}, {all_of(lambda r: r.provenance.threads)} threads"),
        ("Versions", ", ".join(f"{n} {all_of(lambda r, n=n: getattr(r.provenance, n))}" for n in _VERSIONS)),
        ("Commit", all_of(lambda r: r.provenance.commit or "installed package")),
        ("Configurations", all_of(lambda r: r.config.with_seed(0).hash)),
    )
