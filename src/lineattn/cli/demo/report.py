"""The demo's report: one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import shlex
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from lineattn.cli.demo.result import Results
from lineattn.cli.demo.train import RECIPE, SEEDS, Digit, options
from lineattn.files import write_text

_SHOWN = 20
_MISTAKES = 20

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #5c5c5c; --paper: #fff; --card: #f4f5f7; --line: #d9dce1;
  --good: #0072b2; --bad: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a6a6a6; --paper: #17191c; --card: #212429;
  --line: #383d45; --good: #56b4e9; --bad: #ff9d66; } }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
p { max-width: 46rem; } .soft { color: var(--soft); }
.lead { background: var(--card); border-left: 4px solid var(--good); padding: .8rem 1.1rem; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: var(--soft); }
tr.chance td { color: var(--soft); border-bottom: 0; }
.scroll { overflow-x: auto; } img.curves { width: 100%; height: auto; }
.digits { display: flex; flex-wrap: wrap; gap: .6rem; padding: 0; list-style: none; }
.digits li { background: var(--card); border-radius: 6px; padding: .45rem; width: 4.5rem; text-align: center;
  font-size: .8rem; line-height: 1.35; }
.digits img { width: 4rem; height: 4rem; image-rendering: pixelated; border-radius: 3px; display: block;
  margin: 0 auto .3rem; }
.digits b { font-size: 1rem; } .right b { color: var(--good); } .wrong b { color: var(--bad); }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; white-space: pre-wrap; font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lineattn demo: attention over the layers of a network</title>
<style>{style}</style>
</head>
<body>
<h1>Attention over the layers of a network</h1>
<p class="soft">A plain ResNet beside two that look back at their earlier layers, on handwritten digits.
{runs} runs in {seconds:.0f} seconds.</p>
<p class="lead">{sentence}</p>
<p>A plain ResNet hands on the sum of what its blocks put out. Attention over depth adds a second look back behind each
block: KCLA reads a running mean of the blocks' outputs so far, weighted by the length of their keys; MRLA-light, as its
published code has it, reads the residual stream with a learned weight for each channel. The cost of both grows linearly
with the number of blocks. This demo shows that the parts work and what they cost; it is far too small to rank
methods.</p>
<h2>Result</h2>
<div class="scroll">{table}</div>
<p class="soft">Test accuracy after the last epoch, mean ± standard deviation over {seeds} seeds; no run and no epoch
was chosen by its result. MMACs: million multiply-accumulates an image. Seconds are those of one thread.</p>
<h2>How they learned</h2>
<picture>
<source srcset="{curves_dark}" media="(prefers-color-scheme: dark)">
<img class="curves" src="{curves}" alt="Training loss and validation accuracy over the epochs, and test accuracy of each
run, for the three methods">
</picture>
<p class="soft">Lines are means over the seeds, bands reach from the lowest to the highest seed.</p>
<h2>What KCLA reads</h2>
<p>The first {shown} test images, with the class that the KCLA network of seed {seed} gives and how sure it is.</p>
{sample}
<h2>Where it is wrong</h2>
<p>{mistakes_line}</p>
{mistakes}
<h2>What was run</h2>
<p>{recipe} The attention starts at zero gain, so that every network begins as the plain one; the papers' drop path is
off, since in a run this short it costs more than the attention gives. The images are the 1,797 8x8 digits that
scikit-learn bundles (Alpaydin and Kaynak, UCI, 1998), scaled to 16x16 and split once: {split}.</p>
<p>All of it again, and one of the runs by itself (with <code>OMP_NUM_THREADS=1</code> to the last digit):</p>
<pre>lineattn demo
{command}</pre>
<h2>Your own images</h2>
<p>In a folder with one folder of images a class:</p>
<pre>lineattn fit cls --data.root MY_IMAGES --model.name resnet18 --model.attn kcla --out runs/mine
lineattn test cls --ckpt_path runs/mine/checkpoints/best.ckpt
lineattn predict cls --ckpt_path runs/mine/checkpoints/best.ckpt --input photo.jpg</pre>
<h2>Versions</h2>
<dl>{facts}</dl>
</body>
</html>
"""


def write_report(results: Results, digits: list[Digit], out: Path) -> None:
    """Writes ``report.html`` in the folder of the demo.

    Args:
        results: What the runs found.
        digits: The test images as one KCLA network sees them.
        out: The folder, which holds the curves already.
    """
    wrong = sorted((digit for digit in digits if digit.predicted != digit.label), key=lambda digit: -digit.probability)
    last = results.methods[-1].summaries[0]
    command = shlex.join(["lineattn", "fit", "cls", *options("kcla", SEEDS[0], Path("runs"))])
    page = _PAGE.format(
        style=_STYLE,
        runs=sum(len(method.summaries) for method in results.methods),
        seconds=results.seconds,
        sentence=escape(results.sentence()),
        table=_table(results.rows()),
        seeds=len(SEEDS),
        curves=_png((out / "curves.png").read_bytes()),
        curves_dark=_png((out / "curves-dark.png").read_bytes()),
        shown=min(_SHOWN, len(digits)),
        seed=SEEDS[0],
        sample=_digits(digits[:_SHOWN]),
        mistakes_line=_mistakes_line(len(wrong), len(digits)),
        mistakes=_digits(wrong[:_MISTAKES]),
        recipe=f"{RECIPE['model.name']} of width {RECIPE['model.width']}, {last['epochs']} epochs of batches of "
        f"{RECIPE['data.batch_size']}, SGD with momentum 0.9, learning rate {RECIPE['optim.lr']} with one epoch of "
        "warm-up and a cosine after it.",
        split=f"{len(digits)} test images, the rest for training and validation",
        command=escape(command),
        facts=_facts(results.environment),
    )
    write_text(out / "report.html", page)


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    lines = [
        f'<tr class="{"chance" if row["method"] == "chance" else ""}">'
        + "".join(f"<td>{escape(str(value))}</td>" for value in row.values())
        + "</tr>"
        for row in rows
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _digits(digits: list[Digit]) -> str:
    items = []
    for digit in digits:
        right = digit.predicted == digit.label
        file = io.BytesIO()
        Image.frombytes("L", (digit.side, digit.side), digit.pixels).save(file, "png")
        truth = "" if right else f"<br>is {digit.label}"
        items.append(
            f'<li class="{"right" if right else "wrong"}"><img src="{_png(file.getvalue())}" alt="a {digit.label}">'
            f"<b>{digit.predicted}</b> {digit.probability:.0%}{truth}</li>"
        )
    return f'<ul class="digits">{"".join(items)}</ul>' if items else ""


def _mistakes_line(wrong: int, total: int) -> str:
    if not wrong:
        return f"Not once in {total} test images."
    shown = "all of them" if wrong <= _MISTAKES else f"the {_MISTAKES} it is surest of"
    return f"{wrong} of {total} test images; here are {shown}, the surest first."


def _facts(environment: dict[str, Any]) -> str:
    facts = {name: version for name, version in environment["versions"].items() if version}
    facts |= {key: environment[key] for key in ("git", "machine", "cores") if environment.get(key)}
    return "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())


def _png(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()
