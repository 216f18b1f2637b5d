"""Masks of every kind become class numbers; what fits no class, no image or no size is one line with its path."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lineattn.errors import InputError
from lineattn.tasks.data.legend import BINARY, IGNORE, Legend, read_legend
from lineattn.tasks.data.masks import MaskRule, find_rule, nearest_rule, read_mask
from lineattn.tasks.data.pairs import Pairs, PixelPairs, match
from lineattn.tasks.data.reading import UnreadableImage

THREE = Legend(("sky", "road", "car"), ((0, 0, 0), (255, 0, 0), (0, 0, 255)))
CLASSES = np.array([[0, 1, 2], [2, 2, 255]], dtype=np.uint8)


def save(path, values, mode=None, **kwargs):
    image = Image.fromarray(np.asarray(values))
    if mode == "P":
        image.putpalette([channel for index in range(256) for channel in (index, 255 - index, 7)])
    elif mode:
        image = image.convert(mode)
    image.save(path, **kwargs)
    return path


def classes(path, rule):
    return rule.classes(read_mask(path), path)


def packed(path, rows, bits):
    """A grey PNG of 2 or 4 bits, which Pillow reads but does not write."""
    place = 8 // bits
    lines = b"".join(
        b"\0"
        + bytes(
            sum(v << bits * (place - 1 - i) for i, v in enumerate(row[at : at + place]))
            for at in range(0, len(row), place)
        )
        for row in rows
    )
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), bits, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
        )
    )
    return path


@pytest.mark.parametrize("mode", ["L", "P", "LA", "RGB", "RGBA", "I", "I;16"])
def test_numbers_stand_for_classes_in_every_mode(tmp_path, mode):
    values = CLASSES.astype({"I;16": np.uint16, "I": np.int32}.get(mode, np.uint8))
    path = save(tmp_path / ("a.tif" if mode == "I" else "a.png"), values, mode if mode not in ("I", "I;16") else None)
    assert np.array_equal(classes(path, MaskRule("index", THREE)), CLASSES)


@pytest.mark.parametrize("bits", [2, 4])
def test_numbers_of_few_bits_are_not_stretched(tmp_path, bits):
    path = packed(tmp_path / "a.png", [[0, 1, 2, 1], [2, 2, 0, 1]], bits)
    assert classes(path, MaskRule("index", THREE)).tolist() == [[0, 1, 2, 1], [2, 2, 0, 1]]


def test_sixteen_bits_are_not_scaled_and_all_of_them_set_are_ignored(tmp_path):
    rule = MaskRule("index", THREE)
    assert classes(save(tmp_path / "a.png", np.array([[2, 65535]], dtype=np.uint16)), rule).tolist() == [[2, IGNORE]]
    with pytest.raises(InputError, match="the value 300"):
        classes(save(tmp_path / "b.png", np.array([[2, 300]], dtype=np.uint16)), rule)


def test_void_in_the_legend_holds_a_value_and_is_no_class(tmp_path):
    path = save(tmp_path / "a.png", CLASSES)
    legend = Legend(("void", "road", "car"))
    assert classes(path, MaskRule("index", legend)).tolist() == [[IGNORE, 0, 1], [1, 1, IGNORE]]
    assert legend.classes == ["road", "car"]


def test_a_value_of_no_class_is_named_with_its_file(tmp_path):
    path = save(tmp_path / "a.png", CLASSES + np.uint8(5) * (CLASSES == 2))
    with pytest.raises(InputError, match="the value 7") as caught:
        classes(path, MaskRule("index", THREE))
    assert str(path) in str(caught.value) and "classes.txt" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("as_palette", [False, True])
def test_colours_stand_for_classes(tmp_path, as_palette):
    pixels = np.array([[[0, 0, 255], [255, 0, 0]], [[0, 0, 0], [0, 0, 255]]], dtype=np.uint8)
    image = Image.fromarray(pixels)
    # Whoever shrinks a painted PNG may number its colours anew.
    (image.quantize(4) if as_palette else image).save(tmp_path / "a.png")
    rule, _ = find_rule([tmp_path / "a.png"], THREE, None)
    assert rule.kind == "colour"
    assert classes(tmp_path / "a.png", rule).tolist() == [[2, 1], [0, 2]]


def test_an_unknown_colour_is_named_with_its_file(tmp_path):
    path = save(tmp_path / "a.png", np.full((2, 2, 3), (1, 2, 3), dtype=np.uint8))
    with pytest.raises(InputError, match="the colour 1 2 3") as caught:
        classes(path, MaskRule("colour", THREE))
    assert str(path) in str(caught.value) and "NAME 1 2 3" in str(caught.value)


def test_a_painted_mask_needs_colours(tmp_path):
    path = save(tmp_path / "a.png", np.full((2, 2, 3), (1, 2, 3), dtype=np.uint8))
    for legend in (None, BINARY):
        with pytest.raises(InputError, match="NAME R G B"):
            find_rule([path], legend, None)


@pytest.mark.parametrize("mode", ["L", "1", "RGB"])
def test_black_and_white_are_background_and_foreground_with_one_notice(tmp_path, mode):
    files = [save(tmp_path / f"{i}.png", np.array([[0, 255]], dtype=np.uint8), mode) for i in range(3)]
    rule, notices = find_rule(files, None, None)
    assert [classes(file, rule).tolist() for file in files] == [[[0, 1]]] * 3
    assert rule.legend == BINARY and len(notices) == (mode != "1")  # one bit is a class number as it stands


def test_a_grey_value_between_is_an_error_or_follows_the_stated_rule(tmp_path):
    good, bad = (save(tmp_path / f"{v}.png", np.array([[0, 255, v]], dtype=np.uint8)) for v in (0, 128))
    rule, _ = find_rule([good], None, None)
    with pytest.raises(InputError, match="the value 128") as caught:
        classes(bad, rule)
    assert str(bad) in str(caught.value) and "--data.masks threshold" in str(caught.value)
    with pytest.raises(InputError, match="the value 128"):
        find_rule([good, bad], None, None)
    stated, _ = find_rule([good, bad], None, "threshold")
    assert classes(bad, stated).tolist() == [[0, 1, 1]]


def test_jpeg_masks_are_cut_in_the_middle_with_one_notice(tmp_path):
    sharp = np.kron(np.eye(4, dtype=np.uint8) * 255, np.ones((5, 5), dtype=np.uint8))
    files = [save(tmp_path / f"{i}.jpg", sharp, quality=60) for i in range(2)]
    assert np.unique(read_mask(files[0]).values).size > 2
    rule, notices = find_rule(files, None, None)
    assert np.array_equal(classes(files[0], rule), sharp // 255)
    assert len(notices) == 1 and "JPEG" in notices[0]
    with pytest.raises(InputError, match="store the numbers of 3 classes as PNG"):
        find_rule(files, THREE, None)
    for kind in ("index", "colour"):
        with pytest.raises(InputError, match="is a JPEG"):
            classes(files[0], MaskRule(kind, THREE))


@pytest.mark.parametrize(("values", "kind"), [([0, 1], "index"), ([0, 1, 255], "index"), ([0, 255], "binary")])
def test_the_values_tell_the_rule_of_two_classes(tmp_path, values, kind):
    blank = [save(tmp_path / f"{i:02}.png", np.zeros((1, 3), dtype=np.uint8)) for i in range(50)]
    last = save(tmp_path / "99.png", np.array([values], dtype=np.uint8))
    for legend in (None, BINARY):
        assert find_rule([*blank, last], legend, None)[0].kind == kind


def test_more_values_than_two_need_class_names(tmp_path):
    path = save(tmp_path / "a.png", CLASSES)
    with pytest.raises(InputError, match=r"a\.png has the value 2, and there are no class names"):
        find_rule([path], None, None)
    with pytest.raises(InputError, match="needs class names"):
        find_rule([path], None, "index")
    with pytest.raises(InputError, match="for two classes"):
        find_rule([path], THREE, "threshold")
    with pytest.raises(InputError, match="did you mean 'colour'"):
        find_rule([path], THREE, "color")


@pytest.mark.parametrize(("values", "kind"), [([0, 1], "index"), ([0, 255], "binary")])
def test_the_rule_that_most_masks_follow_where_one_spoils_it(tmp_path, values, kind):
    files = [save(tmp_path / f"{i}.png", np.array([values], dtype=np.uint8)) for i in range(3)]
    odd = save(tmp_path / "3.png", np.array([[0, 128]], dtype=np.uint8))
    with pytest.raises(InputError, match="the value 128"):
        find_rule([*files, odd], None, None)
    assert nearest_rule([odd, *files], None).kind == kind
    painted = [save(tmp_path / f"{i}.bmp", np.full((2, 2, 3), (255, 0, 0), dtype=np.uint8)) for i in range(2)]
    assert nearest_rule([*painted, odd], THREE).kind == "colour"


def test_a_broken_mask_does_not_hide_the_rule_but_all_of_them_do(tmp_path):
    broken, good = tmp_path / "a.png", save(tmp_path / "b.png", np.array([[0, 255]], dtype=np.uint8))
    broken.write_bytes(b"hello")
    assert find_rule([broken, good], None, None)[0].kind == "binary"
    with pytest.raises(UnreadableImage, match=r"a\.png"):
        find_rule([broken], None, None)


class TestPairs:
    @pytest.fixture
    def pair(self, tmp_path):
        image = save(tmp_path / "a.jpg", np.zeros((5, 7, 3), dtype=np.uint8))
        mask = save(tmp_path / "a.png", np.arange(35, dtype=np.uint8).reshape(5, 7) % 3)
        return image, mask

    def read(self, image, mask, channels=3):
        return Pairs([image], [mask], MaskRule("index", THREE), channels).read(0)

    @pytest.mark.parametrize("channels", [1, 3])
    def test_an_image_comes_with_the_classes_of_its_pixels(self, pair, channels):
        image, mask = self.read(*pair, channels)
        assert image.shape == (channels, 5, 7) and image.dtype == torch.uint8
        assert mask.shape == (5, 7) and mask.dtype == torch.uint8 and mask.unique().tolist() == [0, 1, 2]

    def test_subsets_keep_pairs_together(self, pair):
        image, mask = pair
        pairs = Pairs([image, image, mask], [mask, mask, image], MaskRule("index", THREE), 3).subset([2, 0])
        assert pairs.images == [mask, image] and pairs.masks == [image, mask] and len(pairs) == 2
        pixels = PixelPairs(torch.arange(3).reshape(3, 1, 1, 1), torch.arange(3).reshape(3, 1, 1)).subset([2, 0])
        assert [tuple(int(part) for part in pixels.read(i)) for i in range(len(pixels))] == [(2, 2), (0, 0)]

    def test_sizes_that_differ_are_named_with_both_files(self, pair, tmp_path):
        other = save(tmp_path / "b.png", np.zeros((7, 5), dtype=np.uint8))
        with pytest.raises(InputError, match=r"5x7.*7x5") as caught:
            self.read(pair[0], other)
        assert str(pair[0]) in str(caught.value) and str(other) in str(caught.value)
        assert not isinstance(caught.value, UnreadableImage)

    @pytest.mark.parametrize("broken", [0, 1])
    @pytest.mark.parametrize("how", ["text", "empty", "truncated", "missing"])
    def test_what_cannot_be_read_is_one_line_with_its_path(self, pair, broken, how):
        file = pair[broken]
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes({"text": b"hello", "empty": b"", "truncated": file.read_bytes()[:-30]}[how])
        with pytest.raises(UnreadableImage) as caught:
            self.read(*pair)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("turned", "orientation"),
        [
            (turned, o)
            for turned in ("itself", "by hand", "by its size")
            for o in range(5 if "size" in turned else 1, 9)
        ],
    )
    def test_image_and_mask_stand_as_the_camera_was_held(self, tmp_path, orientation, turned):
        values = np.arange(15, dtype=np.uint8).reshape(3, 5)
        legend = Legend(tuple(map(str, range(15))))
        exif = Image.Exif()
        exif[0x0112] = orientation
        image = save(tmp_path / "a.png", values, exif=exif)
        mask = save(tmp_path / "m.png", values, **({"exif": exif} if turned == "itself" else {}))
        if turned == "by hand":
            with Image.open(image) as stored:
                save(mask, np.array(ImageOps.exif_transpose(stored)))
        pixels, found = Pairs([image], [mask], MaskRule("index", legend), 1).read(0)
        assert torch.equal(pixels[0], found)


class TestMatch:
    def match(self, tmp_path, images, masks, **kwargs):
        return match(
            {name: tmp_path / f"{name}.jpg" for name in images},
            {name: tmp_path / f"{name}.png" for name in masks},
            place=tmp_path,
            **kwargs,
        )

    @pytest.mark.parametrize("suffix", ["", "_segmentation", "_Segmentation", "_mask", "_seg", "_label"])
    def test_names_meet_with_and_without_a_suffix(self, tmp_path, suffix):
        pairs = self.match(tmp_path, ["a", "b/a_mask"], [f"a{suffix}", f"b/a_mask{suffix}"])
        assert [mask.name for _, mask in pairs] == [f"a{suffix}.png", f"a_mask{suffix}.png"]

    def test_an_image_without_a_mask_is_named_and_counted(self, tmp_path):
        with pytest.raises(InputError, match=r"no mask for .*b\.jpg, .*c\.jpg, .*d\.jpg and 2 more"):
            self.match(tmp_path, "abcdef", "a")

    def test_a_mask_without_an_image_is_named(self, tmp_path):
        with pytest.raises(InputError, match=r"no image for .*b_mask\.png"):
            self.match(tmp_path, "a", ["a", "b_mask"])

    def test_two_masks_of_an_image_are_named(self, tmp_path):
        with pytest.raises(InputError, match=r"more than one mask for .*a\.jpg \(.*a\.png, .*a_mask\.png\)"):
            self.match(tmp_path, "a", ["a", "a_mask"])

    def test_a_list_takes_its_names_in_its_order_and_no_others(self, tmp_path):
        pairs = self.match(tmp_path, "abc", "cbx", listed=["c", "b"])
        assert [image.name for image, _ in pairs] == ["c.jpg", "b.jpg"]
        with pytest.raises(InputError, match=r"y of .* without an image"):
            self.match(tmp_path, "abc", "cbx", listed=["c", "y"])

    def test_nothing_is_no_data_set(self, tmp_path):
        with pytest.raises(InputError, match="no images in"):
            self.match(tmp_path, "", "")


class TestLegend:
    def read(self, tmp_path, text):
        (tmp_path / "classes.txt").write_text(text)
        return read_legend(tmp_path / "classes.txt")

    def test_names_may_have_colours_and_comments(self, tmp_path):
        legend = self.read(tmp_path, "# streets\nvoid 0 0 0\n\ntraffic light 250 170 30\ncar\t0,0,142\r\n")
        assert legend.classes == ["traffic light", "car"] and legend.palette == [(250, 170, 30), (0, 0, 142)]
        assert legend.targets == [IGNORE, 0, 1]

    def test_names_alone_may_hold_numbers(self, tmp_path):
        assert self.read(tmp_path, "type 1\ntype 2\n") == Legend(("type 1", "type 2"))

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("a 0 0 0\nb", "line 2: give each name a colour"),
            ("a\nb 0 0 0", "line 2: give each name a colour"),
            ("a\nb\na", "line 3: the name a is there twice"),
            ("a 1 1 1\nb 1 1 1", "line 2: the colour"),
            ("a 0 0 256\nb 1 1 1", "line 1: a colour is three numbers from 0 to 255"),
            ("a\n", "1 classes"),
            ("", "0 classes"),
            ("\n".join(map(str, range(256))), "256 classes"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, tmp_path, text, says):
        with pytest.raises(InputError, match=says) as caught:
            self.read(tmp_path, text)
        assert "classes.txt" in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(InputError, match=r"none\.txt"):
            read_legend(tmp_path / "none.txt")
