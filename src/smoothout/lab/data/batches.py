"""Batches of a split on the training device: their order and augmentation are pure functions of (seed, epoch)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from smoothout.lab.data.augment import Augmentation, BoxAugmentation, augmentation
from smoothout.lab.data.dataset import AnySplit, FolderSplit, Split, generator_for
from smoothout.lab.data.folder import CutAndResize, decoded

Batch = tuple[Tensor, Tensor]


class Batches:
    """Normalised images (float32) and labels (int64), batch by batch, on `device`.

    A split in memory lives on the device as bytes; the order and the augmentation's numbers of an epoch are drawn on
    the CPU and moved there once, so no batch waits for the host and the CPU and CUDA see the same images. A split of
    files is decoded in worker processes. Iterating gives epoch 0; `epoch(e, start)` any other, from any step.

    Args:
        split: of a dataset; `Dataset.to(device)` first lets several loaders share one copy.
        batch_size: of all ranks together. The last batch is short where it does not divide the split.
        shuffle: a new order each epoch; False keeps the files' order.
        seed: of the order and of the augmentation, in streams of their own.
        augment: a name (`none`, `pad-crop-flip`, `random-crop`, `resized-crop`, `centre-crop`) or an Augmentation. Its
            numbers belong to (seed, epoch, image), so an image is cut alike on whichever rank or step it falls.
        rank, world_size: rank r takes the r-th contiguous part of every batch: the parts in rank order are the batch
            of a single process, and a ghost batch of a rank's size is a rank's part.
        drop_last: leave a short last batch out.
        channels_last: the memory format of the images.
        workers: processes that decode a split of files; None: one a core, up to eight.
    """

    def __init__(
        self,
        split: AnySplit,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        shuffle: bool = False,
        seed: int = 0,
        augment: str | Augmentation = "none",
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        channels_last: bool = False,
        workers: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 is needed")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} of world_size={world_size}: 0 <= rank < world_size is needed")
        self.device = torch.device(device)
        self.split = split.to(self.device)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.augment = augmentation(augment)
        self.rank, self.world_size = rank, world_size
        self.channels_last = channels_last
        self.workers = workers
        self.drop_last = drop_last
        self._check_sizes()
        if isinstance(split, FolderSplit) and not isinstance(self.augment, BoxAugmentation):
            raise ValueError(
                f"augment={augment!r}: images of several sizes need one that cuts them, as centre-crop does"
            )
        mean = torch.tensor(split.mean, device=self.device)[:, None, None]
        std = torch.tensor(split.std, device=self.device)[:, None, None]
        # (x/255 − mean)/std as one multiplication and one addition.
        self._scale, self._shift = 1 / (255 * std), -mean / std

    def __len__(self) -> int:
        """Batches in an epoch, the same on every rank."""
        whole, rest = divmod(len(self.split), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def size_of(self, step: int) -> int:
        """Images of all ranks in batch `step`: weighs a mean over a rank's part where the last batch is short."""
        return min(self.batch_size, len(self.split) - step * self.batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start`, equal to those an epoch iterated from its beginning gives then."""
        order, uniforms = self.numbers(epoch)
        if isinstance(self.split, FolderSplit):
            return self._from_files(self.split, order, uniforms, start)
        return self._from_memory(order, uniforms, start)

    def numbers(self, epoch: int) -> tuple[Tensor, Tensor]:
        """What an epoch draws, on the CPU: the order of the images, and by image the augmentation's numbers."""
        uniforms = torch.rand(
            len(self.split), self.augment.draws, generator=generator_for("augmentation", self.seed, epoch)
        )
        return self._order(epoch), uniforms

    def gathered(self, rows: Tensor, uniforms: Tensor) -> Batch:
        """The batch of these images of a split in memory, by operations on its device alone.

        Args:
            uniforms: of the epoch, for all images.
        """
        assert isinstance(self.split, Split)
        images = self.augment.apply(self.split.images.index_select(0, rows), uniforms.index_select(0, rows))
        return self._finished(images), self.split.labels.index_select(0, rows)

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.split))
        return torch.randperm(len(self.split), generator=generator_for("order", self.seed, epoch))

    def _part(self, step: int) -> slice:
        """This rank's part of batch `step` within the epoch's order."""
        first, size = step * self.batch_size, self.size_of(step)
        return slice(
            first + size * self.rank // self.world_size,
            first + size * (self.rank + 1) // self.world_size,
        )

    def _from_memory(self, order: Tensor, uniforms: Tensor, start: int) -> Iterator[Batch]:
        order, uniforms = order.to(self.device), uniforms.to(self.device)
        for step in range(start, len(self)):
            yield self.gathered(order[self._part(step)], uniforms)

    def _from_files(self, split: FolderSplit, order: Tensor, uniforms: Tensor, start: int) -> Iterator[Batch]:
        assert isinstance(self.augment, BoxAugmentation)  # as the constructor saw to
        parts = [order[self._part(step)] for step in range(start, len(self))]
        use = CutAndResize(self.augment, uniforms)
        images = decoded(split, parts, use, self.workers, pin_memory=self.device.type == "cuda")
        for rows, batch in zip(parts, images):
            labels = split.labels[rows].to(self.device, non_blocking=True)
            yield self._finished(batch.to(self.device, non_blocking=True)), labels

    def _finished(self, images: Tensor) -> Tensor:
        x = images.to(torch.float32) * self._scale + self._shift
        return x.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)

    def _check_sizes(self) -> None:
        if len(self) == 0:
            raise ValueError(
                f"batch_size={self.batch_size} with drop_last leaves no batch of {len(self.split)} images; "
                f"at most {len(self.split)} is possible"
            )
        smallest = self.size_of(len(self) - 1)
        if smallest < self.world_size:
            raise ValueError(
                f"batch_size={self.batch_size}: the last batch of {len(self.split)} images has {smallest}, too few for "
                f"{self.world_size} ranks; choose another batch size or drop_last=True"
            )
