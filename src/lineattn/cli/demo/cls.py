"""The demo of classification: plain, MRLA-light and KCLA ResNets on handwritten digits, in about a minute."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from lineattn.cli.demo.base import SEEDS, Demo, Seen, png

_SHOWN = 20
_MISTAKES = 20
# Depth 14: six blocks in three stages. The attention starts at zero gain, as by default: from the papers' start, KCLA
# ends anywhere between 76 and 96 % in so few steps at this rate. The papers' drop path of 0.2 is off, since it costs
# more in a run this short than the attention gives.
_RECIPE = {
    "model.name": "resnet14_cifar",
    "model.width": "8",
    "data.name": "digits",
    "data.batch_size": "64",
    "data.num_workers": "0",
    "optim.lr": "0.1",
    "optim.warmup_epochs": "1",
    "optim.per_step": "true",
    "trainer.max_epochs": "4",
}


class Digit(NamedTuple):
    """A test image, and what a network says of it: pixels row by row, classes, probability of the predicted one."""

    pixels: bytes
    side: int
    label: int
    predicted: int
    probability: float


def look(out: Path) -> Seen:
    """The test images as KCLA sees them."""
    import torch

    from lineattn.cli.restore import restore

    trained = restore(CLS.checkpoint(out, "kcla"))
    test = trained.data.splits.test
    assert test is not None
    found = []
    with torch.no_grad():
        for batch in trained.data.eval_loader(test):
            probability, predicted = trained.net(batch.inputs).softmax(1).max(1)
            for place, p, name in zip(batch.index.tolist(), probability.tolist(), predicted.tolist(), strict=True):
                image = test.read(place)[0]
                found.append(Digit(image.numpy().tobytes(), len(image), test.labels[place], name, p))
    return Seen({"chance": 100 / len(trained.classes)}, len(found), sections(found))


def sections(digits: list[Digit]) -> str:
    """The first digits, and those that are taken for others."""
    wrong = sorted((digit for digit in digits if digit.predicted != digit.label), key=lambda digit: -digit.probability)
    return f"""<h2>What KCLA reads</h2>
<p>The first {min(_SHOWN, len(digits))} test images, with the class that the KCLA network of seed {SEEDS[0]} gives and \
how sure it is.</p>
{_digits(digits[:_SHOWN])}
<h2>Where it is wrong</h2>
<p>{_mistakes_line(len(wrong), len(digits))}</p>
{_digits(wrong[:_MISTAKES])}"""


def _digits(digits: list[Digit]) -> str:
    items = []
    for digit in digits:
        right = digit.predicted == digit.label
        file = io.BytesIO()
        Image.frombytes("L", (digit.side, digit.side), digit.pixels).save(file, "png")
        truth = "" if right else f"<br>is {digit.label}"
        items.append(
            f'<li class="{"right" if right else "wrong"}"><img src="{png(file.getvalue())}" alt="a {digit.label}">'
            f"<b>{digit.predicted}</b> {digit.probability:.0%}{truth}</li>"
        )
    return f'<ul class="digits">{"".join(items)}</ul>' if items else ""


def _mistakes_line(wrong: int, total: int) -> str:
    if not wrong:
        return f"Not once in {total} test images."
    shown = "all of them" if wrong <= _MISTAKES else f"the {_MISTAKES} it is surest of"
    return f"{wrong} of {total} test images; here are {shown}, the surest first."


CLS = Demo(
    command="demo",
    task="cls",
    methods={"none": "plain", "mrla_light": "MRLA-light", "kcla": "KCLA"},
    recipe=_RECIPE,
    attention={"model.attn_args": "{drop_path: 0.0}"},
    metric="acc1",
    metric_name="accuracy",
    look=look,
    opening="Nine networks on 16x16 images of handwritten digits: plain, MRLA-light and KCLA, three seeds each.",
    subtitle="A plain ResNet beside two that look back at their earlier layers, on handwritten digits.",
    intro="""A plain ResNet hands on the sum of what its blocks put out. Attention over depth adds a second look back
behind each block: KCLA reads a running mean of the blocks' outputs so far, weighted by the length of their keys;
MRLA-light, as its published code has it, reads the residual stream with a learned weight for each channel. The cost of
both grows linearly with the number of blocks.""",
    note="",
    about=f"""{_RECIPE["model.name"]} of width {_RECIPE["model.width"]}, {_RECIPE["trainer.max_epochs"]} epochs of
batches of {_RECIPE["data.batch_size"]}, SGD with momentum 0.9, learning rate {_RECIPE["optim.lr"]} with one epoch of
warm-up and a cosine after it. The attention starts at zero gain, so that every network begins as the plain one; the
papers' drop path is off, since in a run this short it costs more than the attention gives. The images are the 1,797 8x8
digits that scikit-learn bundles (Alpaydin and Kaynak, UCI, 1998), scaled to 16x16 and split once: {{images}} test
images, the rest for training and validation.""",
    own="In a folder with one folder of images a class:",
    own_fit="--data.root MY_IMAGES --model.name resnet18 --model.attn kcla",
    style="""
.digits { display: flex; flex-wrap: wrap; gap: .6rem; padding: 0; list-style: none; }
.digits li { background: var(--card); border-radius: 6px; padding: .45rem; width: 4.5rem; text-align: center;
  font-size: .8rem; line-height: 1.35; }
.digits img { width: 4rem; height: 4rem; image-rendering: pixelated; border-radius: 3px; display: block;
  margin: 0 auto .3rem; }
.digits b { font-size: 1rem; } .right b { color: var(--good); } .wrong b { color: var(--bad); }
""",
)
