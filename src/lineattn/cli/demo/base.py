"""What a demo is: what it trains on what, and how its report tells of it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SEEDS = (1, 2, 3)


class Seen(NamedTuple):
    """What a look at the test images gave.

    Attributes:
        floors: Results that take no training, by name, in percent.
        images: How many test images there are.
        sections: Those of the report that show what the networks say of them, as HTML.
    """

    floors: dict[str, float]
    images: int
    sections: str


@dataclass(frozen=True)
class Demo:
    """A demo: the same recipe for each method, from each of `SEEDS`.

    Attributes:
        command: What it is called by, after `lineattn`.
        task: One of `lineattn.tasks.kinds.KINDS`.
        methods: Titles of the methods by name; the others are compared with the first, the plain network.
        recipe: Options of all runs.
        attention: Further options of the runs with attention.
        metric: Key of what is compared, a percentage, the larger the better.
        metric_name: The same in words.
        look: Looks at the test images through networks of finished runs, given the demo's folder. It is called in a
            process of its own, since it needs PyTorch.
        opening: What is said on the screen first.
        subtitle: What is compared with what, for the report.
        intro: How the methods differ, for the report.
        note: What a reader has to know of the metric, for the report.
        about: The recipe and the images, for the report; `{images}` is the number of test images.
        own: What one's own images have to look like, for the report.
        own_fit: Options to train on them with.
        style: Rules of the sections' own.
    """

    command: str
    task: str
    methods: Mapping[str, str]
    recipe: Mapping[str, str]
    attention: Mapping[str, str]
    metric: str
    metric_name: str
    look: Callable[[Path], Seen]
    opening: str
    subtitle: str
    intro: str
    note: str
    about: str
    own: str
    own_fit: str
    style: str

    def options(self, attn: str, seed: int, out: Path) -> list[str]:
        """The command-line options of one run."""
        settings = {**self.recipe, **({**self.attention, "model.attn": attn} if attn != "none" else {})}
        settings |= {"seed_everything": str(seed), "out": str(self.folder(out, attn, seed))}
        return [part for key, value in settings.items() for part in (f"--{key}", value)]

    def folder(self, out: Path, attn: str, seed: int) -> Path:
        """The run folder of one run."""
        return out / f"{attn}-{seed}"

    def checkpoint(self, out: Path, attn: str) -> Path:
        """The last weights of the first seed, which the report looks through."""
        return self.folder(out, attn, SEEDS[0]) / "checkpoints" / "last.ckpt"


def png(data: bytes) -> str:
    """A picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
