"""Text as bytes: a tokenizer for Hugging Face that needs no training and no file from anywhere.

The number of a token is the byte; the three numbers after are the beginning of a text, its end, and padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lineattn.errors import need

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258
VOCABULARY = 259


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes of UTF-8, so that ``tokenizer(text).input_ids`` is ``text.encode()``.

    ``<bos>`` is 256, ``<eos>`` 257, ``<pad>`` 258: `BOS`, `EOS`, `PAD`; `VOCABULARY` tokens in all. None is added to a
    text, and what looks like one in a text is its bytes. Padding is on the left, where generation wants it. It is a
    plain tokenizer of the ``tokenizers`` library: what ``save_pretrained`` writes is read by ``AutoTokenizer`` without
    this package.

    Raises:
        InputError: transformers is not installed.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer("né").input_ids, list("né".encode())
        ([110, 195, 169], [110, 195, 169])
        >>> tokenizer.decode([110, 195, 169])
        'né'
    """
    need("transformers", "hf", "the byte tokenizer")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(_names())}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        split_special_tokens=True,  # a text that says "<eos>" has five bytes there
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _names() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: its own where that can be seen, and for the
    others those from 256 on."""
    seen = [chr(byte).isprintable() and byte != ord(" ") for byte in range(256)]
    return [chr(byte if seen[byte] else 256 + seen[:byte].count(False)) for byte in range(256)]
