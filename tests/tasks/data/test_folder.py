"""Image folders in both layouts, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from lineattn.errors import InputError
from lineattn.tasks.data.folder import load
from lineattn.tasks.data.images import ImageData


def put(path, count=2):
    path.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.fromarray(np.full((8, 8, 3), 20 * number, dtype=np.uint8)).save(path / f"{number}.png")


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val", "test"):
        for name in ("cat", "dog"):
            put(tmp_path / split / name)
    return tmp_path


def test_three_splits_with_one_order_of_classes(root):
    splits = load(str(root), channels=3)
    assert splits.classes == ["cat", "dog"]
    assert [len(split) for split in (splits.train, splits.val, splits.test)] == [4, 4, 4]
    assert list(splits.train.labels) == [0, 0, 1, 1]


def test_one_folder_holds_out_a_fixed_stratified_part(tmp_path):
    put(tmp_path / "cat", 10)
    put(tmp_path / "dog", 5)
    splits = [ImageData(root=str(tmp_path), seed=seed).splits for seed in (0, 1)]
    assert len(splits[0].val) == 3 and splits[0].test is None
    assert splits[0].val.paths == splits[1].val.paths
    assert not set(splits[0].val.paths) & set(splits[0].train.paths)


def test_hidden_folders_and_strange_files_are_left_out_with_a_notice(root):
    put(root / "train" / ".ipynb_checkpoints")
    put(root / "train" / "cat" / ".thumbs")
    (root / "train" / "cat" / "notes.txt").write_text("hello")
    splits = load(str(root), channels=3)
    assert splits.classes == ["cat", "dog"] and len(splits.train) == 4
    assert any(".ipynb_checkpoints" in notice for notice in splits.notices)
    assert any("1 files" in notice for notice in splits.notices)


def test_a_class_may_be_missing_from_a_test_split_but_not_new_in_it(root):
    for file in (root / "test" / "dog").iterdir():
        file.unlink()
    assert len(load(str(root), channels=3).test) == 2
    put(root / "test" / "cow")
    with pytest.raises(InputError, match="'cow'"):
        load(str(root), channels=3)


def test_an_empty_class_is_named(root):
    (root / "train" / "cow").mkdir()
    with pytest.raises(InputError, match=r"train/cow holds no images"):
        load(str(root), channels=3)


@pytest.mark.parametrize(
    ("name", "says"), [("absent", "does not exist"), ("file", "is not a folder"), ("empty", "no class")]
)
def test_a_wrong_root_is_named_with_what_was_expected(tmp_path, name, says):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=says) as caught:
        load(str(tmp_path / name), channels=3)
    assert name in str(caught.value) and "CLASS/image.jpg" in str(caught.value)


def test_a_test_split_alone_is_no_data_set(tmp_path):
    put(tmp_path / "test" / "cat")
    with pytest.raises(InputError, match="no train/"):
        load(str(tmp_path), channels=3)
