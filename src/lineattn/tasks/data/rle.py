"""Masks as COCO stores them, polygons or run lengths, by pycocotools; it is imported where a mask is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lineattn.errors import InputError

Segmentation = list[list[float]] | dict[str, Any]  # polygons, or run lengths with their size

_FAR = 100_000.0  # pixels; pycocotools takes memory by the length of a polygon


class BrokenMask(InputError):
    """A mask that can't be decoded; what is wrong with it, without the file that it is of."""


def decode(segmentation: Segmentation, height: int, width: int) -> np.ndarray:
    """A mask of an image of this size.

    Shape:
        Output: (height, width), uint8, 0 or 1.

    Raises:
        BrokenMask: It can't be decoded.
        InputError: pycocotools is missing.
    """
    api = _api()
    try:
        if isinstance(segmentation, dict):
            return api.decode(_packed(api, segmentation, height, width))
        points = np.concatenate([np.asarray(polygon, dtype=np.float64) for polygon in segmentation])
        if not np.abs(points).max() < _FAR:  # NaN too
            raise BrokenMask("a polygon that reaches to nowhere")
        return api.decode(api.merge(api.frPyObjects(segmentation, height, width)))
    except BrokenMask:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise BrokenMask("a mask that can't be decoded") from error


def encode(mask: np.ndarray) -> dict[str, Any]:
    """A mask as compressed run lengths, fit for JSON.

    Shape:
        Input: (H, W), uint8, 0 or 1.

    Example:
        >>> encode(np.eye(2, dtype=np.uint8))["size"]
        [2, 2]
    """
    packed = _api().encode(np.asfortranarray(mask))
    return {"size": list(packed["size"]), "counts": packed["counts"].decode("ascii")}


def checked(given: Any, height: int, width: int) -> tuple[Segmentation | None, str]:
    """What can be told of an annotation's segmentation without decoding it.

    Polygons of less than three points are left out.

    Returns:
        The segmentation, or None where there is none; and what is wrong with it, or nothing.

    Example:
        >>> checked([[1, 1, 5, 1, 5, 5], [2, 2]], 10, 10)
        ([[1, 1, 5, 1, 5, 5]], '')
        >>> checked({"size": [10, 9], "counts": [90]}, 10, 10)
        (None, 'a mask of 9x10')
    """
    if not given:
        return None, ""
    if isinstance(given, dict):
        size, counts = given.get("size"), given.get("counts")
        if not (isinstance(size, list) and len(size) == 2 and isinstance(counts, (list, str)) and counts):
            return None, "a mask without size and counts"
        if size != [height, width]:
            return None, f"a mask of {size[1]}x{size[0]}"
        return given, ""
    if not isinstance(given, list) or not all(isinstance(polygon, list) for polygon in given):
        return None, "a segmentation that is neither polygons nor run lengths"
    if any(len(polygon) % 2 for polygon in given):
        return None, "a polygon whose last point has one coordinate"
    return [polygon for polygon in given if len(polygon) >= 6] or None, ""


def _packed(api: Any, runs: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    counts: str | Sequence[int] = runs["counts"]
    plain = unpacked(counts) if isinstance(counts, str) else counts
    # pycocotools leaves what is missing to whatever was in memory.
    if not all(isinstance(count, int) and count >= 0 for count in plain) or sum(plain) != math.prod((height, width)):
        raise BrokenMask("run lengths that don't add up to the image")
    return {"size": [height, width], "counts": counts} if counts is not plain else api.frPyObjects(runs, height, width)


def unpacked(counts: str) -> list[int]:
    """Run lengths out of COCO's text of them.

    A character has five bits and one that says whether more follow; from the fourth on, a length is the difference to
    the last but one.

    Example:
        >>> unpacked(encode(np.eye(3, dtype=np.uint8))["counts"])
        [0, 1, 3, 1, 3, 1]
    """
    found: list[int] = []
    value = shift = 0
    for code in counts.encode("utf-8"):
        bits = code - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            value -= (bits & 0x10) << (shift - 4)
            found.append(value + found[-2] if len(found) > 2 else value)
            value = shift = 0
    return found


def _api() -> Any:
    try:
        from pycocotools import mask
    except ModuleNotFoundError as error:
        raise InputError("masks of objects need pycocotools: pip install 'lineattn[detection]'") from error
    return mask
