"""Our records beside the paper's numbers: sections of a page, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from smoothout.lab.experiments.measuring import sharpness
from smoothout.lab.experiments.records import Found, Records
from smoothout.lab.experiments.vocabulary import NOT_MEASURED, Experiment, Measuring, Row, Setting, Verdict
from smoothout.lab.groups import (
    FEWEST_RUNS,
    Difference,
    Group,
    Sample,
    compare,
    compare_in_study,
    each_training_once,
    has_its_own_seconds,
    pairs,
    reported,
    training_seconds,
)
from smoothout.lab.presets import PRESETS
from smoothout.lab.report import page
from smoothout.lab.report.measured import amount
from smoothout.lab.report.page import NOTHING, Cell, Figure, Section, Table
from smoothout.lab.report.paper_figures import drawn, to_svg
from smoothout.lab.report.sections import percent
from smoothout.lab.runs import Record

HEADER = (
    *("", "n", "last epoch", "best epoch¹", "paper", "gap to the paper²", "effect³", "paper's effect", "sign"),
    *("loss⁵", "effect on it⁵", "sharpness⁴", "paper's", "gradient evaluations", "seconds"),
)
NOTES = (
    "Mean ± standard deviation over n runs that differ in nothing but their seed; accuracy on the test set unless the "
    "title says otherwise. Of a seed that was trained more than once, to be measured, accuracy is that of the first "
    "training and the measurements are those of the run with most of them; the others stay in the records.",
    "¹ The best epoch is chosen on the test set itself: it flatters every method, some more than others.",
    "² Ours minus the paper's, in points: of the last epoch, in preset authors of the best one. The paper's are of the "
    "best epoch, as its code reports them.",
    "³ Against the row's own baseline, in points, with its 95 % interval (pairs of equal seeds where all seeds "
    "match, but not of ResNets, where a seed repeats nothing); in preset authors of the best epoch. A difference "
    "is claimed, in bold, only with at least three runs a side and zero outside the interval, a "
    "gain only if no run diverged, nothing if one of the baseline did. "
    "No interval is corrected for the number of comparisons: without any effect one in "
    "twenty would exclude zero. A single run is compared with the baseline of its seed.",
    "⁴ (C_ε, A)-sharpness in per cent over the training images (of deep networks the first 10,000, at tiny scale 200), "
    "the maximum of several starts; of how many runs the best start converged (the others ended at the limit of "
    "iterations). The paper's values come from a solver with a wrong sign: compare the sense, not the value.",
    "⁵ The loss after the last epoch, on the images by which accuracy is judged, and how it differs from the "
    "baseline's. It also falls where a network is less sure of everything: no gain is claimed where accuracy falls.",
)


@dataclass(frozen=True)
class _Unit:
    """How differences of a figure are told, and in which sense they are good."""

    factor: float
    digits: int
    better: int

    def told(self, value: float) -> str:
        return f"{self.factor * value:+.{self.digits}f}"


POINTS, LOSS = _Unit(100.0, 2, 1), _Unit(1.0, 3, -1)


def sections(
    experiment: Experiment,
    setting: Setting,
    records: Records,
    only_measured: bool = False,
    with_table: bool = True,
    with_pictures: bool = True,
) -> list[Section]:
    """The sections of one experiment in one preset: a table with pictures, and verdicts.

    Args:
        only_measured: leave rows without a run out.
        with_table: else only verdicts.
        with_pictures: of the table; they take most of the time.
    """
    heading = experiment.title
    if experiment.rows:
        heading += f" · preset {setting.preset}" + (" · tiny scale, on the digits" if setting.scale == "tiny" else "")
    rows = [row for row in experiment.rows if not only_measured or records.seeds_of(row.config)]
    made = []
    figures = drawings(experiment, records) if with_table and with_pictures else ()
    if with_table and (rows or figures):
        groups = [group for row in rows if (group := records.group(row.config)) is not None]
        costs = gpu_time([record for group in groups for record in group.records])
        if experiment.compares_costs:
            costs += ("Seconds are epochs × the median epoch: without starting and compiling.",)
        table = _table(experiment, rows, records, setting, groups) if rows else None
        made.append(Section(heading, (*experiment.notes, *costs), table, figures))
    verdicts = experiment.judge(records) if experiment.judge is not None and (rows or not only_measured) else ()
    told = [each for each in verdicts if not only_measured or each.verdict != NOT_MEASURED]
    if told:
        made.append(_verdicts(told, heading))
    return made


def drawings(experiment: Experiment, records: Records) -> tuple[Figure, ...]:
    """Every picture of an experiment for which there are measurements."""
    found = [(drawing, drawn(drawing, records)) for drawing in experiment.drawings]
    return tuple(Figure(to_svg(draw), drawing.caption) for drawing, draw in found if draw is not None)


def _table(
    experiment: Experiment, rows: Sequence[Row], records: Records, setting: Setting, groups: Sequence[Group]
) -> Table:
    study = groups if experiment.pools_spread else ()
    made = []
    for i, row in enumerate(rows):
        cells = _cells(row, rows[:i], records, setting, study)
        costs = _costs(records.group(row.config) if experiment.compares_costs else None)
        made.append(page.Row((*cells, *costs), starts_block=i > 0 and _block(row) != _block(rows[i - 1])))
    return _without_empty_columns(Table(HEADER, tuple(made)))


def _cells(
    row: Row, above: Sequence[Row], records: Records, setting: Setting, study: Sequence[Group]
) -> tuple[Cell, ...]:
    """Under HEADER, but for the costs."""
    # The nearest above: at tiny scale several rows have the same configuration.
    versus = next((other for other in reversed(above) if other.config == row.versus), None)
    paper_effect = None if versus is None else _minus(row.accuracy, versus.accuracy)
    name, papers_effect = _name(row, setting), _points(paper_effect)
    paper = Cell("–" if row.accuracy is None else f"{row.accuracy:.2f} %")
    papers_sharpness = NOTHING if row.sharpness is None else Cell(f"{row.sharpness:.4f}")
    group, lost = records.group(row.config), records.diverged(row.config)
    if group is None:
        state = Cell(f"diverged ({lost} runs)", "bad") if lost else NOTHING
        before, after = (name, Cell("0"), state, NOTHING, paper, NOTHING, NOTHING), (NOTHING,) * 4
        return (*before, papers_effect, *after, papers_sharpness)
    base = None if row.versus is None else records.group(row.versus)
    is_whole = row.versus is None or not records.diverged(row.versus)
    effect = _difference(base, group, reported, is_whole, study)
    loss = _difference(base, group, _last_loss, is_whole)
    return (
        name,
        Cell(f"{len(group.records)}, {lost} more diverged" if lost else str(len(group.records))),
        Cell(percent(group.sample(lambda r: r.last.test_accuracy))),
        Cell(percent(group.sample(lambda r: r.best.test_accuracy))),
        paper,
        _points(None if setting.scale == "tiny" else _minus(100 * group.sample(reported).mean, row.accuracy)),
        _effect(effect, base, group, reported, POINTS, bool(lost)),
        papers_effect,
        _sign(effect, paper_effect, bool(lost), is_whole),
        _loss(group),
        _effect(loss, base, group, _last_loss, LOSS, bool(lost) or _is_worse(effect)),
        _sharpness(records.seeds_of(row.config), sharpness(setting, row.config.model)),
        papers_sharpness,
    )


def _name(row: Row, setting: Setting) -> Cell:
    shared = "" if row.config.preset == setting.preset else f"the run of preset {row.config.preset}"
    small = f"here {row.config.model} on the digits, batch {row.config.batch_size}" if setting.scale == "tiny" else ""
    notes = ", ".join(note for note in (row.note or shared, small) if note)
    return Cell(row.label + (f" ({notes})" if notes else ""))


def gpu_time(trained: Sequence[Record]) -> tuple[str, ...]:
    """In a sentence, what training took; runs side by side share their seconds. Nothing without a GPU's run."""
    made = [record for record in each_training_once(trained) if record.provenance.cuda is not None]
    known = [record for record in made if has_its_own_seconds(record)]
    more = f"; of {len(made) - len(known)} more, which shared a GPU, it is not known" if len(known) < len(made) else ""
    if not known:
        return ()
    return (f"Training took {sum(r.seconds for r in known) / 60:.1f} GPU minutes for {len(known)} runs{more}.",)


def _costs(group: Group | None) -> tuple[Cell, Cell]:
    if group is None:
        return NOTHING, NOTHING
    evaluations = group.sample(lambda r: r.last.evaluations)
    if not all(map(has_its_own_seconds, group.records)):
        return Cell(f"{evaluations.mean:,.0f}"), NOTHING
    seconds = Sample(tuple(map(training_seconds, group.runs)))
    spread = "" if seconds.sd is None else f" ± {seconds.sd:.2f}"
    return Cell(f"{evaluations.mean:,.0f}"), Cell(f"{seconds.mean:.2f}{spread}")


def _without_empty_columns(table: Table) -> Table:
    """Without columns in which neither the paper nor the records say anything about any row."""
    kept = [i for i in range(len(HEADER)) if any(row.cells[i].text != "–" for row in table.rows)]
    rows = tuple(page.Row(tuple(row.cells[i] for i in kept), row.starts_block) for row in table.rows)
    return Table(tuple(table.header[i] for i in kept), rows)


def _block(row: Row) -> tuple[str, str, int]:
    return row.config.model, row.config.dataset, row.config.batch_size


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _points(value: float | None) -> Cell:
    return NOTHING if value is None else Cell(f"{value:+.2f}")


def _last_loss(record: Record) -> float:
    return record.last.test_loss


def _loss(group: Group) -> Cell:
    sample = group.sample(_last_loss)
    return Cell(f"{sample.mean:.3f}" + ("" if sample.sd is None else f" ± {sample.sd:.3f}"))


def _is_worse(effect: Difference | None) -> bool:
    """Whether accuracy falls: a loss that falls beside it means a network that is less sure, not a better one."""
    return effect is not None and effect.is_shown and effect.mean < 0


def _difference(
    base: Group | None,
    group: Group,
    value: Callable[[Record], float],
    is_whole: bool,
    study: Sequence[Group] = (),
) -> Difference | None:
    """Against the baseline; if that is not whole, as some of its runs diverged, the others are no measure."""
    if base is None:
        return None
    found = compare_in_study([group], [base], value, study) if study else compare(base, group, value)
    return found if found is None or is_whole else replace(found, may_be_claimed=False)


def _effect(
    effect: Difference | None,
    base: Group | None,
    group: Group,
    value: Callable[[Record], float],
    unit: _Unit,
    no_gain: bool,
) -> Cell:
    """How a figure differs from the baseline's; what looks better is not claimed where `no_gain`."""
    if effect is None:
        alike = [] if base is None else pairs(base, group, value)
        return Cell(f"{unit.told(Sample(tuple(alike)).mean)} (too few runs)", "faint") if alike else NOTHING
    text = f"{unit.told(effect.mean)} [{unit.told(effect.low)}, {unit.told(effect.high)}]"
    is_better = unit.better * effect.mean > 0
    if not effect.is_shown or (no_gain and is_better):
        return Cell(text, "faint")
    return Cell(text, "good" if is_better else "bad")


def _sign(effect: Difference | None, paper: float | None, diverged: bool, is_whole: bool) -> Cell:
    if effect is not None and ((diverged and effect.is_shown and effect.mean > 0) or not is_whole):
        return Cell("no claim: runs diverged", "faint")
    if effect is None or not effect.is_shown:
        return Cell("–" if effect is None or effect.n < FEWEST_RUNS else "no difference", "faint")
    if paper is None:
        return Cell("gain" if effect.mean > 0 else "fall")
    return Cell("as the paper's" if effect.mean * paper > 0 else "opposite")


def _sharpness(found: Sequence[Found], wanted: Measuring) -> Cell:
    results = [each.answer(wanted) for each in found]
    results = [result for result in results if result is not None]
    if not results:
        return NOTHING
    converged = sum(result.status == "converged" for result in results)
    sample = Sample(tuple(result.value for result in results))
    spread = "" if sample.sd is None else f" ± {amount(sample.sd, 3)}"
    return Cell(f"{amount(sample.mean, 3)}{spread} ({converged} of {len(results)})")


def _verdicts(verdicts: Sequence[Verdict], heading: str) -> Section:
    rows = tuple(page.Row((Cell(each.claim), Cell(each.verdict), Cell(each.evidence, "faint"))) for each in verdicts)
    return Section(f"{heading}: verdicts", table=Table(("claim", "verdict", "evidence"), rows, prose=True))


# ---- Markdown --------------------------------------------------------------------------------------------------------


def to_markdown(parts: Iterable[Section], title: str, lead: Sequence[str], unmeasured: Sequence[str] = ()) -> str:
    """The tables of these sections as one text; pictures stay with the pages."""
    text = [f"# {title}", *lead, _list(NOTES)]
    for section in parts:
        table = [] if section.table is None else [section.table.to_markdown()]
        text += [f"## {section.heading}", *section.paragraphs, *table]
    if unmeasured:
        text += ["## Not measured yet", _list(unmeasured)]
    return "\n\n".join(text) + "\n"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def preset_notes(presets: Iterable[str]) -> tuple[str, ...]:
    """What each preset assumes, in one sentence each."""
    return tuple(f"Preset {name}: {PRESETS[name].summary}." for name in presets)
