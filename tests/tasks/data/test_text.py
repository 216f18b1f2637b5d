"""Text as blocks of tokens: what is read, what is refused, what is predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lineattn.errors import InputError
from lineattn.models.byte_tokenizer import EOS, byte_tokenizer
from lineattn.tasks.data import corpus
from lineattn.tasks.data.corpus import Tokenizer, in_memory, list_documents, read_corpus
from lineattn.tasks.data.text import IGNORE, Blocks, TextData


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_every_token_is_predicted_once_from_the_one_before():
    tokens = in_memory(["abcde", "fg"], Tokenizer("bytes"))
    source = Blocks(tokens, 3)
    seen = [source.read(i) for i in range(len(source))]
    assert np.concatenate([seen[0], *(block[1:] for block in seen[1:])]).tolist() == [
        EOS, *b"abcde", EOS, *b"fg", EOS,
    ]  # fmt: skip
    assert [len(block) for block in seen] == [4, 4, 4]
    assert source.per_token * 9 == 7


def test_a_short_block_is_filled_with_what_predicts_nothing():
    data = TextData(length=4)
    samples = data.samples(Blocks(in_memory(["abcde"], data.tokenizer), 4), training=False)
    batch = samples.__getitems__([(0, 0), (0, 1)])
    assert batch.inputs.tolist() == [[EOS, *b"abc"], [*b"de", EOS, EOS]]
    assert batch.targets.tokens.tolist() == [[*b"abcd"], [*b"e", EOS, IGNORE, IGNORE]]
    torch.testing.assert_close(batch.targets.size, torch.tensor([4.0, 2.0]) * 5 / 6, check_dtype=False)


def test_files_lines_and_splits(tmp_path: Path):
    write(tmp_path, train__a_txt="one", train__deep__b_md="two", val_jsonl='{"text": "three"}\n\n{"text": "four"}\n')
    found = list_documents(str(tmp_path / "train"))
    assert [document.read() for document in found["train"]] == ["one", "two"]
    write(tmp_path / "parts", train_txt="five", valid_txt="six", test_txt="seven")
    parts = list_documents(str(tmp_path / "parts"))
    assert {split: [document.read() for document in part] for split, part in parts.items()} == {
        "train": ["five"],
        "val": ["six"],
        "test": ["seven"],
    }
    lines = list_documents(str(tmp_path / "val.jsonl"))["train"]
    assert [document.read() for document in lines] == ["three", "four"]


def test_a_part_of_the_documents_is_held_out(tmp_path: Path):
    write(tmp_path, **{f"{name}_txt": name * 3 for name in "abcdefghij"})
    splits = TextData(root=str(tmp_path), val_fraction=0.2).splits
    assert splits.val is not None and splits.test is None
    assert splits.train.corpus.documents == 8 and splits.val.corpus.documents == 2
    again = TextData(root=str(tmp_path), val_fraction=0.2, seed=5).splits
    assert again.val is not None and np.array_equal(again.val.corpus.tokens, splits.val.corpus.tokens)


def test_of_one_document_the_end_is_held_out(tmp_path: Path):
    write(tmp_path, only_txt="0123456789")
    splits = TextData(root=str(tmp_path / "only.txt")).splits
    assert splits.val is not None and splits.val.corpus.tokens.tolist() == [EOS, *b"9", EOS]


def test_the_tokens_of_a_large_text_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "_LARGE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "texts", a_txt="abc", b_txt="de")
    documents = list_documents(str(tmp_path / "texts"))["train"]
    first = read_corpus(documents, Tokenizer("bytes"))
    assert isinstance(first.tokens, np.memmap) and first.tokens.tolist() == [EOS, *b"abc", EOS, *b"de", EOS]
    assert (first.size, first.documents) == (5, 2)
    monkeypatch.setattr(corpus, "tokenised", None)
    assert read_corpus(documents, Tokenizer("bytes")).tokens.tolist() == first.tokens.tolist()
    monkeypatch.undo()
    monkeypatch.setattr(corpus, "_LARGE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "texts", a_txt="changed")
    assert bytes(read_corpus(documents, Tokenizer("bytes")).tokens[1:8].tolist()) == b"changed"


def test_a_damaged_file_of_tokens_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "_LARGE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "texts", a_txt="abc", b_txt="de")
    documents = list_documents(str(tmp_path / "texts"))["train"]
    whole = read_corpus(documents, Tokenizer("bytes")).tokens.tolist()
    for ending, content in ((".bin", b"ab"), (".bin", b""), (".json", b""), (".json", b"[1, 2]")):
        (file,) = (tmp_path / "cache").rglob(f"*{ending}")
        file.write_bytes(content)
        assert read_corpus(documents, Tokenizer("bytes")).tokens.tolist() == whole
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "texts" / "a.txt"))
    with pytest.raises(InputError, match="set XDG_CACHE_HOME to another folder"):
        read_corpus(documents, Tokenizer("bytes"))


def test_a_folder_and_a_file_may_be_splits_of_one_set(tmp_path: Path):
    write(tmp_path, train__a_txt="one", val_txt="two")
    assert {split: len(part) for split, part in list_documents(str(tmp_path)).items()} == {"train": 1, "val": 1}


@pytest.mark.parametrize("count", [2, 3])
def test_of_few_documents_one_is_held_out(count: int, tmp_path: Path):
    write(tmp_path, **{f"{name}_txt": name for name in "abc"[:count]})
    splits = TextData(root=str(tmp_path)).splits
    assert splits.val is not None and (splits.train.corpus.documents, splits.val.corpus.documents) == (count - 1, 1)


def test_half_a_pair_of_surrogates_is_bytes(tmp_path: Path):
    write(tmp_path, a_jsonl='{"text": "a\\ud800"}\n{"text": "b"}\n')
    splits = TextData(root=str(tmp_path), val_fraction=0.5).splits
    assert splits.val is not None and splits.train.corpus.size + splits.val.corpus.size == 5


def test_a_tokenizer_of_hugging_face(tmp_path: Path):
    byte_tokenizer().save_pretrained(tmp_path)
    theirs, ours = Tokenizer(str(tmp_path)), Tokenizer("bytes")
    assert (theirs.size, theirs.separator) == (ours.size, ours.separator)
    assert theirs.encode("né").tolist() == ours.encode("né").tolist()
    assert theirs.decode([110, 195, 169]) == "né"
    assert theirs.fingerprint != ours.fingerprint


@pytest.mark.parametrize(
    ("files", "root", "message"),
    [
        ({}, ".", "no text in"),
        ({}, "nowhere", "nowhere does not exist"),
        ({"a_txt": ""}, ".", "there is no text in"),
        ({"valid_txt": "a"}, ".", "has valid.txt but nothing to train on"),
        ({"a_jsonl": '{"body": 1}\n'}, ".", "a.jsonl, at byte 0: a line must be JSON"),
        ({"a_jsonl": '{"text": 1}\n'}, ".", "a.jsonl, at byte 0: text is no string"),
        ({"a_jsonl": '{"text": "x"}\nword\n'}, ".", "a.jsonl, at byte 14: a line must be JSON"),
    ],
)
def test_bad_text_is_one_line(tmp_path: Path, files: dict[str, str], root: str, message: str):
    write(tmp_path, **files)
    with pytest.raises(InputError, match=message):
        TextData(root=str(tmp_path / root), val_fraction=0.5).splits  # noqa: B018


def test_what_is_no_utf_8_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"a\.txt is no UTF-8 text at byte 3"):
        TextData(root=str(tmp_path)).splits  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "pile"}, "no data set 'pile'|data set"),
        ({"length": 0}, "data.length"),
        ({"val_fraction": 1.0}, "data.val_fraction"),
        ({"tokenizer": "gpt2"}, "--data.tokenizer gpt2 is no folder"),
    ],
)
def test_options_out_of_their_range(options: dict, message: str):
    with pytest.raises(InputError, match=message):
        TextData(**options)


def test_a_folder_without_a_tokenizer(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"none": 1}))
    with pytest.raises(InputError, match="no tokenizer in"):
        Tokenizer(str(tmp_path))


def test_pythons_help_topics():
    splits = TextData().splits
    assert splits.val is not None and splits.test is not None
    sizes = [part.corpus.size for part in (splits.train, splits.val, splits.test)]
    assert sum(sizes) > 300_000 and min(sizes) > 5_000 and sizes[0] > 0.6 * sum(sizes)
