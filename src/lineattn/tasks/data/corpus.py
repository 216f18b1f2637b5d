"""Text from disk as one row of tokens a split: documents one after another, a separator before each and at the end."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lineattn.errors import InputError
from lineattn.files import write_whole
from lineattn.models.byte_tokenizer import EOS, VOCABULARY
from lineattn.tasks.data.folder import find_parts, find_root
from lineattn.tasks.seeding import permutation

EXTENSIONS = (".txt", ".md", ".rst", ".text", ".jsonl")
BYTES = "bytes"
_EXAMPLE = "name a text file, or a folder of text files or of train/, val/ and test/"
_LARGE = 64 * 2**20  # bytes of text from which on its tokens are kept on disk


class Document(NamedTuple):
    """A text: a file, or the line of a JSON-lines file that begins at an offset."""

    file: Path
    offset: int | None = None

    def read(self) -> str:
        """Its text.

        Raises:
            InputError: It is no UTF-8, or no JSON with a text.
        """
        try:
            if self.offset is None:
                return self.file.read_text(encoding="utf-8")
            with self.file.open("rb") as file:
                file.seek(self.offset)
                text = json.loads(file.readline())["text"]
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.file} is no UTF-8 text at byte {error.start}: convert it, or leave it out"
            ) from None
        except OSError as error:
            raise InputError(f"{self.file} can't be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"{self.file}, at byte {self.offset}: a line must be JSON with a string as text") from None
        if not isinstance(text, str):
            raise InputError(f"{self.file}, at byte {self.offset}: text is no string")
        return text


class Tokenizer:
    """What makes numbers of text: bytes, or a tokenizer of Hugging Face.

    Args:
        where: ``bytes``, or a folder that a tokenizer was saved to.

    Attributes:
        size: How many numbers there are.
        separator: The one that stands between documents.

    Raises:
        InputError: There is no tokenizer there, or it has no number for the end of a text.

    Example:
        >>> tokenizer = Tokenizer("bytes")
        >>> tokenizer.encode("né").tolist(), tokenizer.decode([110, 195, 169]), tokenizer.separator
        ([110, 195, 169], 'né', 257)
    """

    def __init__(self, where: str) -> None:
        self.where, self.size, self.separator = where, VOCABULARY, EOS
        self.core: Any = None
        if where != BYTES:
            self.core = _from_hugging_face(Path(where))
            self.size = len(self.core)
            if self.core.eos_token_id is None:
                raise InputError(f"the tokenizer in {where} has no eos_token, which stands between documents: set one")
            self.separator = int(self.core.eos_token_id)

    def encode(self, text: str) -> np.ndarray:
        if self.core is None:
            return np.frombuffer(_utf8(text), np.uint8)
        return np.array(self.core(text, add_special_tokens=False).input_ids, dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        if self.core is None:
            return bytes(token for token in tokens if token < 256).decode(errors="replace")
        return self.core.decode(tokens)

    @property
    def fingerprint(self) -> str:
        """Changes with what the tokenizer does."""
        text = self.where if self.core is None else self.core.backend_tokenizer.to_str() + str(self.separator)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """The tokens of a split.

    Attributes:
        tokens: (N,); the separator first and last, and between documents.
        size: Bytes of the text that they are of.
        documents: How many.
    """

    tokens: np.ndarray
    size: int
    documents: int


def list_documents(root: str | None) -> dict[str, list[Document]]:
    """The documents of each split: of the parts of a folder, or all of them as ``train``.

    Raises:
        InputError: There is nothing, or no text.
    """
    place = Path(root) if root is not None and Path(root).is_file() else find_root(root, _EXAMPLE)
    if place.is_file():
        return {"train": _listed([place])}
    parts = {split: file for end in EXTENSIONS for split, file in find_parts(place, end).items()} | find_parts(place)
    if parts and "train" not in parts:
        there = next(iter(parts.values())).name
        raise InputError(f"--data.root {place} has {there} but nothing to train on: add train, or name another folder")
    parts = parts or {"train": place}
    found = {}
    for split, part in parts.items():
        files = [part] if part.is_file() else _text_files(part)
        if not files:
            raise InputError(f"no text in {part}: files end in {', '.join(EXTENSIONS)}")
        found[split] = _listed(files)
    return found


def _text_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in EXTENSIONS and file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def _listed(files: Iterable[Path]) -> list[Document]:
    found = []
    for file in files:
        if file.suffix.lower() != ".jsonl":
            found.append(Document(file))
            continue
        offset = 0
        with file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    found.append(Document(file, offset))
                offset += len(line)
    return found


def held_out(documents: Sequence[Any], fraction: float) -> tuple[list[Any], list[Any]]:
    """Documents to evaluate on, and the others; the same for all seeds.

    Example:
        >>> [len(part) for part in held_out(range(10), 0.2)]
        [2, 8]
    """
    order = permutation(len(documents), 0)
    count = min(max(1, round(fraction * len(order))), len(order) - 1)
    return [documents[i] for i in sorted(order[:count])], [documents[i] for i in sorted(order[count:])]


def tokenised(texts: Iterable[str], tokenizer: Tokenizer, file: io.BufferedIOBase) -> tuple[int, int]:
    """Writes the tokens of texts; returns how many bytes the texts have, and how many texts have any."""
    kind = _kind(tokenizer)
    separator = np.array([tokenizer.separator], kind).tobytes()
    size = documents = 0
    for text in texts:
        if text:
            file.write(separator + tokenizer.encode(text).astype(kind).tobytes())
            size, documents = size + len(_utf8(text)), documents + 1
    file.write(separator)
    return size, documents


def in_memory(texts: Iterable[str], tokenizer: Tokenizer) -> Corpus:
    """The tokens of texts.

    Example:
        >>> in_memory(["ab", "", "c"], Tokenizer("bytes")).tokens.tolist()
        [257, 97, 98, 257, 99, 257]
    """
    file = io.BytesIO()
    size, documents = tokenised(texts, tokenizer, file)
    return Corpus(np.frombuffer(file.getvalue(), _kind(tokenizer)), size, documents)


def read_corpus(documents: Sequence[Document], tokenizer: Tokenizer) -> Corpus:
    """The tokens of documents; of large ones they are kept in the user's cache, and read from there as needed.

    Raises:
        InputError: A document can't be read, or none has any text.
    """
    files = {document.file: document.file.stat() for document in documents}
    if sum(stat.st_size for stat in files.values()) < _LARGE:
        found = in_memory(_texts(documents), tokenizer)
    else:
        found = _kept(
            documents, tokenizer, [(str(file.resolve()), s.st_size, s.st_mtime_ns) for file, s in files.items()]
        )
    if not found.documents:
        raise InputError(f"there is no text in {documents[0].file}" + (" and the others" if len(files) > 1 else ""))
    return found


def _kept(documents: Sequence[Document], tokenizer: Tokenizer, files: list[tuple[str, int, int]]) -> Corpus:
    facts = [files, [(str(document.file), document.offset) for document in documents], tokenizer.fingerprint]
    key = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineattn" / "tokens"
    path, about = folder / f"{key}.bin", folder / f"{key}.json"
    found = _found(path, about)
    if found is None:
        counts: list[int] = []
        try:
            write_whole(path, lambda file: counts.extend(tokenised(_texts(documents), tokenizer, file)))
            found = (*counts, path.stat().st_size)
            write_whole(about, lambda file: file.write(json.dumps(found).encode()))
        except OSError as error:
            raise InputError(
                f"the tokens can't be kept in {folder} ({error.strerror}): set XDG_CACHE_HOME to another folder"
            ) from error
    return Corpus(np.memmap(path, _kind(tokenizer), "r"), *found[:2])


def _found(path: Path, about: Path) -> tuple[int, int, int] | None:
    """Bytes of text, documents, and bytes of the file with their tokens, if it is there and whole."""
    try:
        size, count, length = json.loads(about.read_bytes())
        return (size, count, length) if path.stat().st_size == length else None
    except (OSError, ValueError, TypeError):
        return None


def _utf8(text: str) -> bytes:
    """Its bytes; halves of a pair, which JSON and a terminal let through, as what they would be."""
    return text.encode(errors="surrogatepass")


def _texts(documents: Iterable[Document]) -> Iterator[str]:
    return (document.read() for document in documents)


def _kind(tokenizer: Tokenizer) -> Any:
    return np.uint16 if tokenizer.size <= 2**16 else np.uint32


def _from_hugging_face(place: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError("a tokenizer of Hugging Face needs the hf extra: pip install 'lineattn[hf]'") from error

    if not place.is_dir():
        raise InputError(
            f"--data.tokenizer {place} is no folder: name bytes, or a folder that a tokenizer was saved to"
        )
    try:
        return AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except Exception as error:  # of a library that reads anybody's files
        raise InputError(f"no tokenizer in {place}: {' '.join(str(error).split())[:200]}") from error
