"""The way into training: one run, or the same for several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from smoothout.lab.config import Config
from smoothout.lab.data import Dataset
from smoothout.lab.files import RunError
from smoothout.lab.presets import TABLE_1_MODELS
from smoothout.lab.run_folder import NoFolder, RunFolder, open_folder
from smoothout.lab.runs import FAILED, RESULT, Provenance, Record, finished
from smoothout.lab.train import build, checkpoint
from smoothout.lab.train.loop import Diverged, Surroundings, Trainer
from smoothout.lab.train.processes import Processes, choose_device, join
from smoothout.lab.train.progress import Progress, judged_on, progress_for
from smoothout.lab.train.stop import Interrupted, StopRequest
from smoothout.lab.train.trackers import TensorBoard, Tracker
from smoothout.lab.train.turns import Clock, Run, alone, in_turns

SMALL_NETWORKS_TOGETHER = 5
T = TypeVar("T")
Introduce = Callable[[Config, Dataset], str]


@dataclass(frozen=True)
class Options:
    """How a run is carried out; none of it changes its result.

    Args:
        data_root: where data are looked for first.
        device: auto, cpu, cuda, cuda:1.
        checkpoint_every: epochs between checkpoints; the last epoch and an interruption always make one.
        minutes: stop at a checkpoint after so many; None: never.
        tensorboard: write event files into the run folder.
        workers: processes that decode images; None: one a core, up to eight.
        cuda_graphs: on CUDA, replay a step as one graph; the same training to float tolerance.
        together: of several runs, how many share a GPU, in turns; None: five of the paper's small networks, one of any
            other. Each trains as it does alone.
        quiet: show nothing.
    """

    data_root: Path | None = None
    device: str = "auto"
    checkpoint_every: int = 1
    minutes: float | None = None
    tensorboard: bool = False
    workers: int | None = None
    cuda_graphs: bool = True
    together: int | None = None
    quiet: bool = False


def train(
    config: Config, out: str | Path, options: Options | None = None, introduce: Introduce | None = None
) -> Record:
    """Train, or go on with, the run of this configuration in folder `out`; gives the record, at once if it is done.

    Args:
        introduce: what to say when a run begins, all that it names having been found; nothing is said of one that is
            done.

    Raises RunError if the folder cannot be used or the loss diverges, Interrupted (after a checkpoint) on SIGINT,
    SIGTERM or when `options.minutes` are over.
    """
    return train_seeds([config], lambda config: Path(out), options, introduce)[0]


def train_seeds(
    configs: list[Config],
    folder_of: Callable[[Config], Path],
    options: Options | None = None,
    introduce: Introduce | None = None,
) -> list[Record]:
    """Several runs in this process (and those torchrun started with it).

    Raises Diverged for all that did, with a line for each, or what the first to fail in another way did.
    """
    results = attempt(configs, folder_of, options, introduce)
    failed = [result for result in results if isinstance(result, Exception)]
    others = [error for error in failed if not isinstance(error, Diverged)]
    if failed:
        raise others[0] if others else Diverged("\n".join(map(str, failed)))
    return [result for result in results if not isinstance(result, Exception)]


def attempt(
    configs: Sequence[Config],
    folder_of: Callable[[Config], Path],
    options: Options | None = None,
    introduce: Introduce | None = None,
) -> list[Record | Exception]:
    """Several runs, and for each its record, or the RunError or Interrupted that ended it.

    Those that would come after a run that failed, and do not share the device with it, are not begun; those after one
    that diverged are.
    """
    options = Options() if options is None else options
    if options.checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={options.checkpoint_every}: at least 1 is needed")
    device = choose_device(options.device)
    processes = join(device)
    torch.backends.cudnn.benchmark = True  # batches have one size, but for the last of an epoch
    results: list[Record | Exception] = []
    data = _Data(options.data_root, device)
    try:
        with StopRequest(options.minutes) as stop:
            while len(results) < len(configs) and not any(map(_ends_all, results)):
                waiting = configs[len(results) :]
                group = waiting[: _together(waiting, options, device, processes)]
                together = sum(not (folder_of(each) / RESULT).exists() for each in group) if len(group) > 1 else 1
                shared = options, device, processes, stop, data, together, Clock(), introduce
                runs = [partial(_one_run, each, folder_of(each), *shared) for each in group]
                results += in_turns(runs, device, (RunError, Interrupted)) if len(runs) > 1 else [_alone(runs[0])]
            return results
    finally:
        processes.close()


def _ends_all(result: Record | Exception) -> bool:
    return isinstance(result, Exception) and not isinstance(result, Diverged)


def _alone(make: Callable[[], Run[Record]]) -> Record | Exception:
    try:
        return alone(make())
    except (RunError, Interrupted) as error:
        return error


def _together(waiting: Sequence[Config], options: Options, device: torch.device, processes: Processes) -> int:
    """How many of those that wait begin together."""
    if device.type != "cuda" or processes.world_size > 1:
        return 1
    if options.together is not None:
        return max(1, options.together)
    small = all(config.model in TABLE_1_MODELS for config in waiting[:SMALL_NETWORKS_TOGETHER])
    return SMALL_NETWORKS_TOGETHER if small else 1


class _Data:
    """Data sets on the device, one copy for runs that follow each other or share it."""

    def __init__(self, root: Path | None, device: torch.device) -> None:
        self._root, self._device = root, device
        self._kept: dict[tuple[str, int], Dataset] = {}

    def of(self, config: Config) -> Dataset:
        key = (config.dataset, config.hold_out)
        if key not in self._kept:
            self._kept = {key: build.load_dataset(config, self._root).to(self._device)}
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # other streams will read it
        return self._kept[key]


def _one_run(
    config: Config,
    out: Path,
    options: Options,
    device: torch.device,
    processes: Processes,
    stop: StopRequest,
    data: _Data,
    together: int,
    clock: Clock,
    introduce: Introduce | None,
) -> Run[Record]:
    label = f"seed {config.seed}: " if together > 1 else ""
    progress = progress_for(processes.rank, options.quiet, label)
    record = _by_first(processes, lambda: finished(out, config))
    if record is not None:
        progress.say(f"{out} is done: {summary(record)}")
        return record
    with ExitStack() as stack:
        folder = stack.enter_context(_folder(out, config, processes))
        dataset = data.of(config)
        found = _by_first(processes, lambda: checkpoint.read_newest(out, config.hash, processes.world_size))
        first_epoch = found.state["position"]["epoch"] + 1 if found else 1
        tracker = Tracker()
        if options.tensorboard and processes.rank == 0:
            tracker = TensorBoard(out / "tensorboard", first_epoch)
            stack.callback(tracker.close)
        how = options.checkpoint_every, options.workers, options.cuda_graphs, clock
        around = Surroundings(folder, processes, device, stop, progress, tracker, *how)
        trainer = Trainer(config, dataset, around)
        provenance = Provenance.here(device, processes.world_size, together)
        folder.begin(config, provenance)  # not before all that the user named was found
        if introduce is not None:
            progress.say(introduce(config, dataset))
        stack.enter_context(progress)
        stack.enter_context(clock.at_work())
        if found:
            _go_on(trainer, found, progress, out)
        try:
            record = yield from trainer.run(provenance)
        except Diverged as error:
            folder.write_json(FAILED, {"message": str(error)})
            raise Diverged(f"{out}: {error}") from error
    progress.say(f"{out}: {summary(record)}")
    return record


def _go_on(trainer: Trainer, found: checkpoint.Found, progress: Progress, out: Path) -> None:
    trainer.load(found.state)
    if found.note:
        progress.say(f"warning: {found.note}")
    position = trainer.position
    progress.say(f"{out}: going on from epoch {position.epoch}, step {position.step}")


@contextmanager
def _folder(out: Path, config: Config, processes: Processes) -> Iterator[RunFolder | NoFolder]:
    """The run folder, opened by the first process."""
    with ExitStack() as stack:
        opened: list[RunFolder] = []
        _by_first(processes, lambda: opened.append(stack.enter_context(open_folder(out, config))))
        yield opened[0] if opened else NoFolder()


def _by_first(processes: Processes, work: Callable[[], T]) -> T | None:
    """What the first process finds, for all; a RunError of its work is raised in all, so that none waits for it."""
    found: T | None = None
    problem: RunError | None = None
    if processes.rank == 0:
        try:
            found = work()
        except RunError as error:
            problem = error
    found, problem = processes.from_first((found, problem))
    if problem is not None:
        raise problem
    return found


def summary(record: Record) -> str:
    """A finished run in one line: last and best epoch, each named."""
    last, best = record.last, record.best
    return (
        f"{judged_on(record.config)} accuracy {last.test_accuracy:.2%} in the last epoch ({last.epoch}), "
        f"{best.test_accuracy:.2%} in the best ({best.epoch}); {record.seconds:.1f} s"
    )


def seed_folder(out: Path, config: Config) -> Path:
    """Where one of several seeds goes."""
    return out / f"seed-{config.seed}"
