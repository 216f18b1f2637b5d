"""Unpacks a part of CIFAR-10 from a tar of image files: the data set of `make study`.

Usage: python tools/study_data.py cifar10_jpeg_60k.tar.xz FOLDER [--train 500] [--test 500]

Members are ``train/CLASS/NAME`` and ``test/CLASS/NAME``; of each class the first files, in the order of their names,
are kept. The archive is read once, from front to back.
"""

from __future__ import annotations

import argparse
import tarfile
from collections import defaultdict
from pathlib import Path, PurePosixPath


def unpack(archive: Path, folder: Path, wanted: dict[str, int]) -> dict[str, int]:
    """Writes the first ``wanted[split]`` files of every class of every split; returns how many there are a split.

    Raises:
        SystemExit: A class has fewer files than wanted.
    """
    classes: dict[tuple[str, str], dict[str, bytes]] = defaultdict(dict)
    with tarfile.open(archive, "r|*") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if not member.isfile() or len(parts) != 3 or parts[0] not in wanted:
                continue
            content = tar.extractfile(member)
            assert content is not None
            classes[parts[0], parts[1]][parts[2]] = content.read()
    counts = dict.fromkeys(wanted, 0)
    for (split, name), files in classes.items():
        if len(files) < wanted[split]:
            raise SystemExit(f"{archive}: {split}/{name} has {len(files)} files, fewer than {wanted[split]}")
        place = folder / split / name
        place.mkdir(parents=True, exist_ok=True)
        for file in sorted(files)[: wanted[split]]:
            (place / file).write_bytes(files[file])
            counts[split] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=500, help="training images a class")
    parser.add_argument("--test", type=int, default=500, help="test images a class")
    options = parser.parse_args()
    print(unpack(options.archive, options.folder, {"train": options.train, "test": options.test}))


if __name__ == "__main__":
    main()
