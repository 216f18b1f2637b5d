"""Segmentation data in all of its layouts, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from lineattn.errors import InputError
from lineattn.tasks.data import digits, seg_digits, seg_folder
from lineattn.tasks.data.legend import ADE20K, CITYSCAPES, IGNORE, VOC
from lineattn.tasks.data.seg_layouts import load_ade20k, load_cityscapes, load_isic, load_voc


def image(path, size=(4, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((*size, 3), dtype=np.uint8)).save(path)


def mask(path, values=(0, 255), size=(4, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.resize(np.array(values, dtype=np.uint8), size)).save(path)


def pair(images, masks, name, values=(0, 255), suffix=""):
    image(images / f"{name}.jpg")
    mask(masks / f"{name}{suffix}.png", values)


def sizes(splits):
    return [len(split) if split else None for split in (splits.train, splits.val, splits.test)]


def load(root, **kwargs):
    return seg_folder.load(str(root), channels=3, **kwargs)


def fill(root, layout):
    for split, count in {"train": 3, "validation": 2, "test": 1}.items():
        for number in range(count):
            images, masks = {
                "above": (root / split / "images", root / split / "masks"),
                "below": (root / "images" / split, root / "masks" / split),
                "list": (root / "images", root / "masks"),
                "none": (root / "images", root / "masks"),
            }[layout]
            pair(images, masks, f"{split}{number}", suffix="_mask")
            if layout == "list":
                with (root / f"{split}.txt").open("a") as file:
                    file.write(f"{split}{number}{'.jpg' if number else ''}\n\n")


class TestFolder:
    @pytest.mark.parametrize(
        ("layout", "counts"),
        [("above", [3, 2, 1]), ("below", [3, 2, 1]), ("list", [3, 2, 1]), ("none", [6, None, None])],
    )
    def test_every_layout_is_read(self, tmp_path, layout, counts):
        fill(tmp_path, layout)
        splits = load(tmp_path)
        assert sizes(splits) == counts and splits.classes == ["background", "foreground"] and splits.palette is None
        pixels, found = splits.train.read(0)
        assert pixels.shape == (3, 4, 6) and found.unique().tolist() == [0, 1]
        assert splits.notices == ["masks hold 0 and 255: taken as background and foreground"]

    def test_kvasir_comes_with_boxes_beside_its_folders(self, tmp_path):
        pair(tmp_path / "images", tmp_path / "masks", "cju0")
        (tmp_path / "kavsir_bboxes.json").write_text("{}")
        assert sizes(load(tmp_path)) == [1, None, None]

    def test_folders_below_keep_their_part_of_the_name(self, tmp_path):
        for place in ("a", "b"):
            pair(tmp_path / "images" / place, tmp_path / "masks" / place, "1")
        assert [file.parent.name for file in load(tmp_path).train.masks] == ["a", "b"]

    def test_hidden_files_are_passed_over(self, tmp_path):
        fill(tmp_path, "none")
        image(tmp_path / "images" / ".thumbs" / "x.jpg")
        (tmp_path / "masks" / "._train0.png").write_bytes(b"")
        assert sizes(load(tmp_path)) == [6, None, None]

    def test_class_names_and_colours_come_from_a_file(self, tmp_path):
        pair(tmp_path / "images", tmp_path / "masks", "a", (0, 1, 2))
        (tmp_path / "classes.txt").write_text("void\nroad\ncar\n")
        assert load(tmp_path).classes == ["road", "car"]
        (tmp_path / "other").write_text("sky 0 0 0\nroad 9 9 9\ncar 1 2 3\n")
        splits = load(tmp_path, classes_file=str(tmp_path / "other"))
        assert splits.classes == ["sky", "road", "car"] and splits.palette == [(0, 0, 0), (9, 9, 9), (1, 2, 3)]
        with pytest.raises(InputError, match="missing"):
            load(tmp_path, classes_file=str(tmp_path / "missing"))

    def test_a_value_of_no_class_is_an_error_where_it_is_read(self, tmp_path):
        fill(tmp_path, "above")
        mask(tmp_path / "test" / "masks" / "test0_mask.png", (0, 128))
        with pytest.raises(InputError, match=r"test0_mask\.png has the value 128"):
            load(tmp_path).test.read(0)
        assert load(tmp_path, masks="threshold").test.read(0)[1].unique().tolist() == [0, 1]

    def test_what_does_not_match_is_named(self, tmp_path):
        fill(tmp_path, "none")
        image(tmp_path / "images" / "new.jpg")
        with pytest.raises(InputError, match=r"no mask for .*new\.jpg"):
            load(tmp_path)
        mask(tmp_path / "masks" / "new.png")
        image(tmp_path / "images" / "new.png")
        with pytest.raises(InputError, match=r"new\.jpg and .*new\.png have one name"):
            load(tmp_path)

    def test_lists_that_overlap_or_leave_out_are_told(self, tmp_path):
        fill(tmp_path, "list")
        pair(tmp_path / "images", tmp_path / "masks", "unlisted")
        with (tmp_path / "test.txt").open("a") as file:
            file.write("train0\n")
        notices = " ".join(load(tmp_path).notices)
        assert "1 images" in notices and "in no list" in notices and "in train.txt and in test.txt" in notices
        with (tmp_path / "test.txt").open("a") as file:
            file.write("train0\n")
        with pytest.raises(InputError, match=r"test\.txt names train0 twice"):
            load(tmp_path)

    def test_a_list_that_is_no_text_is_named(self, tmp_path):
        fill(tmp_path, "list")
        (tmp_path / "train.txt").write_text("train0\n", encoding="utf-16")
        with pytest.raises(InputError, match=r"cannot read the names of images in .*train\.txt.*UTF-8"):
            load(tmp_path)

    def test_splits_whose_masks_mean_different_things_are_told(self, tmp_path):
        """Where one split has 0 and 1 and another 0 and 255, the foreground of one of them would be ignored."""
        for split, values in (("train", (0, 1)), ("val", (0, 255))):
            pair(tmp_path / split / "images", tmp_path / split / "masks", "a", values)
        (notice,) = load(tmp_path).notices
        assert "masks hold 0, 1, 255" in notice and "255, as in" in notice and "val" in notice

    def test_a_list_names_what_is_not_there(self, tmp_path):
        fill(tmp_path, "list")
        with (tmp_path / "train.txt").open("a") as file:
            file.write("absent\n")
        with pytest.raises(InputError, match=r"absent of .*train\.txt without an image"):
            load(tmp_path)

    def test_test_images_may_lack_masks_and_others_not(self, tmp_path):
        fill(tmp_path, "below")
        (tmp_path / "masks" / "test" / "test0_mask.png").unlink()
        (tmp_path / "masks" / "test").rmdir()
        splits = load(tmp_path)
        assert sizes(splits) == [3, 2, None] and "no test split" in splits.notices[0]
        (tmp_path / "masks" / "validation").rename(tmp_path / "masks" / "other")
        with pytest.raises(InputError, match="differ in the folder of"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("name", "says"),
        [("absent", "does not exist"), ("file", "is not a folder"), ("empty", "no images/ and masks/")],
    )
    def test_a_wrong_root_is_named_with_what_was_expected(self, tmp_path, name, says):
        (tmp_path / "file").write_text("")
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputError, match=says) as caught:
            load(tmp_path / name)
        assert name in str(caught.value) and "ROOT/images/NAME.jpg" in str(caught.value)

    def test_a_split_without_its_two_folders_and_a_set_without_training_are_named(self, tmp_path):
        pair(tmp_path / "test" / "images", tmp_path / "test" / "masks", "a")
        with pytest.raises(InputError, match="none to train on"):
            load(tmp_path)
        image(tmp_path / "train" / "images" / "a.jpg")
        with pytest.raises(InputError, match=r"no images/ and masks/ in .*train"):
            load(tmp_path)

    def test_kvasir(self, shared_data):
        splits = load(shared_data("kvasir_seg_mini"))
        assert sizes(splits) == [240, 30, 60] and splits.classes == ["background", "foreground"]
        assert len(splits.notices) == 1 and "masks are JPEG" in splits.notices[0]
        share = torch.stack([splits.val.read(index)[1].float().mean() for index in range(8)])
        assert splits.val.read(0)[1].unique().tolist() == [0, 1] and 0.02 < share.mean() < 0.5

    def test_isic_in_a_plain_folder(self, shared_data):
        splits = load(shared_data("isic2018_3pairs"))
        assert sizes(splits) == [3, None, None] and splits.train.read(0)[1].unique().tolist() == [0, 1]


class TestIsic:
    @pytest.mark.parametrize(
        ("images", "masks", "other"),
        [
            ("ISIC2018_Task1-2_{}_Input", "ISIC2018_Task1_{}_GroundTruth", "ISIC2018_Task2_{}_GroundTruth_v3"),
            ("ISIC-2017_{}_Data", "ISIC-2017_{}_Part1_GroundTruth", "ISIC-2017_{}_Part2_GroundTruth"),
            ("ISBI2016_ISIC_Part1_{}_Data", "ISBI2016_ISIC_Part1_{}_GroundTruth", "ISBI2016_ISIC_Part2_{}_GroundTruth"),
        ],
    )
    def test_each_year_has_its_names(self, tmp_path, images, masks, other):
        for split, count in {"Training": 2, "Validation": 1, "Test": 1}.items():
            folder = tmp_path / images.format(split)
            for number in range(count):
                pair(folder, tmp_path / masks.format(split), f"ISIC_{number}", suffix="_segmentation")
            image(folder / "ISIC_0_superpixels.png")
            mask(tmp_path / other.format(split) / "x.png")
        splits = load_isic(str(tmp_path), channels=3)
        assert sizes(splits) == [2, 1, 1] and splits.train.read(0)[1].unique().tolist() == [0, 1]

    def test_a_part_without_masks_is_left_out_with_a_notice_and_nothing_is_an_error(self, tmp_path):
        image(tmp_path / "ISIC2018_Task1-2_Test_Input" / "a.jpg")
        with pytest.raises(InputError, match="ISIC2018_Task1_Training_GroundTruth"):
            load_isic(str(tmp_path), channels=3)
        folder = "ISIC2018_Task1{}_Training_{}"
        pair(tmp_path / folder.format("-2", "Input"), tmp_path / folder.format("", "GroundTruth"), "b")
        splits = load_isic(str(tmp_path), channels=3)
        assert sizes(splits) == [1, None, None] and "Test_Input has no folder of masks" in splits.notices[0]


class TestVoc:
    @pytest.fixture
    def base(self, tmp_path):
        base = tmp_path / "VOCdevkit" / "VOC2012"
        for name in "abcd":
            pair(base / "JPEGImages", base / "SegmentationClass", name, (0, 15, 20, 255))
        image(base / "JPEGImages" / "without.jpg")
        lists = base / "ImageSets" / "Segmentation"
        lists.mkdir(parents=True)
        (lists / "train.txt").write_text("b\na\n")
        (lists / "val.txt").write_text("c\n")
        (lists / "test.txt").write_text("without\n")
        return base

    @pytest.mark.parametrize("above", [0, 1, 2])
    def test_lists_and_numbers_are_taken_as_they_stand(self, base, above):
        root = [base, *base.parents][above]
        splits = load_voc(str(root), channels=3)
        assert sizes(splits) == [2, 1, None] and "no test split" in splits.notices[0]
        assert splits.classes[15] == "person" and len(splits.classes) == len(splits.palette) == 21
        assert splits.train.images[0].name == "b.jpg"
        assert splits.train.read(0)[1].unique().tolist() == [0, 15, 20, IGNORE]

    def test_own_class_names_take_the_place_of_vocs(self, base, tmp_path):
        (tmp_path / "classes.txt").write_text("\n".join(f"n{i}" for i in range(16)))
        splits = load_voc(str(tmp_path), channels=3)
        assert len(splits.classes) == 16
        with pytest.raises(InputError, match="the value 20"):
            splits.train.read(0)

    def test_what_is_missing_is_named(self, base, tmp_path):
        (base / "SegmentationClass" / "a.png").unlink()
        with pytest.raises(InputError, match=r"no mask for .*a\.jpg"):
            load_voc(str(tmp_path), channels=3)
        (base / "ImageSets" / "Segmentation" / "train.txt").write_text("\n")
        with pytest.raises(InputError, match=r"train\.txt names no images"):
            load_voc(str(tmp_path), channels=3)
        (base / "ImageSets" / "Segmentation" / "train.txt").unlink()
        with pytest.raises(InputError, match=r"train\.txt"):
            load_voc(str(tmp_path), channels=3)
        with pytest.raises(InputError, match="no SegmentationClass"):
            load_voc(str(base / "JPEGImages"), channels=3)

    def test_camvid(self, shared_data):
        splits = load_voc(str(shared_data("camvid_voc")), channels=3)
        assert sizes(splits) == [140, 40, 60] and splits.classes[0] == "Sky" and len(splits.classes) == 11
        pixels, found = splits.train.read(0)
        assert pixels.shape[1:] == found.shape == (360, 480)
        assert set(found.unique().tolist()) <= {*range(11), IGNORE}


def test_ade20k_shifts_its_numbers_and_ignores_zero(tmp_path):
    base = tmp_path / "ADEChallengeData2016"
    for split in ("training", "validation"):
        pair(base / "images" / split, base / "annotations" / split, "ADE_1", (0, 1, 150))
    for root in (tmp_path, base):
        splits = load_ade20k(str(root), channels=3)
        assert sizes(splits) == [1, 1, None]
        assert splits.train.read(0)[1].unique().tolist() == [0, 149, IGNORE]
    assert len(splits.classes) == 150 and splits.classes[0] == "wall" and splits.classes[149] == "flag"
    with pytest.raises(InputError, match="no annotations/training"):
        load_ade20k(str(base / "images"), channels=3)


def test_cityscapes_keeps_the_classes_of_its_benchmark(tmp_path):
    for split, values in {"train": (0, 7, 33, 29), "val": (8, 8), "test": (1, 3)}.items():
        images, masks = tmp_path / "leftImg8bit" / split / "ulm", tmp_path / "gtFine" / split / "ulm"
        image(images / "ulm_0_leftImg8bit.png")
        mask(masks / "ulm_0_gtFine_labelIds.png", values)
        image(masks / "ulm_0_gtFine_color.png")
        mask(masks / "ulm_0_gtFine_instanceIds.png")
    splits = load_cityscapes(str(tmp_path), channels=3)
    assert sizes(splits) == [1, 1, None] and "withheld" in splits.notices[0]
    assert splits.train.read(0)[1].unique().tolist() == [0, 18, IGNORE]
    assert len(splits.classes) == len(splits.palette) == 19
    (tmp_path / "gtFine" / "test" / "ulm" / "ulm_0_gtFine_labelIds.png").write_bytes(b"")
    assert sizes(load_cityscapes(str(tmp_path), channels=3)) == [1, 1, 1]  # named where it is read
    with pytest.raises(InputError, match="no leftImg8bit/train"):
        load_cityscapes(str(tmp_path / "gtFine"), channels=3)


def test_known_legends_have_the_published_numbers_of_classes():
    assert [len(legend.classes) for legend in (VOC, ADE20K, CITYSCAPES)] == [21, 150, 19]
    assert [len(legend.entries) for legend in (VOC, ADE20K, CITYSCAPES)] == [21, 151, 34]
    assert VOC.palette[15] == (192, 128, 128)
    assert all(len(set(legend.classes)) == len(legend.classes) for legend in (VOC, ADE20K, CITYSCAPES))


class TestDigits:
    def test_scenes_hold_all_classes_and_are_the_same_each_time(self):
        splits, again = (seg_digits.load(image_size=32, channels=3) for _ in range(2))
        for mine, yours in ((splits.train, again.train), (splits.val, again.val), (splits.test, again.test)):
            assert mine.images.shape == (len(mine), 3, 32, 32) and mine.masks.shape == (len(mine), 32, 32)
            assert torch.equal(mine.images, yours.images) and torch.equal(mine.masks, yours.masks)
            shares = [(mine.masks == index).float().mean().item() for index in range(3)]
            assert sum(shares) == pytest.approx(1) and 0.05 < shares[1] < 0.2 and 0.05 < shares[2] < 0.2
        assert not torch.equal(splits.train.images[0], splits.test.images[0])

    def test_no_digit_is_in_two_splits(self):
        parts = digits.load(image_size=8, channels=1)
        seen = [
            {part.images[i].numpy().tobytes() for i in range(len(part))}
            for part in (parts.train, parts.val, parts.test)
        ]
        assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]

    def test_grey_scenes_have_one_channel(self):
        assert seg_digits.load(image_size=16, channels=1).val.images.shape[1:] == (1, 16, 16)
