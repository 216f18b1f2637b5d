"""The byte tokenizer: bytes are its numbers, and it is read again without a network."""

from __future__ import annotations

import sys

import pytest

from lineattn.errors import InputError
from lineattn.models.byte_tokenizer import BOS, EOS, PAD, VOCABULARY, byte_tokenizer

TEXTS = ["", " a  b\n\tc ,d", "né 日本 🎉", "a <eos>, <bos> and <pad>", "".join(map(chr, range(0x250))), "don't  's"]


@pytest.mark.medium
def test_numbers_are_bytes_and_come_back(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    byte_tokenizer().save_pretrained(tmp_path)
    for tokenizer in (byte_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS, EOS, PAD)
        assert len(tokenizer) == VOCABULARY
        for text in TEXTS:
            assert tokenizer(text).input_ids == list(text.encode())
            assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert tokenizer.decode([BOS, 97, EOS, PAD], skip_special_tokens=True) == "a"
        assert tokenizer(["a", "abc"], padding=True).input_ids == [[PAD, PAD, 97], [97, 98, 99]]


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"lineattn\[hf\]"):
        byte_tokenizer()
