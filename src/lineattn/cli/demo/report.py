"""The report of a demo: one HTML file that needs nothing beside it."""

from __future__ import annotations

import shlex
from html import escape
from pathlib import Path
from typing import Any

from lineattn.cli.demo.base import SEEDS, Seen, png
from lineattn.cli.demo.result import Results
from lineattn.files import write_text

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
tr.floor td { color: var(--soft); border-bottom: 0; }
.scroll { overflow-x: auto; } img.curves { width: 100%; height: auto; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; white-space: pre-wrap; font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lineattn {command}: attention over the layers of a network</title>
<style>{style}</style>
</head>
<body>
<h1>Attention over the layers of a network</h1>
<p class="soft">{subtitle} {runs} runs in {seconds:.0f} seconds.</p>
<p class="lead">{sentence}</p>
<p>{intro} This demo shows that the parts work and what they cost; it is far too small to rank methods.</p>
<h2>Result</h2>
<div class="scroll">{table}</div>
<p class="soft">{note} Test {metric} after the last epoch, mean ± standard deviation over {seeds} seeds; no run and no
epoch was chosen by its result. MMACs: million multiply-accumulates an image. Seconds are those of one thread.</p>
<h2>How they learned</h2>
<picture>
<source srcset="{curves_dark}" media="(prefers-color-scheme: dark)">
<img class="curves" src="{curves}" alt="Training loss and validation {metric} over the epochs, and test {metric} of each
run, for each method">
</picture>
<p class="soft">Lines are means over the seeds, bands reach from the lowest to the highest seed.</p>
{sections}
<h2>What was run</h2>
<p>{about}</p>
<p>All of it again, and one of the runs by itself (with <code>OMP_NUM_THREADS=1</code> to the last digit):</p>
<pre>lineattn {command}
{fit}</pre>
<h2>Your own images</h2>
<p>{own}</p>
<pre>lineattn fit {task} {own_fit} --out runs/mine
lineattn test {task} --ckpt_path runs/mine/checkpoints/best.ckpt
lineattn predict {task} --ckpt_path runs/mine/checkpoints/best.ckpt --input photo.jpg</pre>
<h2>Versions</h2>
<dl>{facts}</dl>
</body>
</html>
"""


def write_report(results: Results, seen: Seen, out: Path) -> None:
    """Writes ``report.html`` in the folder of the demo.

    Args:
        results: What the runs found.
        seen: What a look at the test images gave.
        out: The folder, which holds the curves already.
    """
    demo = results.demo
    page = _PAGE.format(
        command=demo.command,
        style=_STYLE + demo.style,
        subtitle=demo.subtitle,
        runs=sum(len(method.summaries) for method in results.methods),
        seconds=results.seconds,
        sentence=escape(results.sentence()),
        intro=demo.intro,
        table=_table(results),
        note=demo.note,
        metric=demo.metric_name,
        seeds=len(SEEDS),
        curves=png((out / "curves.png").read_bytes()),
        curves_dark=png((out / "curves-dark.png").read_bytes()),
        sections=seen.sections,
        about=demo.about.format(images=seen.images),
        fit=escape(shlex.join(["lineattn", "fit", demo.task, *demo.options("kcla", SEEDS[0], Path("runs"))])),
        own=demo.own,
        task=demo.task,
        own_fit=demo.own_fit,
        facts=_facts(results.environment),
    )
    write_text(out / "report.html", page)


def _table(results: Results) -> str:
    rows = results.rows()
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    lines = [
        f'<tr class="{"floor" if row["method"] in results.floors else ""}">'
        + "".join(f"<td>{escape(str(value))}</td>" for value in row.values())
        + "</tr>"
        for row in rows
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _facts(environment: dict[str, Any]) -> str:
    facts = {name: version for name, version in environment["versions"].items() if version}
    facts |= {key: environment[key] for key in ("git", "machine", "cores") if environment.get(key)}
    return "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
