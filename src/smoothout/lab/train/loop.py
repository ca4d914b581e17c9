"""The training loop: epochs of steps, evaluation at clean weights, checkpoints, a stop that loses nothing.

The host never waits for the device within an epoch, but every CHECK_EVERY steps for the losses so far: a loss that is
not finite ends the run. Training yields after every step and before it waits at the end of an epoch: several runs can
take turns in one process.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from smoothout.lab.config import Config
from smoothout.lab.data import Dataset
from smoothout.lab.files import RunError
from smoothout.lab.methods import METHODS, Plain
from smoothout.lab.run_folder import NoFolder, RunFolder
from smoothout.lab.runs import BEST_WEIGHTS, LAST_WEIGHTS, RESULT, EpochMetrics, Provenance, Record, best_of
from smoothout.lab.train import build, checkpoint
from smoothout.lab.train.checkpoint import Position
from smoothout.lab.train.evaluate import evaluated, in_numbers, quick_network, smoothed_loss
from smoothout.lab.train.ghost_step import GhostStep
from smoothout.lab.train.graph_step import GraphStep
from smoothout.lab.train.processes import ALONE, Processes
from smoothout.lab.train.progress import Progress
from smoothout.lab.train.regime import learning_rate
from smoothout.lab.train.statistics import has_statistics, measure_statistics
from smoothout.lab.train.stop import Interrupted, StopRequest
from smoothout.lab.train.trackers import Tracker
from smoothout.lab.train.whole_step import OneByOne, Steps, Sums, WholeStep, why_not

CHECK_EVERY = 200


class Diverged(RunError):
    """The loss is no longer a finite number."""


@dataclass(frozen=True)
class Surroundings:
    """Everything about a run that does not determine its result; by default it is alone, on a CPU, and leaves none."""

    folder: RunFolder | NoFolder = field(default_factory=NoFolder)
    processes: Processes = ALONE
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stop: StopRequest = field(default_factory=StopRequest)
    progress: Progress = field(default_factory=Progress)
    tracker: Tracker = field(default_factory=Tracker)
    checkpoint_every: int = 1
    workers: int | None = None
    cuda_graphs: bool = True
    clock: Callable[[], float] = time.monotonic  # of runs that share a device, it gives each its share


class Trainer:
    """One run, from its configuration to its record."""

    def __init__(self, config: Config, dataset: Dataset, around: Surroundings) -> None:
        self.config, self.around, self.dataset = config, around, dataset.to(around.device)
        processes, device = around.processes, around.device
        torch.manual_seed(config.seed)
        model = build.with_ghost_layers(build.build_model(config, dataset), config, processes.world_size)
        self.model = model.to(device)
        if processes.rank:  # the same weights everywhere, but dropout masks of its own for every process
            torch.manual_seed(config.seed + 1_000_003 * processes.rank)
        self.batches = build.training_batches(config, self.dataset, device, processes, around.workers)
        judged_at_once = build.test_batch_size(self.dataset, device)
        self.test_batches = build.judging_batches(
            config, self.dataset, device, processes, workers=around.workers, batch_size=judged_at_once
        )
        self.optimizer = build.make_optimizer(config, self.model)
        called = torch.compile(self.model) if config.compile else self.model
        kind = GraphStep if around.cuda_graphs and device.type == "cuda" and not config.compile else GhostStep
        self.update = kind(
            called,  # pyrefly: ignore[bad-argument-type]
            self.optimizer,
            chunks=build.ghost_batches(config, processes.world_size) if config.ghost_by == "loop" else 1,
            amp=config.amp,
            clip=config.clip,
            processes=processes,
        )
        steps = len(self.batches)
        self.method = METHODS[config.method].make(config, self.update, config.epochs * steps, steps)
        self.position = Position()
        self.history: list[EpochMetrics] = []
        self._best: dict[str, Tensor] = {}  # weights of the best epoch
        self._as_trained: dict[str, float] | None = None  # of the last epoch, before statistics were measured anew
        self._losses = torch.zeros(steps, device=device)  # of this epoch, step by step
        self._correct = torch.zeros((), device=device)
        self._rate = math.nan  # none was set yet
        self._not_whole = ""  # why an update is not one graph
        self.steps = self._make_steps()
        self._quick_network = quick_network(config, self.model)
        self._checked = 0  # steps of this epoch whose loss is known to be finite
        self._saved = ""  # where the last checkpoint was made
        self._started = self._epoch_started = self._now()

    def _make_steps(self) -> Steps:
        """Whole updates as CUDA graphs where that can be, else one by one."""
        sums = Sums(self._losses, self._correct)
        if not can_capture(self.around):
            return OneByOne(self.method, self.batches, sums)
        self._not_whole = why_not(self.method, self.update, self.batches, self.config.compile)
        if self._not_whole:
            return OneByOne(self.method, self.batches, sums)
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=self.around.device)  # a graph reads it when it runs
        capture = self.around.device.type == "cuda"
        assert isinstance(self.method, Plain)
        return WholeStep(self.method, self.update, self.batches, sums, capture=capture)

    def _now(self) -> float:
        return self.around.clock()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, provenance: Provenance) -> Generator[None, None, Record]:
        """Train to the end and write the record; raises Interrupted at a checkpoint if asked to stop."""
        self._started = self._now() - self.position.seconds
        self.around.progress.start(self.config, len(self.batches), self.position)
        if self._not_whole:
            self.around.progress.say(f"one CUDA graph a ghost batch, not one a step: {self._not_whole}")
        self.model.train()
        while self.position.epoch < self.config.epochs_trained:
            yield from self._epoch()
        return self._finish(provenance)

    def _epoch(self) -> Iterator[None]:
        epoch, first = self.position.epoch, self.position.step
        self._epoch_started = self._now() - self.position.epoch_seconds
        self.around.progress.begin_epoch(epoch, first)
        if self.config.reset_optimizer_every_epoch and first == 0:
            self._reset_optimizer()
        evaluations, strength = self.position.evaluations, self.method.strength
        self.steps.begin(epoch, first)
        for step in range(first, len(self.batches)):
            self._set_rate(learning_rate(self.config, epoch, step, len(self.batches)))
            strength = self.method.strength
            evaluations += self.steps.step(step)
            self.around.progress.step(strength)
            yield
            if (step + 1) % CHECK_EVERY == 0:
                self._check_losses(step + 1)
            is_last = step + 1 == len(self.batches)
            if not is_last and (code := self.around.processes.largest(self.around.stop.code)):
                self._advance(step + 1, evaluations)
                self._stop(code)
        self._advance(len(self.batches), evaluations)
        yield from self._end_epoch(strength)

    def _set_rate(self, rate: float) -> None:
        if rate == self._rate:
            return
        self._rate = rate
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _reset_optimizer(self) -> None:
        """Forget momentum and moments, in place: a graph has their addresses."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def _advance(self, step: int, evaluations: float) -> None:
        now = self._now()
        self.position = replace(
            self.position,
            step=step,
            updates=self.position.epoch * len(self.batches) + step,
            evaluations=evaluations,
            seconds=now - self._started,
            epoch_seconds=now - self._epoch_started,
        )

    def _end_epoch(self, strength: float) -> Iterator[None]:
        """Judge, keep the best, write. Running statistics of several processes become their mean."""
        around = self.around
        around.processes.average([b for b in self.model.buffers() if b.is_floating_point()])
        is_last = self.position.epoch + 1 == self.config.epochs_trained
        if self.config.remeasure_bn != "no" and is_last and has_statistics(self.model):
            yield
            self._remeasure_bn()
        metrics = yield from self._judge(strength)
        self.history.append(metrics)
        around.progress.end_epoch(metrics)
        around.tracker.log(metrics)
        self.position = replace(
            self.position, epoch=self.position.epoch + 1, step=0, epoch_seconds=0.0, seconds=self._now() - self._started
        )  # fmt: skip
        self._losses.zero_()
        self._correct.zero_()
        self._checked = 0
        done = self.position.epoch
        code = around.processes.largest(around.stop.code) if done < self.config.epochs_trained else 0
        if code:
            self._stop(code)
        elif done % around.checkpoint_every == 0 or done == self.config.epochs_trained:
            self.save()

    def _remeasure_bn(self) -> None:
        """Judge with the statistics that training left, then measure anew: one run tells what that changes."""
        precision, processes = self.update.precision(), self.around.processes
        test = in_numbers(evaluated(self.model, self.test_batches, precision=precision), processes)
        self._as_trained = {"test_loss": test.loss, "test_accuracy": test.accuracy}
        images = self._for_statistics(augmented=self.config.remeasure_bn != "uncut")
        measure_statistics(self.model, images, precision, processes)

    def _judge(self, strength: float) -> Generator[None, None, EpochMetrics]:
        config, position, processes = self.config, self.position, self.around.processes
        sizes = [self.batches.size_of(step) for step in range(len(self.batches))]
        images = sum(sizes)
        precision = self.update.precision()
        with self.method.judged(self._for_statistics):
            is_last = position.epoch + 1 == config.epochs_trained  # what counts is judged by the network itself
            network = None if is_last else self._quick_network
            sums = evaluated(self.model, self.test_batches, precision=precision, network=network)
            yield
            self._check_losses(len(self.batches))
            losses, correct = self._summed_over_processes()
            test = in_numbers(sums, processes)
            if not self.history or test.accuracy > self.best.test_accuracy:
                self._best = checkpoint.weights_of(self.model)
            smoothed = None
            if config.log_smoothed_loss:
                on_training_images = self._training_images()
                smoothed = smoothed_loss(
                    config, self.model, on_training_images, strength, position.epoch, precision, processes
                )
        return EpochMetrics(
            epoch=position.epoch + 1,
            updates=position.updates,
            train_loss=sum(loss * size for loss, size in zip(losses, sizes)) / images,
            train_accuracy=correct / images,
            test_loss=test.loss,
            test_accuracy=test.accuracy,
            learning_rate=self._rate,
            strength=strength,
            evaluations=position.evaluations,
            smoothed_loss=smoothed,
            seconds=self._now() - self._epoch_started,
        )

    @property
    def best(self) -> EpochMetrics:
        return best_of(self.history)

    def _training_images(self, shuffle: bool = False, augmented: bool = False) -> Iterable[tuple[Tensor, Tensor]]:
        around = self.around
        return build.judging_batches(
            self.config,
            self.dataset,
            around.device,
            around.processes,
            split="train",
            workers=around.workers,
            shuffle=shuffle,
            augmented=augmented,
        )

    def _for_statistics(self, augmented: bool = True) -> Iterable[tuple[Tensor, Tensor]]:
        """Shuffled: in a folder of images a batch would be of one class, and its variances too small."""
        return self._training_images(shuffle=True, augmented=augmented)

    def _summed_over_processes(self) -> tuple[list[float], float]:
        sums = self.around.processes.sum(torch.cat([self._losses, self._correct[None]]).double())
        *losses, correct = sums.tolist()
        return losses, correct

    # ---- what may go wrong -------------------------------------------------------------------------------------------

    def _check_losses(self, steps: int) -> None:
        """Raise if a loss of this epoch's first `steps` steps is not finite."""
        losses = self.around.processes.sum(self._losses[self._checked : steps])
        finite = torch.isfinite(losses)
        if bool(finite.all()):
            self._checked = steps
            return
        bad = int((~finite).nonzero()[0])
        step = self._checked + bad
        before = f"{float(losses[bad - 1]):.6g}" if bad else self._loss_before(step)
        epoch, update = self.position.epoch, self.position.epoch * len(self.batches) + step + 1
        where = f"in step {step + 1} of epoch {epoch + 1} (update {update})"
        self._diverged(f"the loss is {float(losses[bad])} {where}; the last finite loss was {before}")

    def _loss_before(self, step: int) -> str:
        if step:
            return f"{float(self.around.processes.sum(self._losses[step - 1])):.6g}"
        return f"{self.history[-1].train_loss:.6g}, the mean of epoch {len(self.history)}" if self.history else "none"

    def _diverged(self, what: str) -> None:
        kept = f"The last good checkpoint, {self._saved}, is kept" if self._saved else "No checkpoint had been made yet"
        raise Diverged(f"{what}. {kept}. A smaller --lr or --strength, --clip or --lr-warmup may help.")

    def _stop(self, code: int) -> None:
        self._check_losses(self.position.step)
        self.save()
        raise Interrupted(code, self._saved)

    # ---- state -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint and the metrics. All processes must call it."""
        position, around = self.position, self.around
        private = around.processes.gather(checkpoint.private_state(self.model, around.device))
        model = checkpoint.weights_of(self.model)
        for name, value in model.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                self._diverged(f"{name} is not finite after update {position.updates}")
        state = {
            "config_hash": self.config.hash,
            "world_size": around.processes.world_size,
            "position": asdict(position),
            "model": model,
            "optimizer": checkpoint.optimizer_state(self.optimizer),
            "scaler": self.update.scaler.state_dict(),
            "method": self.method.state_dict(),
            "processes": private,
            "losses": around.processes.gather(self._losses.cpu()),
            "correct": around.processes.gather(self._correct.cpu()),
            "history": json.dumps([asdict(metrics) for metrics in self.history]),
            "best": self._best,
            "as_trained": self._as_trained,
        }
        around.folder.write_metrics(self.history)
        around.folder.write_checkpoint(checkpoint.to_bytes(state))
        self._saved = _in_words(position)

    def load(self, state: dict[str, Any]) -> None:
        """Continue where a checkpoint was made."""
        rank = self.around.processes.rank
        self.position = Position(**state["position"])
        self.model.load_state_dict(state["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate  # every step sets it, in this place
        self.update.scaler.load_state_dict(state["scaler"])
        self.method.load_state_dict(state["method"])
        self._losses.copy_(state["losses"][rank])
        self._correct.copy_(state["correct"][rank])
        self.history = [EpochMetrics.from_dict(metrics) for metrics in json.loads(state["history"])]
        self._best = state["best"]
        self._as_trained = state.get("as_trained")
        self._saved = _in_words(self.position)
        self._checked = self.position.step
        checkpoint.restore_private_state(state["processes"][rank], self.model, self.around.device)
        self.around.folder.write_metrics(self.history)

    def _finish(self, provenance: Provenance) -> Record:
        folder = self.around.folder
        with self.method.judged(self._for_statistics):
            folder.write_weights(LAST_WEIGHTS, checkpoint.weights_of(self.model), self.config.epochs_trained)
        folder.write_weights(BEST_WEIGHTS, self._best, self.best.epoch)
        record = Record(
            config=self.config,
            last=self.history[-1],
            best=self.best,
            parameters=sum(p.numel() for p in self.model.parameters()),
            train_images=len(self.dataset.train),
            test_images=len(self.dataset.test),
            test_origin=self.dataset.test_origin,
            ghost_batches=build.ghost_batches(self.config, self.around.processes.world_size),
            seconds=self.position.seconds,
            provenance=provenance,
            as_trained=self._as_trained,
        )
        folder.write_json(RESULT, record.to_dict())
        return record


def can_capture(around: Surroundings) -> bool:
    """Whether whole updates may be captured here."""
    return around.cuda_graphs and around.device.type == "cuda"


def _in_words(position: Position) -> str:
    if position.step:
        return f"in epoch {position.epoch + 1}, after step {position.step}"
    return f"after epoch {position.epoch}"
