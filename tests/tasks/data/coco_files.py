"""A small data set of COCO's format on disk, to be damaged by tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Json = dict[str, Any]


def content(
    count: int = 4, *, ids: tuple[int, ...] = (7, 42), size: tuple[int, int] = (40, 30), first: int = 1
) -> Json:
    """Images with an object of each category: boxes with a polygon each."""
    width, height = size
    images = [
        {"id": first + i, "file_name": f"{first + i:03}.png", "width": width, "height": height} for i in range(count)
    ]
    annotations = [
        {
            "id": 100 * image["id"] + own,
            "image_id": image["id"],
            "category_id": own,
            "bbox": [2 + 12 * place, 3, 10, 8],
            "area": 80,
            "iscrowd": 0,
            "segmentation": [box(2 + 12 * place, 3, 10, 8)],
        }
        for image in images
        for place, own in enumerate(ids)
    ]
    categories = [{"id": own, "name": f"kind {own}"} for own in reversed(ids)]
    return {"images": images, "annotations": annotations, "categories": categories}


def box(x: float, y: float, width: float, height: float) -> list[float]:
    """A box as a polygon."""
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def runs(height: int, width: int, *, rows: int) -> Json:
    """The upper rows of an image as uncompressed run lengths."""
    return {"size": [height, width], "counts": [0, *([rows, height - rows] * width)]}


def write(root: Path, split: str, given: Json, *, annotations: str = "", images: str = "") -> Path:
    """Writes a split, by default as annotations/SPLIT.json and SPLIT/NAME; returns the file of annotations."""
    file = root / (annotations or f"annotations/{split}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(given))
    for image in given["images"]:
        path = root / (images or split) / image["file_name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        draws = np.random.default_rng([*split.encode(), image["id"]])
        pixels = draws.integers(0, 255, (image["height"], image["width"], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return file


def own_score(truth: Json, kind: str) -> float:
    """COCO's average precision of the ground truth as its own detections."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    gold = COCO()
    gold.dataset = truth
    gold.createIndex()
    found = [{**one, "score": 1.0} for one in truth["annotations"] if not one["iscrowd"]]
    # loadRes would take areas of masks from boxes.
    results = COCO()
    results.dataset = {**truth, "annotations": found}
    results.createIndex()
    evaluation = COCOeval(gold, results, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return float(evaluation.stats[0])
