"""Batches: every image once, the same ones whenever and wherever they are asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_files import write_image_folder

from smoothout.lab.data import Batches, CentreCrop, RandomCropFlip, ResizedCropFlip, Split
from smoothout.lab.data.folder import read_folder


def numbered(count, channels=1, side=4):
    """Image i is filled with the value i and has the label i."""
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, channels, side, side)
    return Split(images.contiguous(), torch.arange(count), mean=(0.5,) * channels, std=(0.25,) * channels)


def textured(count=40, side=16):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return Split(images, torch.arange(count), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def assert_same(one, other):
    one, other = list(one), list(other)
    assert len(one) == len(other)
    for (x, y), (x_other, y_other) in zip(one, other):
        assert torch.equal(x, x_other)
        assert torch.equal(y, y_other)


def test_every_image_once_with_its_label_and_a_short_last_batch():
    batches = Batches(numbered(10), 4, shuffle=True, seed=3)
    seen = list(batches)
    assert [len(y) for _, y in seen] == [4, 4, 2]
    assert [batches.size_of(step) for step in range(3)] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in seen]).tolist()) == list(range(10))
    for x, y in seen:
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        expected = (y / 255 - 0.5) / 0.25
        torch.testing.assert_close(x, expected[:, None, None, None].expand_as(x))


def test_without_shuffling_the_files_order():
    assert torch.cat([y for _, y in Batches(numbered(10), 3)]).tolist() == list(range(10))


def test_drop_last():
    batches = Batches(numbered(10), 4, drop_last=True)
    assert len(batches) == len(list(batches)) == 2


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return torch.cat([y for _, y in Batches(numbered(50), 7, shuffle=True, seed=seed).epoch(epoch)]).tolist()

    assert order(1, 5) == order(1, 5)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(
    "augment", ["none", "pad-crop-flip", RandomCropFlip(8, 10), ResizedCropFlip(8), CentreCrop(8, 10)]
)
def test_resumes_in_the_middle_of_an_epoch(augment):
    split = textured()
    uninterrupted = list(Batches(split, 12, shuffle=True, seed=1, augment=augment).epoch(4))
    assert_same(Batches(split, 12, shuffle=True, seed=1, augment=augment).epoch(4, start=2), uninterrupted[2:])


@settings(max_examples=40, deadline=None)
@given(
    images=st.integers(2, 60),
    batch_size=st.integers(2, 70),
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    augment=st.sampled_from(["none", "pad-crop-flip", ResizedCropFlip(8)]),
)
def test_the_ranks_parts_are_the_single_process_batch(images, batch_size, ranks, epoch, augment):
    split = textured(images)
    last = images % batch_size or min(batch_size, images)
    if min(last, batch_size) < ranks:
        with pytest.raises(ValueError, match="too few"):
            Batches(split, batch_size, world_size=ranks)
        return
    loaders = [
        Batches(split, batch_size, shuffle=True, augment=augment, rank=rank, world_size=ranks).epoch(epoch)
        for rank in range(ranks)
    ]
    joined = [tuple(torch.cat(part) for part in zip(*parts)) for parts in zip(*loaders, strict=True)]
    single = Batches(split, batch_size, shuffle=True, augment=augment).epoch(epoch)
    for (x, y), (x_single, y_single) in zip(joined, single, strict=True):
        torch.testing.assert_close(x, x_single)
        assert torch.equal(y, y_single)


def test_an_image_is_cut_alike_in_whatever_batch_it_falls():
    split = textured()

    def by_label(size):
        loader = Batches(split, size, shuffle=True, augment="pad-crop-flip").epoch(2)
        return {label: image for x, y in loader for image, label in zip(x, y.tolist())}

    small, large = by_label(3), by_label(40)
    assert all(torch.equal(small[label], large[label]) for label in range(40))


def test_augmentation_changes_with_the_epoch_and_the_seed():
    split = textured()
    crops = [
        torch.cat([x for x, _ in Batches(split, 40, seed=seed, augment="pad-crop-flip").epoch(epoch)])
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert not torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])


def test_the_global_random_stream_is_left_alone(tmp_path):
    write_image_folder(tmp_path, sizes=((40, 30), (30, 40)))
    files = read_folder(tmp_path, "mine", workers=0).train
    before = torch.get_rng_state()
    list(Batches(textured(), 8, shuffle=True, augment="pad-crop-flip"))
    list(Batches(files, 4, shuffle=True, augment=ResizedCropFlip(16), workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_channels_last():
    (x, _), *_ = Batches(textured(), 8, augment="pad-crop-flip", channels_last=True)
    assert x.is_contiguous(memory_format=torch.channels_last)
    (plain, _), *_ = Batches(textured(), 8, augment="pad-crop-flip")
    assert plain.is_contiguous()


def test_files_are_the_same_with_any_number_of_workers_ranks_and_from_any_step(tmp_path):
    write_image_folder(tmp_path, sizes=((40, 30), (30, 44), (50, 50)), per_class=5)
    split = read_folder(tmp_path, "mine", workers=0).train
    settings = {"shuffle": True, "seed": 2, "augment": ResizedCropFlip(16)}
    here = list(Batches(split, 4, workers=0, **settings).epoch(3))
    assert [x.shape for x, _ in here] == [(4, 3, 16, 16), (4, 3, 16, 16), (2, 3, 16, 16)]
    assert_same(Batches(split, 4, workers=2, **settings).epoch(3), here)
    assert_same(Batches(split, 4, workers=1, **settings).epoch(3, start=1), here[1:])
    assert list(Batches(split, 4, **settings).epoch(3, start=3)) == []
    ranks = [Batches(split, 4, workers=0, rank=rank, world_size=2, **settings).epoch(3) for rank in range(2)]
    assert_same(((torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(*ranks)), here)


def test_files_and_memory_give_the_same_images(tmp_path):
    write_image_folder(tmp_path, sizes=((40, 40),))
    in_memory = read_folder(tmp_path, "mine", workers=0).train
    write_image_folder(tmp_path / "again", sizes=((40, 40),))
    # One image of another size keeps the split on disk; the five before it are as they were.
    Image.new("RGB", (20, 30)).save(tmp_path / "again" / "train" / "n02" / "train_2.JPEG")
    on_disk = read_folder(tmp_path / "again", "mine", workers=0).train
    augment = ResizedCropFlip(24)
    (by_torch, _), *_ = Batches(in_memory, 5, augment=augment)
    (by_pillow, _), *_ = Batches(on_disk, 5, augment=augment, workers=0)
    assert (by_torch - by_pillow).abs().max() < 1.1 / (255 * 0.224)  # one grey level, normalised


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="batch_size=0"):
        Batches(numbered(4), 0)
    with pytest.raises(ValueError, match="leaves no batch of 4 images"):
        Batches(numbered(4), 5, drop_last=True)
    with pytest.raises(ValueError, match="rank=2 of world_size=2"):
        Batches(numbered(4), 2, rank=2, world_size=2)
    write_image_folder(tmp_path, sizes=((40, 30), (30, 40)))
    with pytest.raises(ValueError, match="images of several sizes"):
        Batches(read_folder(tmp_path, "mine", workers=0).train, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "augment", ["none", "pad-crop-flip", ResizedCropFlip(8), RandomCropFlip(8, 10), CentreCrop(8, 10)]
)
def test_no_batch_waits_for_the_device(augment):
    split = textured(400)
    batches = Batches(split, 64, device="cuda", shuffle=True, augment=augment)
    iterator = batches.epoch(1)
    on_device = [next(iterator)]  # the epoch's order goes to the device with the first batch
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_device += list(iterator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (x, y), (x_cpu, y_cpu) in zip(on_device, Batches(split, 64, shuffle=True, augment=augment).epoch(1)):
        torch.testing.assert_close(x.cpu(), x_cpu, rtol=0, atol=0.02)
        assert torch.equal(y.cpu(), y_cpu)
