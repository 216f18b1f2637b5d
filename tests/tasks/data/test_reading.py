"""Images of any kind come out with the network's channels; what is no image is one line with its path."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from lineattn.errors import InputError
from lineattn.tasks.data.reading import read_image

GREY = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_modes_become_channels(tmp_path, mode, channels):
    image = Image.fromarray(GREY.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(GREY).convert(mode)
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    image.save(path)
    pixels = read_image(path, channels)
    assert pixels.shape == (channels, 6, 8)
    if mode != "1":
        assert abs(pixels.float().mean() - GREY.mean()) < 2


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / "x.png")
    assert np.array_equal(read_image(tmp_path / "x.png", 1)[0].numpy(), GREY)


def test_a_dark_image_of_sixteen_bits_is_dark(tmp_path):
    Image.fromarray(GREY.astype(np.uint16)).save(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png", 1).max() == 0


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_an_image_stands_as_the_camera_was_held(tmp_path, suffix):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    Image.fromarray(GREY).save(tmp_path / f"x.{suffix}", exif=exif)
    assert np.allclose(read_image(tmp_path / f"x.{suffix}", 1)[0].numpy(), np.rot90(GREY, -1), atol=10)  # lossy


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path):
    image = Image.fromarray(GREY).convert("P")
    image.save(tmp_path / "x.png", transparency=bytes(range(256)))
    assert read_image(tmp_path / "x.png", 3).shape == (3, 6, 8)


@pytest.mark.parametrize("kind", ["text", "truncated", "empty", "missing"])
def test_what_cannot_be_read_is_one_line_with_its_path(tmp_path, kind):
    path = tmp_path / "photo.jpg"
    if kind != "missing":
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
        whole = path.read_bytes()
        path.write_bytes({"text": b"hello", "truncated": whole[: len(whole) // 2], "empty": b""}[kind])
    with pytest.raises(InputError) as caught:
        read_image(path, 3)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
