"""What `lineattn predict TASK` takes and does: a pair of functions a task."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.cli import LightningArgumentParser

from lineattn.errors import InputError
from lineattn.models.generate import generate
from lineattn.models.language import LanguageModel
from lineattn.models.segmentation import SegmentationNetwork
from lineattn.tasks import console, predict, seg_predict
from lineattn.tasks.data.corpus import Document
from lineattn.tasks.data.images import ImageData
from lineattn.tasks.data.scenes import Flip, SceneData
from lineattn.tasks.data.source import Files
from lineattn.tasks.data.text import TextData
from lineattn.tasks.ranges import require
from lineattn.tasks.tiles import Tiled

if TYPE_CHECKING:
    from lineattn.cli.task_options import TaskCLI


@dataclass(frozen=True)
class Prediction:
    """How a task predicts.

    Attributes:
        input: What `--input` is, for the help.
        options: Adds those that are its own.
        run: Says what the network makes of the input, and writes it; returns what it found, and the text of a file of
            that name, if there is one.
    """

    input: str
    options: Callable[[LightningArgumentParser], None]
    run: Callable[[TaskCLI], tuple[dict[str, Any], str]]
    writes: str = "predictions.csv"


def _class_options(parser: LightningArgumentParser) -> None:
    parser.add_argument("--top", type=int, default=3, help="classes to print an image")


def _images(cli: TaskCLI) -> list[Path]:
    if cli.config.input is None:
        raise InputError("--input is missing: name an image, a folder or a glob in quotes")
    return predict.find_images(cli.config.input)


def _predict_classes(cli: TaskCLI) -> tuple[dict[str, Any], str]:
    assert isinstance(cli.data, ImageData)
    paths = _images(cli)
    loader = cli.data.eval_loader(Files(paths, [0] * len(paths), cli.data.channels))
    batches: Any = cli.trainer.predict(cli.module, dataloaders=loader)
    found = predict.gather(paths, batches)
    predict.show(found, cli.classes, cli.config.top)
    probabilities = {str(one.path): dict(zip(cli.classes, one.probabilities, strict=True)) for one in found}
    return probabilities, predict.as_csv(found, cli.classes)


def _mask_options(parser: LightningArgumentParser) -> None:
    parser.add_argument(
        "--probabilities", type=bool, default=False, help="write those of all classes too, as NumPy files"
    )
    parser.add_argument(
        "--tile", type=int, default=0, help="side of what the network sees at once; 0 for the whole image"
    )
    parser.add_argument(
        "--overlap",
        type=int | None,
        default=None,
        help="pixels that a tile sees beyond its own, on each side; by default as far as a pixel reaches in the "
        "network, but no more than a quarter of the tile",
    )
    parser.add_argument(
        "--flips",
        type=list[Flip] | None,
        default=None,
        help="see images mirrored too, horizontal, vertical or both, and take the mean",
    )
    parser.add_argument(
        "--scales",
        type=list[float],
        default=[1.0],
        help="factors of the images' size, such as [0.75, 1, 1.25], over which the mean is taken",
    )


def _predict_masks(cli: TaskCLI) -> tuple[dict[str, Any], str]:
    assert isinstance(cli.data, SceneData) and cli.stored is not None
    paths = _images(cli)
    scales: list[float] = cli.config.scales
    require(bool(scales) and min(scales) > 0, "scales", scales, "one or more factors above 0")
    precision = str(cli.trainer.precision)
    if precision.endswith("-true") and precision != "32-true":
        raise InputError(f"--trainer.precision {precision}: masks are predicted in 32-true or a mixed one, pass that")
    device = cli.trainer.strategy.root_device
    module = cli.module.to(device).eval()
    with cli.trainer.precision_plugin.forward_context():
        found = seg_predict.segment(
            _tiled(cli, cli.data) or (lambda images: module(images.to(device))),
            paths,
            cli.data,
            cli.classes,
            cli.stored.get("palette"),
            cli.out / "predictions",
            keep_probabilities=cli.config.probabilities,
            skip=cli.module.unreadable.note,
            flips=cli.config.flips or (),
            scales=scales,
        )
    seg_predict.show(found, cli.classes)
    console.say(f"masks and overlays: {cli.out / 'predictions'}")
    pixels = {str(one.path): dict(zip(cli.classes, one.pixels, strict=True)) for one in found}
    return pixels, seg_predict.as_csv(found, cli.classes)


def _tiled(cli: TaskCLI, data: SceneData) -> Tiled | None:
    """The network in tiles, where they are asked for; says how that differs from the whole image."""
    tile, overlap = cli.config.tile, cli.config.overlap
    if not tile:
        if overlap is not None:
            raise InputError(f"--overlap {overlap} is that of tiles: give the side of one, --tile, too")
        return None
    if data.fit == "resize":
        raise InputError(
            f"--tile {tile}: this network sees images resized to squares of {data.image_size} pixels (--data.fit "
            "resize), which have no tiles: leave --tile out"
        )
    net = cli.module.evaluated_net
    assert isinstance(net, SegmentationNetwork)
    tiled = Tiled(net, tile, overlap, channels=data.channels)
    console.note(tiled.notice)
    return tiled


def _text_options(parser: LightningArgumentParser) -> None:
    parser.add_argument("--prompt", type=str | None, default=None, help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=256, help="how many to write at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token always")
    parser.add_argument("--top_k", type=int, default=0, help="choose among so many of the likeliest; 0 is all")
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="choose among the likeliest that have this probability together"
    )


def _continue_text(cli: TaskCLI) -> tuple[dict[str, Any], str]:
    assert isinstance(cli.data, TextData)
    prompt, tokenizer, config = _prompt(cli), cli.data.tokenizer, cli.config
    require(config.tokens >= 1, "tokens", config.tokens, "1 or more")
    device = cli.trainer.strategy.root_device
    net = cli.module.evaluated_net.to(device).eval()
    assert isinstance(net, LanguageModel)
    begin = torch.tensor([[tokenizer.separator, *tokenizer.encode(prompt).tolist()]], device=device)
    settings = {key: config[key] for key in ("temperature", "top_k", "top_p")}
    found: list[int] = []
    console.say(console.plain(prompt), end="")
    shown, began = "", time.perf_counter()
    with cli.trainer.precision_plugin.forward_context():
        for token in islice(generate(net, begin, **settings, seed=cli.seed), config.tokens):
            if int(token) == tokenizer.separator:
                break
            found.append(int(token))
            text = tokenizer.decode(found)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # which stands for the rest of a character
                console.say(console.plain(text[len(shown) :]), end="")
                shown = text
    seconds = time.perf_counter() - began
    console.say("")
    size = net.state_size(begin.shape[1] + len(found))
    console.note(f"{len(found)} tokens, {1e3 * seconds / max(len(found), 1):.2f} ms each; state: {size:,} numbers")
    text = tokenizer.decode(found)
    return {"prompt": prompt, "continuation": text, "tokens": len(found), "seconds": seconds}, f"{prompt}{text}\n"


def _prompt(cli: TaskCLI) -> str:
    given, file = cli.config.prompt, cli.config.input
    if given is not None and file is not None:
        raise InputError("--prompt and --input both say what the text begins with: leave one out")
    return Document(Path(file)).read() if file is not None else given or ""


_IMAGES = "an image, a folder or a glob"
PREDICTIONS = {
    "cls": Prediction(_IMAGES, _class_options, _predict_classes),
    "seg": Prediction(_IMAGES, _mask_options, _predict_masks),
    "lm": Prediction("a text file that the text begins with", _text_options, _continue_text, "continuation.txt"),
}
