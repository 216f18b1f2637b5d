"""The data module of language modelling: any text as blocks of tokens, each to be predicted from those before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineattn.errors import InputError, unknown
from lineattn.tasks.data import corpus
from lineattn.tasks.data.base import TaskData
from lineattn.tasks.data.corpus import BYTES, Corpus, Tokenizer
from lineattn.tasks.data.dataset import OnError, Samples
from lineattn.tasks.data.source import Splits
from lineattn.tasks.ranges import require

NAMES = ("text", "pydoc")
IGNORE = -100  # what is no token to predict


class Next(NamedTuple):
    """The tokens that come next.

    Attributes:
        tokens: ``(B, T)``, `IGNORE` where there is none.
        size: Bytes of the text that they stand for, ``(B,)``.
    """

    tokens: Tensor
    size: Tensor


@dataclass(frozen=True)
class Blocks:
    """A split in blocks of as many tokens, and one more that is the last to be predicted; the last block is shorter."""

    corpus: Corpus
    length: int

    def __len__(self) -> int:
        return math.ceil((len(self.corpus.tokens) - 1) / self.length)

    def read(self, index: int) -> np.ndarray:
        start = index * self.length
        return self.corpus.tokens[start : start + self.length + 1]

    @property
    def per_token(self) -> float:
        """Bytes of text a token to predict."""
        return self.corpus.size / (len(self.corpus.tokens) - 1)


class TextBlocks(Samples):
    """Blocks of a split, by (epoch, index)."""

    light = True

    def __init__(self, source: Blocks, *, separator: int, seed: int, on_error: OnError) -> None:
        super().__init__(source, seed=seed, on_error=on_error)
        self.separator = separator

    def prepared(self, sample: np.ndarray) -> np.ndarray:
        return sample

    def stacked(self, samples: list[np.ndarray], kept: list[int]) -> tuple[Tensor, Next]:
        """What a short block lacks is separators, which predict nothing."""
        length = max((len(sample) - 1 for sample in samples), default=0)
        inputs = torch.full((len(samples), length), self.separator)
        targets = torch.full((len(samples), length), IGNORE)
        for row, sample in enumerate(samples):
            tokens = torch.from_numpy(sample.astype(np.int64))
            inputs[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        size = (targets != IGNORE).sum(1) * self.source.per_token
        return inputs, Next(targets, size)


class TextData(TaskData):
    """Text in blocks of tokens.

    Documents are packed one after another, so that no token is padding; no token is predicted from another document.

    Args:
        name: `text`, or `pydoc`: Python's own help topics, half a megabyte that every Python has. By default `text`
            where there is a root, else `pydoc`.
        root: A text file, or a folder with .txt, .md, .rst or .jsonl (`{"text": ...}` a line) at any depth, or with
            train, val and test, each a folder or a file.
        tokenizer: `bytes`, or a folder that a tokenizer of Hugging Face was saved to.
        length: Tokens a block.
        batch_size: Blocks a step and process.
        num_workers: Processes that read; by default none, as there is little to do.
        val_fraction: Part of the training documents held out for validation where there is no validation split, of one
            document its last part; by default 0.1 where there is no test split either.
        seed: Seed of the run.
    """

    resolved = ("name",)
    of_model = ("vocabulary", "separator")
    free = ("root", "num_workers")
    unit = "blocks"

    def __init__(
        self,
        name: str | None = None,
        root: str | None = None,
        tokenizer: str = BYTES,
        length: int = 512,
        batch_size: int = 16,
        num_workers: int | None = None,
        val_fraction: float | None = None,
        *,
        seed: int = 0,
    ) -> None:
        chosen = name or ("text" if root else "pydoc")
        if chosen not in NAMES:
            raise unknown("data set", chosen, NAMES)
        super().__init__(chosen, root, batch_size, num_workers, "stop", seed)
        require(length >= 1, "data.length", length, "1 or more")
        require(0 <= (val_fraction or 0) < 1, "data.val_fraction", val_fraction, "0 or more and below 1")
        self.length, self.val_fraction = length, val_fraction
        self.tokenizer = Tokenizer(tokenizer)

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.size

    @property
    def separator(self) -> int:
        return self.tokenizer.separator

    def load(self) -> Splits[Blocks]:
        if self.name == "pydoc":
            parts = dict(zip(("train", "val", "test"), _topics(), strict=True))
            corpora = {split: corpus.in_memory(texts, self.tokenizer) for split, texts in parts.items()}
        else:
            corpora = self._read()
        splits = {split: Blocks(found, self.length) for split, found in corpora.items()}
        counts = [f"{len(found.tokens):,} tokens in {split}" for split, found in corpora.items()]
        return Splits([], splits["train"], splits.get("val"), splits.get("test"), [", ".join(counts)])

    def _read(self) -> dict[str, Corpus]:
        documents = corpus.list_documents(self.root)
        fraction = self.val_fraction
        if fraction is None:
            fraction = 0.1 if documents.keys() == {"train"} else 0.0
        if "val" in documents or fraction <= 0:
            return {split: corpus.read_corpus(part, self.tokenizer) for split, part in documents.items()}
        train = documents.pop("train")
        found = {split: corpus.read_corpus(part, self.tokenizer) for split, part in documents.items()}
        if len(train) == 1:
            text = train[0].read()
            cut = len(text) - round(fraction * len(text))
            if not 0 < cut < len(text):
                raise InputError(f"there is no text in {train[0].file} to hold {fraction:.0%} of it out: add some")
            texts = [text[:cut]], [text[cut:]]
            parts = [corpus.in_memory(part, self.tokenizer) for part in texts]
        else:
            val, rest = corpus.held_out(train, fraction)
            parts = [corpus.read_corpus(part, self.tokenizer) for part in (rest, val)]
        return {"train": parts[0], "val": parts[1], **found}

    def samples(self, source: Blocks, *, training: bool) -> TextBlocks:
        return TextBlocks(source, separator=self.separator, seed=self.seed, on_error=self.on_error)

    def example(self) -> Tensor:
        return torch.zeros(1, self.length, dtype=torch.long)


def _topics() -> tuple[list[str], list[str], list[str]]:
    """Python's help topics, eight tenths to train on."""
    from pydoc_data.topics import topics

    texts = [f"{name}\n\n{text}" for name, text in sorted(topics.items())]
    val, rest = corpus.held_out(texts, 0.1)
    test, train = corpus.held_out(rest, 1 / 9)
    return train, val, test
