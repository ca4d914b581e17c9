"""The figures of a page in words, for who reads it in a minute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from smoothout.lab.groups import Difference, Group, Sample, are_pairs, difference
from smoothout.lab.report.measured import loss_rises
from smoothout.lab.report.names import name_of
from smoothout.lab.report.page import Section
from smoothout.lab.report.sections import comparisons, is_claimed


def findings_section(groups: Sequence[Group]) -> Section | None:
    """How sharp the large batch's minima are, and what each method changes."""
    sentences, flatter, better = _sharper_by_batch(groups), 0, 0
    for each in comparisons(groups):
        if not each.is_measured:
            continue
        told = partial(_in_words, group=each.group)
        flat = told(each.rise, more="sharper than", less="flatter than", neither="not measurably flatter than")
        on_loss = told(each.loss)
        on_accuracy = told(each.accuracy, more_is_better=True)
        name = name_of(each.group, groups)
        sentences.append(
            f"{name[0].upper()}{name[1:]}: its minima are {flat} the baseline's; test loss {on_loss}, accuracy "
            f"{on_accuracy}."
        )
        flatter += flat == "flatter than"
        better += flat == "flatter than" and on_loss == "lower"
    if flatter:
        sentences.append(
            f"Of {flatter} that are flatter, {better} {'has' if better == 1 else 'have'} a lower test loss: a flatter "
            "minimum need not be a better one, so the two are measured apart."
        )
    return Section("What came out", tuple(sentences)) if sentences else None


def _sharper_by_batch(groups: Sequence[Group]) -> list[str]:
    """A sentence, where the plain runs of the largest batch are measurably sharper than those of the smallest."""
    plain = [(g, rise) for g, rise in zip(groups, loss_rises(groups)) if g.config.method == "plain"]
    plain.sort(key=lambda pair: pair[0].config.batch_size)
    if len({g.config.batch_size for g, _ in plain}) < 2:
        return []
    (small, little), *_, (large, much) = plain
    if little is None or much is None or not _is_sharper(small, little, large, much):
        return []
    return [
        f"Without noise the large batch ends in a minimum {much.mean / little.mean:.2g} times as sharp as the small "
        f"batch's (loss rise {much.mean:.3g} against {little.mean:.2g})."
    ]


def _is_sharper(small: Group, little: Sample, large: Group, much: Sample) -> bool:
    found = difference(little.values, much.values, are_pairs(small, large))
    is_whole = not small.diverged and not large.diverged
    return found is not None and found.is_shown and found.mean > 0.0 and little.mean > 0.0 and is_whole


def _in_words(
    d: Difference | None,
    group: Group,
    more: str = "higher",
    less: str = "lower",
    neither: str = "not measurably different",
    more_is_better: bool = False,
) -> str:
    if d is None or not is_claimed(d, group, more_is_better):
        return neither
    return more if d.mean > 0 else less
