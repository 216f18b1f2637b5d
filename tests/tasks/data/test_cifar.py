"""CIFAR's python layout: whole, in part, damaged, and with code in it."""

from __future__ import annotations

import io
import os
import pickle

import numpy as np
import pytest

from lineattn.errors import InputError
from lineattn.tasks.data.cifar import load


def batch(count, classes=10, key="labels", protocol=2):
    rows = np.random.default_rng(0).integers(0, 256, (count, 3072), dtype=np.uint8)
    content = {
        "data": rows,
        key: [n % classes for n in range(count)],
        "filenames": ["x.png"] * count,
        "batch_label": "1",
    }
    return pickle.dumps(content, protocol=protocol)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(batch(20))
    (folder / "data_batch_3").write_bytes(batch(7, protocol=4))
    (folder / "test_batch").write_bytes(batch(5))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {n}" for n in range(10)]}, protocol=2))
    return tmp_path


def read(root, classes=10, **kwargs):
    return load(str(root), classes=classes, **{"image_size": 32, "channels": 3, "download": False, **kwargs})


def test_a_part_of_the_set_is_taken_with_a_notice(root):
    splits = read(root)
    assert (len(splits.train), len(splits.test), splits.val) == (27, 5, None)
    assert splits.classes[3] == "class 3" and splits.train.images.shape == (27, 3, 32, 32)
    assert any("27 of 50,000 train" in notice for notice in splits.notices)


def test_the_folder_itself_is_a_root_too_and_sizes_and_channels_follow_the_network(root):
    splits = read(root / "cifar-10-batches-py", image_size=16, channels=1)
    assert splits.train.images.shape == (27, 1, 16, 16)


def test_the_hundred_class_layout(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / name).write_bytes(batch(10, classes=100, key="fine_labels"))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(n) for n in range(100)]}))
    assert len(read(tmp_path, classes=100).classes) == 100


def test_pickles_of_python_2_as_the_original_set_has_them(root):
    # Protocol 2 under NumPy's old module name, byte strings as keys: how the published files were written.
    new = batch(4).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (root / "cifar-10-batches-py" / "test_batch").write_bytes(new)
    assert len(read(root).test) == 4


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("file", ["data_batch_1", "batches.meta"])
def test_a_pickle_with_code_is_refused_and_not_run(root, file, monkeypatch):
    monkeypatch.chdir(root)
    (root / "cifar-10-batches-py" / file).write_bytes(pickle.dumps({"data": Bomb(), "label_names": Bomb()}))
    with pytest.raises(InputError, match=rf"{file} asks for \w+.system, which is code") as caught:
        read(root)
    assert "\n" not in str(caught.value) and not (root / "exploded").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "numpy.load", "numpy.f2py.run", "numpy._core.multiarray.fromfile"])
def test_only_what_arrays_are_made_of_is_admitted(root, name):
    module, _, attribute = name.rpartition(".")
    (root / "cifar-10-batches-py" / "test_batch").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(InputError, match="which is code"):
        read(root)


@pytest.mark.parametrize("damage", ["cut", "text", "shape", "label", "list"])
def test_damage_is_named(root, damage):
    file = root / "cifar-10-batches-py" / "data_batch_1"
    whole = file.read_bytes()
    stream = io.BytesIO()
    pickle.dump({"data": np.zeros((2, 5), dtype=np.uint8), "labels": [0, 1]}, stream)
    file.write_bytes(
        {
            "cut": whole[:-300],
            "text": b"hello",
            "shape": stream.getvalue(),
            "label": batch(20, classes=11),
            "list": pickle.dumps([1, 2]),
        }[damage]
    )
    with pytest.raises(InputError, match="data_batch_1"):
        read(root)


def test_a_missing_set_says_where_to_put_it(tmp_path):
    with pytest.raises(InputError, match=r"put cifar-10-batches-py/ .*--data.download true"):
        read(tmp_path)


def test_a_download_without_a_network_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("urlopen error: no route\nto host")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", unreachable)
    with pytest.raises(InputError, match="cannot download CIFAR10") as caught:
        read(tmp_path, download=True)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_download_is_read_by_our_reader_only(root, tmp_path, monkeypatch):
    there = tmp_path / "cifar-10-batches-py"
    hidden = there.rename(tmp_path / "archive")
    (hidden / "data_batch_3").write_bytes(pickle.dumps(Bomb()))
    monkeypatch.chdir(tmp_path)

    def unpacking(url, place, *, filename, md5):
        assert url.endswith(filename) and len(md5) == 32 and place == str(tmp_path)
        hidden.rename(there)

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", unpacking)
    monkeypatch.setattr("torchvision.datasets.CIFAR10.__init__", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(InputError, match="which is code"):
        read(tmp_path, download=True)
    assert not (tmp_path / "exploded").exists()


def test_the_shared_subset(shared_data):
    splits = read(shared_data("cifar10"))
    assert (len(splits.train), len(splits.test)) == (5000, 1000)
    assert splits.classes[0] == "airplane" and max(splits.train.labels) == 9
