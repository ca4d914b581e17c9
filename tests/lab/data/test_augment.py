"""Augmentation against slow obvious twins: a loop over images for CIFAR's, Pillow for the boxes."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from smoothout.lab.data import CentreCrop, PadCropFlip, RandomCropFlip, ResizedCropFlip
from smoothout.lab.data.augment import augmentation, resample
from smoothout.lab.data.folder import CutAndResize


def photo_like(count, height, width, seed=0):
    """Smooth in places and sharp in others, as photos are."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator) * 255
    image = F.interpolate(coarse, (height, width), mode="bicubic") + 40 * torch.randn(
        count, 3, height, width, generator=generator
    )
    return image.round().clamp(0, 255).to(torch.uint8)


def uniforms(count, draws, seed=0):
    return torch.rand(count, draws, generator=torch.Generator().manual_seed(seed))


def test_pad_crop_flip_equals_a_loop():
    images, numbers = photo_like(64, 32, 32), uniforms(64, 3)
    result = PadCropFlip().apply(images, numbers)
    for image, (a, b, c), cropped in zip(images, numbers.tolist(), result):
        padded = torch.full((3, 40, 40), 127, dtype=torch.uint8)
        padded[:, 4:36, 4:36] = image
        top, left = int(a * 9), int(b * 9)
        expected = padded[:, top : top + 32, left : left + 32]
        assert torch.equal(cropped, expected.flip(2) if c < 0.5 else expected)
    assert result.dtype == torch.uint8


def test_pad_crop_flip_reaches_every_place():
    corners = torch.tensor([[0.0, 0.0, 0.9], [0.9999999, 0.9999999, 0.9]])
    marked = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    first, last = PadCropFlip().apply(marked, corners)
    assert (first[0, :4] == 127).all()
    assert (first[0, 4:, 4:] == 0).all()
    assert (last[0, -4:] == 127).all()
    assert (last[0, :4, :4] == 0).all()


@pytest.mark.parametrize(
    "augment",
    [RandomCropFlip(size=24, short_side=28), ResizedCropFlip(size=24), CentreCrop(size=24, short_side=28)],
    ids=lambda augment: type(augment).__name__,
)
@pytest.mark.parametrize("shape", [(20, 20), (64, 48), (33, 90), (200, 200)], ids=str)
def test_batched_on_the_device_equals_pillow_image_by_image(augment, shape):
    images, numbers = photo_like(16, *shape), uniforms(16, augment.draws)
    batched = augment.apply(images, numbers)
    assert batched.shape == (16, 3, 24, 24)
    one_by_one = CutAndResize(augment, numbers)
    for row, image in enumerate(images):
        by_pillow = one_by_one(Image.fromarray(image.permute(1, 2, 0).numpy()), row)
        # Pillow rounds after each of its two passes: at most one grey level apart.
        assert (batched[row] - by_pillow).abs().max() < 1.1


def test_images_of_256_are_cut_to_224_as_they_are():
    """The paper's sizes, by the names that configurations use."""
    image = photo_like(1, 256, 256)
    (middle,) = augmentation("centre-crop").apply(image, uniforms(1, 0))
    torch.testing.assert_close(middle, image[0, :, 16:240, 16:240].float())
    for numbers, top, left in (([0.0, 0.9999, 0.9], 0, 32), ([0.9999, 0.5, 0.9], 32, 16)):
        (cut,) = augmentation("random-crop").apply(image, torch.tensor([numbers]))
        torch.testing.assert_close(cut, image[0, :, top : top + 224, left : left + 224].float())
    assert augmentation("resized-crop").apply(image, uniforms(1, 23)).shape == (1, 3, 224, 224)


def test_resizing_then_cutting_is_the_box():
    """RandomCrop is defined as two steps; the box does both at once."""
    image = photo_like(1, 60, 80)
    augment = RandomCropFlip(size=24, short_side=30)
    resized = Image.fromarray(image[0].permute(1, 2, 0).numpy()).resize((40, 30), Image.Resampling.BILINEAR)
    numbers = torch.tensor([[0.5, 0.25, 0.9]])
    top, left = int(0.5 * 7), int(0.25 * 17)
    expected = torch.from_numpy(np.array(resized.crop((left, top, left + 24, top + 24)))).permute(2, 0, 1)
    assert (augment.apply(image, numbers)[0] - expected).abs().max() < 1.1


def test_resampling_keeps_a_constant_and_a_whole_image():
    flat = torch.full((2, 3, 17, 23), 100, dtype=torch.uint8)
    boxes = torch.tensor([[2.5, 3.0, 20.0, 11.0], [0.0, 0.0, 23.0, 17.0]])
    torch.testing.assert_close(resample(flat, boxes, torch.tensor([True, False]), 9), torch.full((2, 3, 9, 9), 100.0))
    image = photo_like(1, 12, 12)
    whole = torch.tensor([[0.0, 0.0, 12.0, 12.0]])
    torch.testing.assert_close(resample(image, whole, torch.tensor([False]), 12), image.float())
    torch.testing.assert_close(resample(image, whole, torch.tensor([True]), 12), image.float().flip(3))


@pytest.mark.parametrize("shape", [(128, 128), (375, 500), (600, 100), (40, 700)], ids=str)
def test_resized_crop_boxes_follow_their_law(shape):
    height, width = shape
    count = 4000
    augment = ResizedCropFlip()
    heights, widths = torch.full((count,), float(height)), torch.full((count,), float(width))
    boxes, mirrored = augment.boxes(heights, widths, uniforms(count, augment.draws))
    left, top, right, bottom = boxes.unbind(1)
    w, h = right - left, bottom - top
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= width).all()
    assert (bottom <= height).all()
    assert torch.equal(boxes, boxes.round())
    # Rounding w and h to whole pixels moves the ratio by up to a pixel's share.
    slack = 1 + 1 / w + 1 / h
    assert (w / h <= 4 / 3 * slack).all()
    assert (h / w <= 4 / 3 * slack).all()
    assert (w * h * slack**2 >= 0.08 * height * width * 0.99).all() or max(shape) / min(shape) > 4
    assert abs(mirrored.float().mean() - 0.5) < 5 * 0.5 / count**0.5
    if height == width:
        # Of the whole range [0.08, 1] the largest boxes are refused more often, so the mean is a little below 0.54.
        assert 0.40 < (w * h).mean() / (height * width) < 0.54


def test_resized_crop_falls_back_to_the_middle():
    augment = ResizedCropFlip()
    never = torch.full((1, augment.draws), 0.999)  # the whole area at 4:3 does not fit in a square
    boxes, _ = augment.boxes(torch.tensor([100.0]), torch.tensor([100.0]), never)
    assert boxes.tolist() == [[0, 0, 100, 100]]
    boxes, _ = augment.boxes(torch.tensor([30.0]), torch.tensor([90.0]), never)
    assert boxes.tolist() == [[25, 0, 65, 30]]
    boxes, _ = augment.boxes(torch.tensor([90.0]), torch.tensor([30.0]), never)
    assert boxes.tolist() == [[0, 25, 30, 65]]


def test_names():
    assert augmentation("pad-crop-flip") == PadCropFlip()
    assert augmentation(CentreCrop(size=8)) == CentreCrop(size=8)
    with pytest.raises(ValueError, match=r"'mixup'.*pad-crop-flip"):
        augmentation("mixup")
