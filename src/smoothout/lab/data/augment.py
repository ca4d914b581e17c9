"""Augmentation of a batch as torch operations on its device, driven by uniform numbers that the caller draws.

An augmentation is a pure function of the image and of `draws` numbers in [0, 1): who draws them by image, not by
place in a batch, gives an image the same crop whichever process handles it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F


class Augmentation(Protocol):
    """What a loader asks of an augmentation: how many numbers an image takes, and the images they make."""

    draws: ClassVar[int]

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """N×C×H×W bytes and N×draws numbers → N×C×H'×W' of values 0 … 255, bytes or floats."""
        ...


@runtime_checkable
class BoxAugmentation(Augmentation, Protocol):
    """One that cuts a box of each image and resizes it: it can be done image by image where sizes differ."""

    @property
    def size(self) -> int: ...

    def boxes(self, heights: Tensor, widths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Per image (left, top, right, bottom) in its own pixels, N×4, and whether it is mirrored, N."""
        ...


@dataclass(frozen=True)
class NoAugmentation:
    """The images as they are."""

    draws: ClassVar[int] = 0

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return images


@dataclass(frozen=True)
class PadCropFlip:
    """CIFAR's: pad by 4 pixels of value 127, cut the old size at random, mirror half of the images."""

    padding: int = 4
    value: int = 127
    draws: ClassVar[int] = 3

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        padded = F.pad(images, [self.padding] * 4, value=self.value)
        top, left = _whole(uniforms[:, :2], 2 * self.padding + 1).unbind(1)
        across = torch.arange(width, device=images.device)
        mirrored = (uniforms[:, 2] < 0.5)[:, None]
        columns = left[:, None] + torch.where(mirrored, across.flip(0), across)
        rows = top[:, None] + torch.arange(height, device=images.device)
        image = torch.arange(len(images), device=images.device)[:, None, None]
        # Index tensors around a slice put their dimensions first: the result is N×H×W×C.
        return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class _CutAndResize:
    """What the box augmentations share: their boxes, resampled in one go."""

    size: int = 224

    def apply(self, images: Tensor, uniforms: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        heights = torch.full((len(images),), float(height), device=images.device)
        widths = torch.full((len(images),), float(width), device=images.device)
        return resample(images, *self.boxes(heights, widths, uniforms), self.size)

    def boxes(self, heights: Tensor, widths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class RandomCropFlip(_CutAndResize):
    """Resize so that the short side is 256, cut 224 × 224 at random, mirror half of the images (AlexNet's)."""

    short_side: int = 256
    draws: ClassVar[int] = 3

    def boxes(self, heights: Tensor, widths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tall, wide = _resized(heights, widths, self.short_side)
        top = _whole(uniforms[:, 0], tall - self.size + 1)
        left = _whole(uniforms[:, 1], wide - self.size + 1)
        return _box_before_resizing(left, top, self.size, (tall, wide), (heights, widths)), uniforms[:, 2] < 0.5


@dataclass(frozen=True)
class CentreCrop(_CutAndResize):
    """Resize so that the short side is 256, cut 224 × 224 in the middle (for testing)."""

    short_side: int = 256
    draws: ClassVar[int] = 0

    def boxes(self, heights: Tensor, widths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tall, wide = _resized(heights, widths, self.short_side)
        top, left = torch.round((tall - self.size) / 2), torch.round((wide - self.size) / 2)
        box = _box_before_resizing(left, top, self.size, (tall, wide), (heights, widths))
        return box, torch.zeros_like(heights, dtype=torch.bool)


@dataclass(frozen=True)
class ResizedCropFlip(_CutAndResize):
    """Cut a box of 8 to 100 % of the area and a ratio of 3:4 to 4:3, resize to 224 × 224, mirror half (ResNet18's).

    Up to ten boxes are tried; where none fits, the middle of the image at the nearest ratio allowed is taken.
    """

    smallest_area: float = 0.08
    widest: float = 4 / 3
    tries: ClassVar[int] = 10
    draws: ClassVar[int] = 2 * tries + 3

    def boxes(self, heights: Tensor, widths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        high, wide = heights[:, None], widths[:, None]
        share, tilt = uniforms[:, : self.tries], uniforms[:, self.tries : 2 * self.tries]
        area = (self.smallest_area + (1 - self.smallest_area) * share) * high * wide
        ratio = torch.exp((2 * tilt - 1) * math.log(self.widest))
        w, h = torch.round((area * ratio).sqrt()), torch.round((area / ratio).sqrt())
        fits = (w >= 1) & (w <= wide) & (h >= 1) & (h <= high)
        # The first try that fits has the highest score; no branch, so nothing waits for the device.
        score = fits * torch.arange(self.tries, 0, -1, device=heights.device)
        first = score.argmax(1, keepdim=True)
        found = fits.any(1)
        w = torch.where(found, w.gather(1, first)[:, 0], torch.minimum(widths, torch.round(heights * self.widest)))
        h = torch.where(found, h.gather(1, first)[:, 0], torch.minimum(heights, torch.round(widths * self.widest)))
        left = torch.where(found, _whole(uniforms[:, -3], widths - w + 1), torch.floor((widths - w) / 2))
        top = torch.where(found, _whole(uniforms[:, -2], heights - h + 1), torch.floor((heights - h) / 2))
        return torch.stack([left, top, left + w, top + h], 1), uniforms[:, -1] < 0.5


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": NoAugmentation(),
    "pad-crop-flip": PadCropFlip(),
    "random-crop": RandomCropFlip(),
    "resized-crop": ResizedCropFlip(),
    "centre-crop": CentreCrop(),
}


def augmentation(name: str | Augmentation) -> Augmentation:
    """The augmentation of that name; one that is given as such comes back."""
    if not isinstance(name, str):
        return name
    if name not in AUGMENTATIONS:
        raise ValueError(f"augment={name!r}: choose one of {', '.join(AUGMENTATIONS)}")
    return AUGMENTATIONS[name]


def resample(images: Tensor, boxes: Tensor, mirrored: Tensor, size: int) -> Tensor:
    """Resize a box of each image to size × size with the antialiased triangle filter, as Pillow's BILINEAR does.

    The filter is separable: out = V · image · Hᵀ, where row j of V holds the weights of the source rows in output
    row j. Each image has its own V and H, so boxes of any scale go through two batched matrix products.
    """
    height, width = images.shape[-2:]
    left, top, right, bottom = boxes.unbind(1)
    vertical = _filter_weights(top, bottom, height, size)
    horizontal = _filter_weights(left, right, width, size)
    horizontal = torch.where(mirrored[:, None, None], horizontal.flip(1), horizontal)
    return vertical[:, None] @ images.to(vertical.dtype) @ horizontal.transpose(1, 2)[:, None]


def _filter_weights(low: Tensor, high: Tensor, length: int, size: int) -> Tensor:
    """Triangle-filter weights, N × size × length, of `length` source pixels in `size` samples of [low, high]."""
    scale = ((high - low) / size)[:, None, None]
    sample = torch.arange(size, device=low.device)[None, :, None] + 0.5
    pixel = torch.arange(length, device=low.device)[None, None, :] + 0.5
    distance = (pixel - (low[:, None, None] + sample * scale)).abs() / scale.clamp(min=1)
    weights = (1 - distance).clamp(min=0)
    return weights / weights.sum(2, keepdim=True)


def _resized(heights: Tensor, widths: Tensor, short_side: int) -> tuple[Tensor, Tensor]:
    """Whole heights and widths with the short side as asked and the long one rounded down."""
    short = torch.minimum(heights, widths)
    # Multiplying first keeps the short side exact in floating point.
    return torch.floor(heights * short_side / short), torch.floor(widths * short_side / short)


def _box_before_resizing(
    left: Tensor, top: Tensor, size: int, resized: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]
):
    """The box of the original image that resizing turns into size × size at (left, top)."""
    down, across = old[0] / resized[0], old[1] / resized[1]
    return torch.stack([left * across, top * down, (left + size) * across, (top + size) * down], 1)


def _whole(uniforms: Tensor, count: Tensor | int) -> Tensor:
    """A whole number of 0 … count − 1 from a uniform one; the clamp is for u·count that rounds up to count."""
    scaled = torch.floor(uniforms * count)
    if isinstance(count, int):
        return scaled.clamp(max=count - 1).long()
    return torch.minimum(scaled, count - 1)
