"""From finished runs to the sections of a page: figures, what they allow to be said, curves, provenance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

from smoothout.lab import measurements
from smoothout.lab.config import Config
from smoothout.lab.methods import METHODS
from smoothout.lab.report import figures
from smoothout.lab.report.groups import Difference, Group, Sample, baseline_of, compare, difference
from smoothout.lab.report.page import Cell, Figure, Row, Section, Table
from smoothout.lab.runs import Record

SENSITIVITY = "sensitivity-train"


def results_section(groups: Sequence[Group]) -> Section:
    """One row a configuration."""
    rises = _loss_rises(groups)
    with_rise = any(rise is not None for rise in rises)
    judged = _judged_on(groups)
    header = ("", "n", f"{judged} accuracy, last epoch", *(["loss rise under noise†"] if with_rise else []))
    header += (f"{judged} loss", "train loss", "best epoch*", "gradient evaluations", "seconds")
    rows = []
    for i, (group, rise) in enumerate(zip(groups, rises)):
        texts = [
            name_of(group, groups),
            str(len(group.records)),
            percent(group.sample(_accuracy)),
            *(["–" if rise is None else number(rise)] if with_rise else []),
            number(group.sample(_test_loss)),
            number(group.sample(lambda r: r.last.train_loss)),
            percent(group.sample(lambda r: r.best.test_accuracy)),
            f"{group.sample(lambda r: r.last.evaluations).mean:,.0f}",
            f"{group.sample(lambda r: r.seconds).mean:.1f}",
        ]
        starts = i > 0 and group.config.batch_size != groups[i - 1].config.batch_size
        rows.append(Row(tuple(map(Cell, texts)), starts))
    notes = (
        "Mean ± standard deviation over n runs that differ in nothing but their seed. The train loss is what training "
        f"saw, with its noise. * The best epoch is chosen on the {judged} images themselves and flatters every method, "
        "some more than others: read the last epoch.",
        *([f"† {_rise_in_words(groups)}"] if with_rise else []),
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
        rise = difference(theirs.values, ours.values, base.seeds == group.seeds) if ours and theirs else None
        with_rise = with_rise or rise is not None
        accuracy, loss = compare(base, group, _accuracy), compare(base, group, _test_loss)
        ns |= {f"{d.n} {'pairs of equal seeds' if d.paired else 'runs a side'}" for d in (accuracy, loss, rise) if d}
        cells = [_difference(accuracy, more_is_better=True, scale=100), _difference(rise), _difference(loss)]
        rows.append((Cell(name_of(group, groups)), *cells))
    if not rows:
        return None
    judged = _judged_on(groups)
    header = ("", f"{judged} accuracy, points", "loss rise under noise (less is flatter)", f"{judged} loss")
    if not with_rise:
        header, rows = (*header[:2], header[3]), [(*row[:2], row[3]) for row in rows]
    note = (
        f"Difference of the means with its 95 % interval (Student's t; {', '.join(sorted(ns)) or 'n = 1'}). Bold: zero "
        "lies outside and there are at least three runs a side (green: better, orange: worse). Grey: no difference "
        "measured."
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
        rise = difference(theirs.values, ours.values, base.seeds == group.seeds)
        accuracy, loss = compare(base, group, _accuracy), compare(base, group, _test_loss)
        flat = _in_words(rise, "sharper than", "flatter than", "not measurably flatter than")
        name = name_of(group, groups)
        sentences.append(
            f"{name[0].upper()}{name[1:]}: its minima are {flat} the baseline's; test loss "
            f"{_in_words(loss, 'higher', 'lower', 'not measurably different')}, accuracy "
            f"{_in_words(accuracy, 'higher', 'lower', 'not measurably different')}."
        )
        is_flatter = rise is not None and rise.is_shown and rise.mean < 0
        flatter += is_flatter
        better += is_flatter and loss is not None and loss.is_shown and loss.mean < 0
    if not sentences:
        return None
    lesson = (
        f"Of {flatter} that are flatter, {better} have a lower test loss: flatness is measured apart from accuracy, "
        "since the one does not promise the other."
    )
    return Section("What came out", (*sentences, lesson))


def _in_words(d: Difference | None, more: str, less: str, neither: str) -> str:
    return neither if d is None or not d.is_shown else more if d.mean > 0 else less


def _difference(d: Difference | None, *, more_is_better: bool = False, scale: float = 1.0) -> Cell:
    if d is None:
        return Cell("–", "faint")
    text = f"{scale * d.mean:+.3g} [{scale * d.low:+.2g}, {scale * d.high:+.2g}]"
    if not d.is_shown:
        return Cell(text, "faint")
    return Cell(text, "good" if (d.mean > 0) == more_is_better else "bad")


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
    length = f", {config.epochs} epochs" if len({g.config.epochs for g in groups}) > 1 else ""
    judged = ", on held-out images" if config.hold_out and _judged_on(groups) == "test" else ""
    return f"{before}batch {config.batch_size}: {group.method_name}{strength}{length}{judged}"


def _judged_on(groups: Sequence[Group]) -> str:
    """What accuracies are of: training images that were held out, where that is so of all."""
    return "held-out" if groups and all(group.config.hold_out for group in groups) else "test"


def _accuracy(record: Record) -> float:
    return record.last.test_accuracy


def _test_loss(record: Record) -> float:
    return record.last.test_loss


# ---- sensitivity -----------------------------------------------------------------------------------------------------


def _curves(group: Group) -> list[measurements.Measurement]:
    found = [measurements.load_all(run.path).get(SENSITIVITY) for run in group.runs]
    return [each for each in found if each is not None]


def _loss_rises(groups: Sequence[Group]) -> list[Sample | None]:
    """C̄(w; a) − C(w) at the strongest noise of the grid, for every run of each group.

    None where not all of a group were measured, and for all where not all were measured in the same way.
    """
    by_group = [_curves(group) for group in groups]
    if len({_way(each) for curves in by_group for each in curves}) > 1:
        return [None] * len(groups)
    return [
        Sample(tuple(each.result.losses[-1] - each.result.losses[0] for each in curves))
        if curves and len(curves) == len(group.runs)
        else None
        for group, curves in zip(groups, by_group)
    ]


def _way(each: measurements.Measurement) -> tuple[object, ...]:
    """How a curve was measured."""
    curve = each.result
    return curve.strengths, curve.noise, curve.scale, curve.draws, each.how.get("weights"), each.how.get("images")


def _rise_in_words(groups: Sequence[Group]) -> str:
    (curve, *_) = [each.result for group in groups for each in _curves(group)]
    relative = " times the norm of its filter" if curve.scale == "filter" else ""
    return (
        f"How much the training loss rises when every weight is pushed by {curve.noise} noise of strength "
        f"{curve.strengths[-1]:g}{relative}, the mean of {curve.draws} pushes, the same for every network: a small "
        "rise is a flat minimum."
    )


def figures_section(groups: Sequence[Group]) -> Section:
    """How training went, and how flat the minima are."""
    drawn = []
    curves = [[each.result for each in _curves(group)] for group in groups]
    if all(curves) and any(_loss_rises(groups)):
        axis = "noise strength a"
        if curves[0][0].scale == "filter":
            axis += " (relative to filter norms)"
        caption = (
            "Flatness, seen: the training loss under noise of growing strength. The lower a curve stays, the flatter "
            "the minimum. Bands: one standard deviation over seeds."
        )
        drawn.append(Figure(figures.sensitivity_curves(groups, curves, axis), caption))
    drawn.append(
        Figure(
            figures.training_curves(groups, lambda m: m.test_loss, f"{_judged_on(groups)} loss", log=True),
            "The loss on images that training never saw.",
        )
    )
    drawn.append(
        Figure(
            figures.training_curves(
                groups, lambda m: 100 * m.test_accuracy, f"{_judged_on(groups)} accuracy, %", log=False
            ),
            "Accuracy on the same images, mean over seeds.",
        )
    )
    drawn.append(
        Figure(
            figures.training_curves(groups, lambda m: m.train_loss, "training loss", log=True),
            "The training loss as training saw it: with noise, where there is noise.",
        )
    )
    return Section("Curves", figures=tuple(drawn))


def all_sections(groups: Sequence[Group]) -> tuple[Section, ...]:
    """The sections of an ordinary page."""
    sections = (results_section(groups), differences_section(groups), figures_section(groups))
    return tuple(section for section in sections if section is not None)


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
