"""The data module: batches that depend on seed, epoch and index alone, and unreadable images in workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from lineattn.errors import InputError
from lineattn.tasks.data.dataset import Unreadable
from lineattn.tasks.data.images import ImageData
from lineattn.tasks.data.source import Pixels


@pytest.fixture
def root(tmp_path):
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(6):
                shape = (20 + number, 30) if number % 2 else (24, 18, 3)
                pixels = generator.integers(0, 255, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.jpg")
    return tmp_path


def module(root, **kwargs):
    return ImageData(root=str(root), image_size=16, batch_size=4, **{"num_workers": 0, **kwargs})


@pytest.mark.parametrize("augment", ["none", "pad_crop", "resized_crop"])
def test_batches_have_the_networks_shape(root, augment):
    data = module(root, augment=augment, rand_augment=True, erasing=0.5)
    batches = list(data.train_dataloader())
    assert [batch.inputs.shape for batch in batches] == [(4, 3, 16, 16)] * 3
    assert sorted(index for batch in batches for index in batch.index.tolist()) == list(range(12))


@pytest.mark.medium
def test_workers_and_earlier_draws_change_nothing(root):
    kwargs = {"augment": "resized_crop", "rand_augment": True, "erasing": 0.5, "seed": 5}
    alone = list(module(root, **kwargs).train_dataloader())
    torch.rand(7)
    shared = list(module(root, **kwargs, num_workers=2).train_dataloader())
    for mine, yours in zip(alone, shared, strict=True):
        assert torch.equal(mine.inputs, yours.inputs) and torch.equal(mine.targets, yours.targets)
    other = list(module(root, **{**kwargs, "seed": 6}).train_dataloader())
    assert not torch.equal(alone[0].inputs, other[0].inputs)


def test_reading_leaves_the_global_generator_alone(root):
    before = torch.get_rng_state()
    list(module(root, augment="resized_crop").train_dataloader())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.medium)])
@pytest.mark.parametrize("damage", ["text", "truncated"])
def test_an_unreadable_image_stops_with_its_path_or_is_skipped_by_policy(root, damage, workers):
    broken = root / "test" / "dog" / "3.jpg"
    broken.write_bytes(b"hello" if damage == "text" else broken.read_bytes()[:200])

    def read(policy):
        data, unreadable = module(root, on_error=policy, num_workers=workers), Unreadable()
        return [unreadable.admit(batch) for batch in data.test_dataloader()], unreadable

    with pytest.raises(InputError, match=str(broken)) as caught:
        read("stop")
    assert "\n" not in str(caught.value)
    batches, unreadable = read("skip")
    assert sum(len(batch.inputs) for batch in batches) == 11
    assert [str(broken) in message for message in unreadable.messages] == [True]


def test_grey_images_go_into_three_channels_and_colour_into_one(root):
    for channels in (1, 3):
        data = module(root, channels=channels)
        assert next(iter(data.test_dataloader())).inputs.shape[1] == channels
        assert len(data.mean) == channels


def test_images_in_memory_meet_the_augmentation_too(monkeypatch):
    data = ImageData(name="digits", augment="pad_crop", batch_size=32)
    plain = ImageData(name="digits", batch_size=32)
    first, other = (next(iter(one.train_dataloader())) for one in (data, plain))
    assert first.index.tolist() == other.index.tolist()
    assert first.inputs.shape == other.inputs.shape == (32, 1, 16, 16)
    assert not torch.equal(first.inputs, other.inputs)


def test_the_digits_split_is_fixed_and_stratified():
    splits = [ImageData(name="digits", seed=seed).splits for seed in (0, 1)]
    for part in ("train", "val", "test"):
        mine, yours = (getattr(one, part) for one in splits)
        assert isinstance(mine, Pixels) and torch.equal(mine.images, yours.images)
        counts = torch.bincount(torch.tensor(mine.labels))
        assert counts.max() - counts.min() <= 0.06 * len(mine)
    assert sum(len(getattr(splits[0], part)) for part in ("train", "val", "test")) == 1797


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"name": "cifar11"}, "cifar10"),
        ({"channels": 4}, "1 or 3"),
        ({"mean": [0.1, 0.2]}, "2 values for 3 channels"),
        ({"val_fraction": 0.001}, "leaves a split empty"),
        ({"root": None, "name": "folder"}, "--data.root is missing"),
    ],
)
def test_wrong_settings_are_named(root, kwargs, says):
    with pytest.raises(InputError, match=says):
        _ = ImageData(**{"root": str(root), **kwargs}).splits
