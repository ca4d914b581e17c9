"""`smoothout measure`: how flat the minima of finished runs are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from smoothout.lab import measurements
from smoothout.lab.files import RunError
from smoothout.lab.runs import find_runs, load_run
from smoothout.lab.trained import Trained, load_trained

HELP = """Measure how flat the minima of finished runs are. Results are printed and kept in the folders of the runs.

\b
smoothout measure sharpness runs/f1
smoothout measure sensitivity runs/plain runs/smooth --plot sensitivity.svg
smoothout measure interpolate runs/small runs/large --plot line.svg
"""

app = typer.Typer(no_args_is_help=True, help=HELP)


def _drawable(file: Path | None) -> Path | None:
    """A file that a plot can be written to: asked before the measuring, which may take long."""
    if file is None:
        return None
    from smoothout.measure import plots

    if file.suffix.lower()[1:] not in plots.new_axes().figure.canvas.get_supported_filetypes():
        raise ValueError(f"plot={str(file)!r}: give a file that ends in .svg, .png or .pdf")
    if not file.parent.is_dir():
        raise ValueError(f"plot={str(file)!r}: there is no folder {str(file.parent)!r}")
    return file


Runs = Annotated[list[Path], typer.Argument(help="run folders, or folders that hold some")]
Split = Annotated[Literal["train", "test"], typer.Option(help="images to measure on")]
Weights = Annotated[Literal["last", "best"], typer.Option(help="weights of the last or of the best epoch")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
DataRoot = Annotated[Path | None, typer.Option(help="where data are looked for first")]
BatchSize = Annotated[int | None, typer.Option(min=1, show_default="1000", help="images evaluated at once")]
Images = Annotated[int | None, typer.Option(min=1, show_default="all", help="measure on the first N images only")]
Plot = Annotated[
    Path | None,
    typer.Option(callback=_drawable, help="plot all runs in one figure, in this file (.svg, .png, .pdf)"),
]
Seed = Annotated[int, typer.Option(help="seed of starts, noise, directions and probes")]
Scale = Annotated[Literal["absolute", "filter"], typer.Option(help="filter: relative to the norms of filters")]
Noise = Annotated[Literal["uniform", "gaussian", "rademacher"], typer.Option(help="law of the noise")]


def register(parent: typer.Typer) -> None:
    """Add the command."""
    parent.add_typer(app, name="measure")


@app.command()
def sharpness(
    runs: Runs,
    split: Split = "train",
    weights: Weights = "last",
    epsilon: Annotated[float, typer.Option(help="size of the box")] = 5e-4,
    subspace: Annotated[int | None, typer.Option(min=1, help="dimensions of a random subspace; default: all")] = None,
    restarts: Annotated[int, typer.Option(min=1, help="starts; the value is the maximum over them")] = 5,
    max_iterations: Annotated[int, typer.Option(min=1, help="largest number of solver iterations")] = 10,
    method: Annotated[Literal["auto", "lbfgsb", "ascent"], typer.Option(help="solver")] = "auto",
    scale: Scale = "absolute",
    seed: Seed = 0,
    device: Device = "auto",
    data_root: DataRoot = None,
    batch_size: BatchSize = None,
    images: Images = None,
    plot: Plot = None,
) -> None:
    """(C_ε, A)-sharpness after Keskar: how far the loss can rise in a small box, in per cent.

    \b
    smoothout measure sharpness runs/f1
    smoothout measure sharpness runs/plain runs/smooth --method ascent --plot sharpness.svg
    """
    settings = {"epsilon": epsilon, "subspace": subspace, "restarts": restarts, "max_iterations": max_iterations}
    settings |= {"method": method, "scale": scale, "seed": seed}
    taken = _measure_all("sharpness", runs, split, _Loading(weights, device, data_root, batch_size, images), settings)
    _print_table(
        ("run", "sharpness", "mean of starts", "starts", "loss", "status"),
        [
            (name, f"{r.value:.4f}", f"{r.mean:.4f}", str(len(r.trials)), f"{r.base_loss:.4g}", r.status)
            for name, r in taken.items()
        ],
    )
    _draw("sharpness", taken, plot)


@app.command()
def sensitivity(
    runs: Runs,
    strengths: Annotated[str, typer.Option(help="values of a, with commas")] = "0,0.01,0.02,0.03,0.04,0.05",
    split: Split = "train",
    weights: Weights = "last",
    noise: Noise = "uniform",
    scale: Scale = "absolute",
    draws: Annotated[int, typer.Option(min=1, help="random θ to average over; the same for every run")] = 5,
    fresh_noise: Annotated[
        bool, typer.Option("--fresh-noise", help="new noise for every batch: the paper's protocol, --batch-size 100")
    ] = False,
    seed: Seed = 0,
    device: Device = "auto",
    data_root: DataRoot = None,
    batch_size: BatchSize = None,
    images: Images = None,
    plot: Plot = None,
) -> None:
    """The loss under noise, C̄(w; a), against its strength a, and the slope s = ΔC̄/Δa.

    \b
    smoothout measure sensitivity runs/f1 --draws 10 --plot sensitivity.svg
    smoothout measure sensitivity runs/c1 --fresh-noise --batch-size 100 --split test
    """
    grid = _from_zero(strengths)
    settings = {"strengths": grid, "noise": noise, "scale": scale, "draws": draws}
    settings |= {"fresh_noise_per_batch": fresh_noise, "seed": seed}
    taken = _measure_all("sensitivity", runs, split, _Loading(weights, device, data_root, batch_size, images), settings)
    _print_table(
        ("run", f"loss at a = {grid[0]:g}", f"loss at a = {grid[-1]:g}", "slope s"),
        [(name, f"{r.losses[0]:.4g}", f"{r.losses[-1]:.4g}", f"{r.slope:.4g}") for name, r in taken.items()],
    )
    _draw("sensitivity", taken, plot)


@app.command()
def landscape(
    runs: Runs,
    split: Split = "train",
    weights: Weights = "last",
    dims: Annotated[int, typer.Option(min=1, max=2, help="1: curves; 2: a grid")] = 1,
    span: Annotated[float, typer.Option(help="from −span to span, in units of the weights' own filters")] = 1.0,
    steps: Annotated[int, typer.Option(min=2, help="points along an axis")] = 51,
    directions: Annotated[int | None, typer.Option(min=1, help="how many curves, in one dimension")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    data_root: DataRoot = None,
    batch_size: BatchSize = None,
    images: Images = None,
    plot: Plot = None,
) -> None:
    """The loss along random filter-normalised directions.

    \b
    smoothout measure landscape runs/plain runs/smooth --directions 5 --plot landscape.svg
    smoothout measure landscape runs/f1 --dims 2 --steps 25 --plot contours.svg
    """
    settings = {"dims": dims, "span": span, "steps": steps, "directions": directions, "seed": seed}
    if dims == 2 and plot is not None and len(_finished(runs)) > 1:
        raise ValueError("2-D landscapes do not overlay: measure several runs without --plot, or plot them one by one")
    taken = _measure_all("landscape", runs, split, _Loading(weights, device, data_root, batch_size, images), settings)
    where = f"at ±{span:g}" if dims == 1 else f"on the edge, ±{span:g}"
    _print_table(
        ("run", "loss in the middle", f"mean loss {where}"),
        [(name, f"{r.base_loss:.4g}", f"{_mean_at_the_edge(r):.4g}") for name, r in taken.items()],
    )
    _draw("landscape", taken, plot)


@app.command()
def curvature(
    runs: Runs,
    split: Split = "train",
    weights: Weights = "last",
    top: Annotated[int, typer.Option(min=1, help="leading eigenvalues of the Hessian")] = 1,
    probes: Annotated[int, typer.Option(min=2, help="random vectors for the trace")] = 30,
    max_iterations: Annotated[int, typer.Option(min=1, help="largest number of Lanczos iterations")] = 100,
    seed: Seed = 0,
    device: Device = "auto",
    data_root: DataRoot = None,
    batch_size: BatchSize = None,
    images: Images = None,
    plot: Plot = None,
) -> None:
    """Leading eigenvalues and trace of the Hessian, by Hessian-vector products.

    \b
    smoothout measure curvature runs/f1 --top 3
    """
    settings = {"top": top, "probes": probes, "max_iterations": max_iterations, "seed": seed}
    taken = _measure_all("curvature", runs, split, _Loading(weights, device, data_root, batch_size, images), settings)
    rows = [
        (name, ", ".join(f"{v:.4g}" for v in r.eigenvalues), f"{r.trace:.4g} ± {r.trace_error:.2g}", str(r.converged))
        for name, r in taken.items()
    ]
    _print_table(("run", "eigenvalues", "trace", "converged"), rows)
    _draw("curvature", taken, plot)


@app.command()
def interpolate(
    a: Annotated[Path, typer.Argument(help="the run at α = 0, such as the small batch's")],
    b: Annotated[Path, typer.Argument(help="the run at α = 1, such as the large batch's")],
    alphas: Annotated[str, typer.Option(help="from:to:step")] = "-1:2:0.1",
    split: Split = "train",
    weights: Weights = "last",
    batchnorm: Annotated[Literal["interpolate", "recompute"], typer.Option(help="running statistics")] = "interpolate",
    device: Device = "auto",
    data_root: DataRoot = None,
    batch_size: BatchSize = None,
    images: Images = None,
    plot: Plot = None,
) -> None:
    """Loss and accuracy on the line between the weights of two runs: the paper's Figure 2(a).

    \b
    smoothout measure interpolate runs/small runs/large --plot line.svg
    """
    loading = _Loading(weights, device, data_root, batch_size, images)
    start, end = loading.load(a), loading.load(b)
    measurements.refuse_read_only(a)
    with _bar("interpolation") as progress:
        taken = measurements.take_interpolation(start, end, _grid(alphas), split, progress, batchnorm=batchnorm)
    _keep(a, taken)
    line = taken.result
    rows = [
        (f"{α:.2f}", f"{loss:.4g}", f"{accuracy:.2%}")
        for α, loss, accuracy in zip(line.alphas, line.losses, line.accuracies)
    ]
    _print_table(("α", "loss", "accuracy"), rows)
    _draw("interpolation", {f"{a} → {b}": line}, plot)


# ---- what the commands share ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loading:
    """How a finished run is loaded: the options that all commands share."""

    weights: Literal["last", "best"]
    device: str
    data_root: Path | None
    batch_size: int | None
    images: int | None

    def load(self, path: Path) -> Trained:
        return load_trained(path, self.weights, self.device, self.data_root, self.batch_size, self.images)


def _finished(places: list[Path]) -> list[Path]:
    paths = [path for path in find_runs(*places) if load_run(path).record is not None]
    if not paths:
        raise RunError(f"no finished run in {', '.join(map(str, places))}")
    return paths


def _measure_all(
    kind: Any, places: list[Path], split: Literal["train", "test"], loading: _Loading, settings: dict[str, Any]
) -> dict[str, Any]:
    """Measure every finished run at these places, keep the results in their folders, and give them by name."""
    results, paths = {}, _finished(places)
    for path in paths:
        measurements.refuse_read_only(path)
    for i, path in enumerate(paths, 1):
        trained = loading.load(path)
        with _bar(f"{kind} of {path}" + (f", run {i} of {len(paths)}" if len(paths) > 1 else "")) as progress:
            taken = measurements.take(kind, trained, split, progress, **settings)
        _keep(path, taken)
        results[str(path)] = taken.result
    return results


def _keep(run: Path, taken: measurements.Measurement) -> None:
    """Save; of one that was measured otherwise and is lost by it, say how it was."""
    was = _differences(measurements.settings_kept(run, taken.name), taken.settings)
    measurements.save(run, taken)
    if was:
        print(f"{run}: replaces the {taken.name} with {'; '.join(was)}")


def _differences(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    def in_words(value: Any) -> str:
        if not isinstance(value, tuple):
            return str(value)
        return ", ".join(f"{v:g}" for v in value) if len(value) < 4 else f"{value[0]:g} … {value[-1]:g} ({len(value)})"

    return [f"{name} {in_words(value)}" for name, value in (old or {}).items() if value != new[name]]


def _mean_at_the_edge(surroundings: Any) -> float:
    """The mean loss at both ends of the line, or all around the square."""
    losses = np.asarray(surroundings.losses)
    inner = np.zeros(losses.shape, dtype=bool)
    inner[(slice(1, -1),) * losses.ndim] = True
    return float(losses[~inner].mean())


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere one line, since to measure many runs may take hours."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(what, file=sys.stderr, flush=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    table = Table(box=None, padding=(0, 1))
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _draw(kind: str, results: dict[str, Any], file: Path | None) -> None:
    if file is None:
        return
    from smoothout.measure import plots

    drawn = getattr(plots, f"plot_{kind}")(results)
    drawn.figure.savefig(file, bbox_inches="tight")
    print(file)


def _from_zero(text: str) -> tuple[float, ...]:
    """The strengths with 0 among them: a rise, and the slope of a single strength, are against the loss there."""
    strengths = _numbers("strengths", text)
    if not any(strengths):
        raise ValueError(f"strengths={text!r}: give one above 0, such as 0.05")
    if 0.0 in strengths:
        return strengths
    print(f"strengths: 0 is measured, too, beside {text}")
    return (0.0, *strengths)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: give numbers with commas between them, such as 0,0.01,0.02") from error


def _grid(text: str) -> tuple[float, ...]:
    try:
        first, last, step = (float(part) for part in text.split(":"))
        count = math.floor((last - first) / step + 1e-9)  # not beyond the end; whole numbers may lie just below
        if count < 1 or step <= 0:
            raise ValueError(text)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"alphas={text!r}: give from:to:step with a positive step, such as -1:2:0.1") from error
    return tuple(round(first + i * step, 10) for i in range(count + 1))
