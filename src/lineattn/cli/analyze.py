"""`lineattn analyze`: what attention over depth does in a trained network, and what attention over tokens can do."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lineattn.errors import InputError, unknown
from lineattn.files import need_folder, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from lineattn.analysis.record import Stretch
    from lineattn.cli.restore import Trained

Row = dict[str, Any]

TRAINED = {
    "similarity": "cosine between the keys of different layers: heat map, histogram, each head",
    "decay": "what is left of a layer at a distance: shares, products of learned decays, influence by perturbation",
    "depth-map": "which layer attends to which, and the gate and temperature of each head",
}
KINDS = TRAINED | {
    "conditions": "methods of the token axis: linear cost, dynamic memory, static approximation, least parameters"
}


def run(args: list[str]) -> int:
    """Runs one kind of analysis: CSV files, a picture, and a table."""
    kinds = "\n".join(f"  {name:<12} {line}" for name, line in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="lineattn analyze",
        description="What attention over depth does in the network of a checkpoint, on real images; and what attention "
        f"over tokens can do (conditions).\n\nkinds:\n{kinds}\n\n`lineattn analyze KIND --help` lists the options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("options", metavar="OPTIONS", nargs=argparse.REMAINDER, help="those of the kind")
    kind, rest = vars(parser.parse_args(args)).values()
    if kind not in KINDS:
        raise unknown("kind of analysis", kind, KINDS)
    if kind == "conditions":
        from lineattn.cli import analyze_conditions

        return analyze_conditions.run(rest)
    return _trained(kind, rest)


def _trained(kind: str, args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"lineattn analyze {kind}",
        description=f"Of a trained network, on real images: {TRAINED[kind]}.",
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", type=Path, required=True, help="checkpoint of a run")
    parser.add_argument("--input", help="an image, a folder or a glob (default: the run's validation or test images)")
    parser.add_argument("--images", type=int, default=64, help="how many, spread evenly over the set (default: 64)")
    parser.add_argument("--out", type=Path, help="folder for the files (default: analysis/ in the run's folder)")
    options = parser.parse_args(args)
    if options.images < 1:
        raise InputError(f"--images is {options.images}; it must be at least 1")

    need_folder(options.out)
    from lineattn.analysis.record import record
    from lineattn.cli.restore import restore

    trained = restore(options.ckpt_path)
    if trained.task != "cls":
        raise InputError(f"{options.ckpt_path} is of the task {trained.task}: analyze {kind} is for classifiers so far")
    here = options.ckpt_path.parent
    out = options.out or (here.parent if here.name == "checkpoints" else here) / "analysis"
    images = _images(trained, options.input, options.images)
    found = record(trained.net, images)
    title = f"{trained.arguments['name']}, {trained.arguments.get('attn')}, {len(images)} images"
    analyse = {"similarity": _similarity, "decay": _decay, "depth-map": _depth_map}[kind]
    written = analyse(found, title, out)
    print(f"wrote {', '.join(map(str, written))}")
    return 0


def _images(trained: Trained, pattern: str | None, count: int) -> Tensor:
    """Images as the network gets them in evaluation, spread evenly over their set, which is sorted by class."""
    import torch

    from lineattn.tasks.data.source import Files
    from lineattn.tasks.predict import find_images

    data = trained.visual
    if pattern is None:
        source = data.splits.val if data.splits.val is not None else data.splits.test
        if source is None:
            raise InputError("the run's data set has no validation and no test images; name some with --input")
    else:
        paths = find_images(pattern)
        source = Files(paths, [0] * len(paths), data.channels)
    total = len(source)
    source = source.subset([i * total // min(count, total) for i in range(min(count, total))])
    batches = [batch for batch in data.eval_loader(source)]
    if error := next((batch.error for batch in batches if batch.error), None):
        raise InputError(error.partition(", or pass ")[0])
    images = torch.cat([batch.inputs for batch in batches])
    if not len(images):
        raise InputError("none of the images could be read")
    return images


def _similarity(found: Sequence[Stretch], title: str, out: Path) -> list[Path]:
    from lineattn.analysis.keys import histogram_rows, similarity_rows
    from lineattn.analysis.pictures import draw_similarity

    rows, histogram = similarity_rows(found), histogram_rows(found)
    files = [out / name for name in ("similarity.csv", "similarity_histogram.csv", "similarity.png")]
    write_csv(files[0], rows)
    write_csv(files[1], histogram)
    draw_similarity(rows, histogram, f"Keys of different layers: {title}", files[2])
    shown = []
    for stage, own in _by(rows, "stage").items():
        heads = [fmean(row["cosine"] for row in head) for head in _by(own, "head").values()]
        shown.append([str(stage), *(f"{value:.3f}" for value in (fmean(heads), min(heads), max(heads)))])
    _table("cosine between keys of two layers", ["stage", "mean", "least head", "greatest head"], shown)
    return files


def _decay(found: Sequence[Stretch], title: str, out: Path) -> list[Path]:
    from lineattn.analysis.pictures import draw_decay
    from lineattn.analysis.reach import decay_rows

    rows = decay_rows(found)
    files = [out / name for name in ("decay.csv", "decay.png")]
    write_csv(files[0], rows)
    draw_decay(rows, f"What is left of a layer: {title}", files[1])
    shown = []
    for stage, own in _by(rows, "stage").items():
        for measure, some in _by(own, "measure").items():
            means = {d: fmean(row["mean"] for row in at) for d, at in _by(some, "distance").items()}
            cells = [f"{means[d]:.3g}" if d in means else "" for d in (0, 1, 2, 4, 8, 16)]
            shown.append([str(stage), measure, *cells])
    _table("left of a layer, by distance in layers", ["stage", "measure", "0", "1", "2", "4", "8", "16"], shown)
    return files


def _depth_map(found: Sequence[Stretch], title: str, out: Path) -> list[Path]:
    from lineattn.analysis.pictures import draw_map
    from lineattn.analysis.reach import head_rows, map_rows

    rows, heads = map_rows(found), head_rows(found)
    files = [out / name for name in ("depth_map.csv", "depth_map.png")]
    write_csv(files[0], rows)
    draw_map(rows, heads, f"From layer to layer: {title}", files[1])
    if heads:
        files.append(out / "heads.csv")
        write_csv(files[-1], heads)
        shown = []
        for stage, own in _by(heads, "stage").items():
            gates = [row["gate"] for row in own]
            divisors = [row["temperature"] for row in own if row["temperature"] is not None]
            span = f"{min(divisors):.3g} - {max(divisors):.3g}" if divisors else ""
            shown.append([str(stage), f"{fmean(gates):.3f}", f"{min(gates):.3f} - {max(gates):.3f}", span])
        _table("heads", ["stage", "gate, mean", "gates", "temperatures"], shown)
    return files


def _by(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from lineattn.tasks import console

    console.table(title, columns, rows)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
