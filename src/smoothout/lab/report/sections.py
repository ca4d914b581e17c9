"""From finished runs to the sections of a page: figures, what they allow to be said, curves, provenance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from smoothout.lab.groups import (
    Difference,
    Group,
    Sample,
    are_pairs,
    baseline_of,
    compare,
    difference,
    has_its_own_seconds,
    nearest_plain,
)
from smoothout.lab.report import figures, measured
from smoothout.lab.report.measured import SENSITIVITY, loss_rises, number, of_group
from smoothout.lab.report.names import in_words, judged_on, name_of
from smoothout.lab.report.page import NOTHING, Cell, Figure, Row, Section, Table
from smoothout.lab.runs import EpochMetrics, Record

MOST_CURVES = 12  # in a picture


def results_section(groups: Sequence[Group], lost: Sequence[Group] = ()) -> Section:
    """One row a configuration.

    Args:
        lost: of which every run diverged.
    """
    rises = loss_rises(groups)
    with_rise = any(rise is not None for rise in rises)
    judged = judged_on(groups)
    header = ("", "n", f"{judged} accuracy, last epoch", *(["loss rise under noise†"] if with_rise else []))
    columns = measured.columns(groups)
    shown = [column for column in columns if column.cells]
    header += tuple(column.header for column in shown)
    header += (f"{judged} loss", "train loss", "best epoch*", "gradient evaluations", "seconds")
    rows = []
    for i, (group, rise) in enumerate(zip(groups, rises)):
        texts = [
            name_of(group, groups),
            str(len(group.records)) + (f", {group.diverged} more diverged" if group.diverged else ""),
            percent(group.sample(last_accuracy)),
            *(["–" if rise is None else number(rise)] if with_rise else []),
            *(column.cells[i] for column in shown),
            number(group.sample(last_test_loss)),
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
        *(note for note in (measured.rise_in_words(groups), *(column.note for column in columns)) if note),
        *(f"{name_of(group, (*groups, *lost))}: all {group.diverged} runs diverged." for group in lost),
    )
    return Section("Results", notes, Table(header, tuple(rows)))


def differences_section(groups: Sequence[Group], lost: Sequence[Group] = ()) -> Section | None:
    """What the figures allow to be said: every method against the plain runs of the same batch size.

    Args:
        lost: of which every run diverged.
    """
    found = comparisons(groups)
    alone = tuple(_without_a_baseline(groups, lost))
    if not found:
        return Section("Against the baseline", alone) if alone else None
    with_rise = any(each.rise is not None for each in found)
    rows = []
    for each in found:
        rise = (_difference(each.rise, each.group),) if with_rise else ()
        accuracy, loss = _difference(each.accuracy, each.group, points=True), _difference(each.loss, each.group)
        rows.append(Row((Cell(name_of(each.group, groups)), accuracy, *rise, loss)))
    judged = judged_on(groups)
    of_rise = ("loss rise under noise (less is flatter)",) if with_rise else ()
    header = ("", f"{judged} accuracy, points", *of_rise, f"{judged} loss")
    differences = [d for each in found for d in (each.accuracy, each.loss, each.rise) if d is not None]
    ns = {f"{d.n} {'pairs of equal seeds' if d.paired else 'runs a side'}" for d in differences}
    survivors = ", or a better one of the runs that did not diverge" if any(g.diverged for g in groups) else ""
    note = (
        f"Difference of the means with its 95 % interval (Student's t; {', '.join(sorted(ns)) or 'n = 1'}). Bold: zero "
        "lies outside and there are at least three runs a side (green: better, orange: worse). Grey: no difference "
        f"measured{survivors}."
    )
    return Section("Against the baseline", (note, *alone), Table(header, tuple(rows)))


@dataclass(frozen=True)
class Comparison:
    """A group against its baseline. A difference is None where there are too few runs for one.

    Args:
        is_measured: whether all runs of both have a rise of the loss under noise.
    """

    group: Group
    accuracy: Difference | None
    loss: Difference | None
    rise: Difference | None
    is_measured: bool


def comparisons(groups: Sequence[Group]) -> list[Comparison]:
    """One for every group that has a baseline among these."""
    found, rises = [], loss_rises(groups)
    for group, ours in zip(groups, rises):
        base = baseline_of(group, groups)
        if base is None or base is group:
            continue
        theirs = rises[groups.index(base)]
        rise = difference(theirs.values, ours.values, are_pairs(base, group)) if ours and theirs else None
        accuracy, loss = compare(base, group, last_accuracy), compare(base, group, last_test_loss)
        found.append(Comparison(group, accuracy, loss, rise, is_measured=bool(ours and theirs)))
    return found


def _without_a_baseline(groups: Sequence[Group], lost: Sequence[Group]) -> Iterator[str]:
    """A line for every method that is compared with nothing, though there are plain runs on the page."""
    if not any(group.config.method == "plain" for group in (*groups, *lost)):
        return
    for group in groups:
        if baseline_of(group, groups) is None:
            yield f"{name_of(group, groups)}: no baseline; {_why_none(group, groups, lost)}."


def _why_none(group: Group, groups: Sequence[Group], lost: Sequence[Group]) -> str:
    if baseline_of(group, lost) is not None:
        return "every plain run diverged"
    nearest = nearest_plain(group, groups)
    if nearest is None:
        return f"there are no plain runs of {group.config.model} on {group.config.dataset}"
    other, names = nearest
    told = [f"{name} ({_setting(other, name)}, here {_setting(group, name)})" for name in names]
    return f"the nearest plain runs differ in {', '.join(told)}"


def _setting(group: Group, name: str) -> str:
    return in_words(group.processes if name == "processes" else getattr(group.config, name))


def is_claimed(d: Difference | None, group: Group, more_is_better: bool) -> bool:
    """Whether a difference may be: nothing is better by leaving the runs out that diverged."""
    if d is None or not d.is_shown:
        return False
    return not group.diverged or (d.mean > 0) != more_is_better


def _difference(d: Difference | None, group: Group, points: bool = False) -> Cell:
    """A difference of losses, of which less is better; with `points`, of accuracies."""
    if d is None:
        return NOTHING
    if points:
        text = f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]"
    else:
        text = f"{_signed(d.mean, 3)} [{_signed(d.low, 2)}, {_signed(d.high, 2)}]"
    if not is_claimed(d, group, more_is_better=points):
        return Cell(text, "faint")
    return Cell(text, "good" if (d.mean > 0) == points else "bad")


def _signed(value: float, digits: int) -> str:
    """-0.30 beside -0.43: a zero at the end is a digit like others."""
    return f"{value:+#.{digits}g}".removesuffix(".").replace(".e", "e")


def percent(sample: Sample) -> str:
    """98.12 ± 0.34 %."""
    return f"{100 * sample.mean:.2f} %" if sample.sd is None else f"{100 * sample.mean:.2f} ± {100 * sample.sd:.2f} %"


def last_accuracy(record: Record) -> float:
    return record.last.test_accuracy


def last_test_loss(record: Record) -> float:
    return record.last.test_loss


# ---- pictures --------------------------------------------------------------------------------------------------------


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
    curves = [[each.result for each in of_group(group, SENSITIVITY)] for group in groups]
    if all(loss_rises(groups)):
        axis = "noise strength a"
        if curves[0][0].scale == "filter":
            axis += " (relative to filter norms)"
        what = "how far the training loss rises" if figures.needs_decades(curves) else "the training loss"
        caption = (
            f"Flatness, seen: {what} under noise of growing strength. The lower a curve stays, the flatter the "
            "minimum. Bands: one standard deviation over seeds."
        )
        drawn.append(Figure(figures.sensitivity_curves(groups, names, curves, axis), caption))
    judged = judged_on(groups)
    pictures: tuple[tuple[Callable[[EpochMetrics], float], str, bool, str], ...] = (
        (lambda m: m.test_loss, f"{judged} loss", True, "The loss on images that training never saw."),
        (
            lambda m: 100 * m.test_accuracy,
            f"{judged} accuracy, %",
            False,
            "Accuracy on the same images. The first epochs may lie below the picture.",
        ),
        (lambda m: m.train_loss, "training loss", True, "The training loss as training saw it, with noise if any."),
    )
    for value, name, log, caption in pictures:
        drawn.append(Figure(figures.training_curves(groups, names, value, name, log), f"{caption} Means over seeds."))
    return tuple(drawn)


def table_sections(groups: Sequence[Group]) -> tuple[Section, ...]:
    """What a text can hold of an ordinary page: all but its pictures."""
    lost, groups = [g for g in groups if not g.runs], [g for g in groups if g.runs]
    differences = differences_section(groups, lost)
    return (results_section(groups, lost), *((differences,) if differences else ()))


def all_sections(groups: Sequence[Group]) -> tuple[Section, ...]:
    """The sections of an ordinary page."""
    return (*table_sections(groups), *figures_sections([group for group in groups if group.runs]))


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
