"""`smoothout reproduce`: the paper's tables, figures and claims."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from smoothout.lab import packs
from smoothout.lab.experiments.catalogue import asked_for
from smoothout.lab.experiments.choice import lacks_choice
from smoothout.lab.experiments.pages import results_markdown, write_page
from smoothout.lab.experiments.queue import Plan, plan
from smoothout.lab.experiments.records import Records
from smoothout.lab.experiments.runner import run_queue
from smoothout.lab.experiments.speeds import Speeds
from smoothout.lab.experiments.vocabulary import Experiment, Scale, Setting
from smoothout.lab.experiments.worker import Outcome, Place
from smoothout.lab.nearest import nearest
from smoothout.lab.presets import PRESETS
from smoothout.lab.report.digest import digest as digest_of
from smoothout.lab.train.stop import TRY_AGAIN, check_minutes

RESULTS, EVERY_PRESET = "results", "all"
DEFAULT_RESULTS = Path("results")
SECONDS_BETWEEN_PACKS = 30.0  # a machine may be gone the next moment, and each time all runs are read

HELP = """Run the paper's tables, figures and claims, and write a page with our numbers beside the paper's.

NAMES: table1 … table5, figure1, figure2, figure4 … figure9, claims,
flatness, ncopy, choice, finals, lengths, why, rates, batchnorm, normalisation, sam, rivals, rivals_choice; or `all`.
--list says what each is. Runs that are finished, in --out or in a pack
(a file of records) under --results, are skipped.
`results` trains nothing: it shows every record there is.
The same command again resumes where the last one stopped.

\b
smoothout reproduce --list --seeds 5
smoothout reproduce table1 --scale tiny --out runs/tiny
smoothout reproduce table1 figure2 --seeds 5 --minutes 9 --out runs/paper \\
  --pack results/table1.jsonl
smoothout reproduce table2 --models alexnet,resnet18 --imagenet DIR --dry-run
smoothout reproduce results --markdown > docs/results.md
"""


@dataclass(frozen=True)
class _Asked:
    """What was asked for, with the records that are there."""

    experiments: list[tuple[Setting, Experiment]]
    seeds: range
    records: Records
    data_root: Path | None
    retrain: bool

    @cached_property
    def speeds(self) -> Speeds:
        return Speeds(self.records)

    @cached_property
    def _others(self) -> list[Experiment]:
        """Every experiment in the settings asked for."""
        return [e for setting in dict(self.experiments) for e in asked_for(["all"], setting, [])]

    def plan(self, only: Experiment | None = None) -> Plan:
        experiments = [e for _, e in self.experiments] if only is None else [only]
        how = (self.seeds, self.records, self.speeds, self.data_root, self.retrain)
        return plan(experiments, *how, others=self._others)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("reproduce", help=HELP)(_reproduce)


def _reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="experiments, or all, or results")] = None,
    scale: Annotated[Scale, typer.Option(help="paper, or tiny: the same on the digits, in minutes on a CPU")] = "paper",
    preset: Annotated[
        str,
        typer.Option(help=f"{', '.join(PRESETS)}, or all; ours has strengths chosen on held-out images, unlike train"),
    ] = "paper",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each kind, from --seed on")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 0,
    models: Annotated[str, typer.Option(help="only rows of these networks, such as f1,c1")] = "",
    minutes: Annotated[
        float | None, typer.Option(help="stop at the first checkpoint after this many minutes, with exit code 75")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="worker processes; on one GPU they take turns")] = 1,
    together: Annotated[
        int | None, typer.Option(min=1, help="runs at once on a GPU; default: five for small networks, one for others")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for runs and page")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option(help="folder with packs of records (*.jsonl)")] = DEFAULT_RESULTS,
    pack: Annotated[Path | None, typer.Option(help="add the records of --out to this .jsonl as they come")] = None,
    data_root: Annotated[Path | None, typer.Option(help="where data are looked for first")] = None,
    imagenet: Annotated[str | None, typer.Option(help="folder with train/ and val/; default: imagenette")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    retrain: Annotated[
        bool, typer.Option("--retrain", help="train packed runs again to measure what they lack")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="train nothing, print the tables as Markdown")] = False,
    digest: Annotated[bool, typer.Option("--digest", help="with results: print README's table of them")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print every configuration, train nothing")] = False,
    list_: Annotated[bool, typer.Option("--list", help="what there is, what is done, and what the rest costs")] = False,
) -> None:
    names = list(names or [])
    if results != DEFAULT_RESULTS and not results.is_dir():
        raise ValueError(f"--results: there is no folder {results}")
    if not names and not list_:
        raise ValueError("name an experiment, or all; `smoothout reproduce --list` shows what there is")
    only_records = RESULTS in names
    experiments = _experiments(names, scale, preset, imagenet, models)
    with TemporaryDirectory() as unpacked:
        pack_files = sorted(results.glob("*.jsonl"))
        records = Records.read([] if only_records else [out], pack_files, Path(unpacked))
        asked = _Asked(experiments, range(seed, seed + seeds), records, data_root, retrain)
        if list_:
            _print_list(asked)
        elif dry_run:
            _print_configurations(asked)
        elif digest:
            print(digest_of(experiments, records).to_markdown())
        elif markdown:
            print(results_markdown(experiments, records, _command()), end="")
        elif only_records:
            print(write_page(out, experiments, records, _command(), only_measured=True))
        else:
            todo = asked.plan()
            _refuse_what_is_empty(experiments)
            _refuse_what_is_not_chosen(todo)
            place = _place(scale, out, data_root, device, minutes, asked.speeds, together)
            if pack is not None:
                packs.refuse_damaged(pack)
            outcomes = _carry_out(todo, place, jobs, pack, scale)
            packed = pack is not None and _pack(out, pack)
            records = Records.read([out], pack_files, Path(unpacked) / "again")
            page = write_page(out, experiments, records, _command())
            if packed and pack is not None:
                print(pack.resolve())
            print(page)
            _exit(outcomes, todo)


def _experiments(
    names: list[str], scale: Scale, preset: str, imagenet: str | None, models: str
) -> list[tuple[Setting, Experiment]]:
    """Those asked for, in the presets asked for; `results`, and a list without names, are all of them."""
    presets = list(PRESETS) if RESULTS in names or preset == EVERY_PRESET else [preset]
    wanted = ["all"] if RESULTS in names or not names else names
    only = [model for model in models.split(",") if model]
    settings = [Setting(scale, _known_preset(each), imagenet) for each in presets]
    if only:
        _check_models(only, wanted, settings[0])
    asked = [(setting, each) for setting in settings for each in asked_for(wanted, setting, only)]
    # Once is enough for what has no run, such as Figure 1, and for what is the same runs in several presets.
    different: dict[tuple[object, ...], tuple[Setting, Experiment]] = {}
    for setting, each in asked:
        runs = [row.config for row in each.rows]
        key = (each.name, *runs)
        if key not in different or (runs and setting.preset == runs[0].preset):  # named after the preset they are of
            different[key] = (setting, each)
    return list(different.values())


def _check_models(models: list[str], names: list[str], setting: Setting) -> None:
    """Refuse networks that none of these experiments trains; all presets train the same ones."""
    known = sorted({row.config.model for experiment in asked_for(names, setting) for row in experiment.rows})
    for model in models:
        if model not in known:
            stand_in = ", where small networks stand in for the paper's," if setting.scale == "tiny" else ""
            there_are = f"there are {', '.join(known)}" if known else "there are none"
            raise ValueError(
                f"--models: no {model!r} in {', '.join(names)}: at scale {setting.scale}{stand_in} {there_are}"
            )


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is not known{nearest(name, [*PRESETS, EVERY_PRESET])}")
    return name


def _command() -> str:
    return shlex.join(["smoothout", *sys.argv[1:]])


def _place(
    scale: Scale,
    out: Path,
    data_root: Path | None,
    device: str,
    minutes: float | None,
    speeds: Speeds,
    together: int | None,
) -> Place:
    deadline = None if minutes is None else time.time() + 60 * check_minutes(minutes)
    threads = 1 if scale == "tiny" else None  # the networks are too small for more
    return Place(out, data_root, device, deadline, threads, speeds, together)


def _refuse_what_is_empty(experiments: Sequence[tuple[Setting, Experiment]]) -> None:
    """A page without a row would look like a result."""
    if not any(experiment.rows or experiment.drawings for _, experiment in experiments):
        names = ", ".join(experiment.name for _, experiment in experiments)
        raise ValueError(f"{names}: nothing to run yet, since it waits for what `smoothout reproduce choice` finds")


def _refuse_what_is_not_chosen(todo: Plan) -> None:
    """Runs of preset ours before it has chosen would be thrown away."""
    for config in (task.config for task in todo.tasks if task.trains):
        if lacks_choice(config):
            where = f"{config.model} at {config.batch_size} with {config.method}"
            raise ValueError(
                f"preset ours has not chosen for {where} yet: `smoothout reproduce choice --models {config.model}` "
                "finds what, which is entered in lab/experiments/chosen.py"
            )


def _carry_out(todo: Plan, place: Place, jobs: int, pack: Path | None, scale: Scale) -> list[Outcome]:
    cost = f", about {todo.seconds / 60:.1f} minutes on an H200" if scale == "paper" else ""
    print(f"{todo.runs} runs wanted, {todo.done} done; {len(todo.tasks)} tasks{cost}", flush=True)
    for line in _cannot(todo):
        print(line, flush=True)
    packed = time.monotonic()

    def say(line: str) -> None:
        nonlocal packed
        print(line, flush=True)
        if pack is not None and time.monotonic() - packed > SECONDS_BETWEEN_PACKS:
            _pack(place.out, pack)
            packed = time.monotonic()

    return run_queue(todo.tasks, place, jobs, say)


def _cannot(todo: Plan) -> list[str]:
    """What will not be done, and why."""
    lines = [f"{dataset} is not here: {runs} runs left out" for dataset, runs in todo.absent.items()]
    if todo.unmeasured:
        lines.append(
            f"{todo.unmeasured} runs are known from packs, without weights to measure: --retrain trains them again"
        )
    return lines


def _pack(out: Path, pack: Path) -> bool:
    """Add the runs of --out that have ended, if there are any."""
    ended = {found.run.config.hash: found.run.path.resolve() for found in Records.read([out]).all() if found.is_done}
    if ended:
        packs.add(pack, sorted(ended.values()), out.resolve())
    return bool(ended)


def _exit(outcomes: Sequence[Outcome], todo: Plan) -> None:
    """1 after a fault or without what cannot be measured, 75 (try again) where time or a signal ended it, else 0."""
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    for outcome in failed:
        print(f"failed: {outcome.task}: {outcome.message}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)
    if any(outcome.stops_the_queue for outcome in outcomes):
        print("not all is done. The same command goes on from there.", file=sys.stderr)
        raise typer.Exit(TRY_AGAIN)
    if todo.unmeasured or (todo.absent and not todo.done and not outcomes):
        print("not all is measured, see above", file=sys.stderr)
        raise typer.Exit(1)


def _print_list(asked: _Asked) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 170
    table = Table(box=None, padding=(0, 1))
    # Of the tiny runs, which are for a CPU, nobody knows whose minutes to name.
    cost = ["minutes on an H200"] if any(setting.scale == "paper" for setting, _ in asked.experiments) else []
    for name in ("experiment", "preset", "", "runs", "done", "missing", *cost, "not possible here"):
        table.add_column(name, justify="right" if name in ("runs", "done", "missing", *cost) else "left")
    for setting, experiment in asked.experiments:
        todo = asked.plan(experiment)
        absent = [f"{dataset} ({runs})" for dataset, runs in todo.absent.items()]
        unmeasured = [f"measuring {todo.unmeasured} packed"] if todo.unmeasured else []
        minutes = [f"{todo.seconds / 60:.1f}"] if cost else []
        numbers = (todo.runs, todo.done, todo.runs - todo.done, *minutes)
        cells = (experiment.name, setting.preset, experiment.title, *map(str, numbers), ", ".join(absent + unmeasured))
        table.add_row(*cells)
    console.print(table)
    print(f"for seeds {asked.seeds.start} … {asked.seeds.stop - 1}; runs that experiments share are counted in each")


def _print_configurations(asked: _Asked) -> None:
    for setting, experiment in asked.experiments:
        print(f"{experiment.name}, preset {setting.preset}, scale {setting.scale}: {experiment.title}")
        for row in experiment.rows:
            settings = {k: v for k, v in row.config.to_dict().items() if k != "seed"}
            paper = "" if row.accuracy is None else f"  paper {row.accuracy:.2f} %"
            print(f"  {row.config.hash}  {row.label}{paper}")
            print("    " + " ".join(f"{name}={value}" for name, value in settings.items()))
