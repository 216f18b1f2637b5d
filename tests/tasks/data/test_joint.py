"""Images and masks move together, masks hold no invented classes, and all draws are torch's."""

from __future__ import annotations

import pytest
import torch

from lineattn.tasks.data.joint import joint
from lineattn.tasks.data.legend import IGNORE
from lineattn.tasks.seeding import seeded

KINDS = {
    "flips": {"flips": ["horizontal", "vertical"]},
    "rotate": {"rotate": 180.0},
    "scale": {"size": 24, "scale": (0.5, 2.0)},
    "jitter": {"jitter": 0.4},
    "square": {"size": 24},
    "all": {"size": 24, "scale": (0.5, 2.0), "flips": ["horizontal", "vertical"], "rotate": 30.0, "jitter": 0.4},
}


@pytest.fixture
def pair():
    """Blocks of one class each, in an image whose value is 40 times the class."""
    mask = torch.randint(0, 5, (5, 7)).repeat_interleave(8, 0).repeat_interleave(8, 1).to(torch.uint8)
    return (mask * 40).expand(3, -1, -1).contiguous(), mask


@pytest.mark.parametrize("kind", KINDS)
def test_masks_stay_whole_numbers_of_classes_or_ignored(pair, kind):
    transform = joint(**KINDS[kind])
    for seed in range(8):
        with seeded(seed):
            image, mask = transform(*pair)
        assert image.dtype == mask.dtype == torch.uint8 and image.shape == (3, *mask.shape)
        assert mask.shape == ((24, 24) if "size" in KINDS[kind] else (40, 56))
        assert type(image) is type(mask) is torch.Tensor
        assert set(mask.unique().tolist()) <= {0, 1, 2, 3, 4, IGNORE}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("jitter", "all")])
def test_image_and_mask_move_together(pair, kind):
    transform = joint(**KINDS[kind])
    for seed in range(8):
        with seeded(seed):
            image, mask = transform(*pair)
        inside = mask != IGNORE
        # Between two blocks the image is interpolated; elsewhere it shows the class.
        agree = (image[0].float() / 40 - mask).abs()[inside] < 0.3
        assert agree.float().mean() > 0.75


def test_nothing_is_done_where_nothing_is_asked_for(pair):
    image, mask = joint()(*pair)
    assert image is pair[0] and mask is pair[1]


@pytest.mark.parametrize("kind", ["flips", "rotate", "scale", "jitter", "all"])
def test_draws_follow_torchs_generator_alone(pair, kind):
    transform = joint(**KINDS[kind])

    def results():
        found = []
        for seed in range(6):
            with seeded(seed):
                found.append(transform(*pair))
        return found

    first, second = results(), results()
    assert all(torch.equal(a, b) and torch.equal(m, n) for (a, m), (b, n) in zip(first, second, strict=True))
    assert len({image.numpy().tobytes() for image, _ in first}) > 1  # each sample by its own draw


def test_flips_and_turns_leave_half_of_the_samples():
    mask = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
    for kwargs in ({"flips": ["horizontal"]}, {"flips": ["vertical"]}, {"rotate": 90.0}):
        transform, same = joint(**kwargs), 0
        for seed in range(200):
            with seeded(seed):
                same += torch.equal(transform(mask[None], mask)[1], mask)
        assert 70 < same < 130


def test_pixels_that_were_not_there_are_ignored_or_what_is_asked_for():
    image, mask = torch.full((3, 20, 20), 200, dtype=torch.uint8), torch.ones(20, 20, dtype=torch.uint8)
    for kwargs in ({"size": 40, "scale": (0.5, 0.5)}, {"rotate": 180.0}):
        for outside in (IGNORE, 0):
            with seeded(3):
                pixels, found = joint(colour=(0.2, 0.4, 0.6), outside=outside, **kwargs)(image, mask)
            new = found == outside
            assert 0 < new.float().mean() < 1 and set(found.unique().tolist()) == {1, outside}
            assert (pixels[:, new].float().median(dim=1).values - torch.tensor([51.0, 102.0, 153.0])).abs().max() <= 1


def test_one_colour_serves_all_channels():
    for channels in (1, 3):
        image, mask = torch.ones(channels, 9, 9, dtype=torch.uint8), torch.ones(9, 9, dtype=torch.uint8)
        for seed in range(4):
            with seeded(seed):
                assert joint(size=20, scale=(0.5, 1.0), rotate=45, jitter=0.2)(image, mask)[0].shape[0] == channels


@pytest.mark.parametrize("size", [16, 24, 100])
def test_resizing_shifts_a_mask_by_nothing(size):
    mask = (torch.arange(64) // 16 % 2).expand(64, 64).to(torch.uint8)
    found = joint(size=size)(mask[None], mask)[1]
    assert torch.equal(found.flip(1), 1 - found)


@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (333, 5)])
def test_odd_sizes_pass(shape):
    image, mask = torch.zeros(3, *shape, dtype=torch.uint8), torch.zeros(*shape, dtype=torch.uint8)
    for kwargs in KINDS.values():
        with seeded(1):
            pixels, found = joint(**kwargs)(image, mask)
        assert pixels.shape[1:] == found.shape
