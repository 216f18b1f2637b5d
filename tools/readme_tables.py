"""Writes the tables of README.md and docs/ from results/*.json, between the markers; with --check, only compares.

`make results` runs the commands that the numbers come from, then this.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lineattn.analysis.runs import paired_interval, verdict
from lineattn.cli.analyze_conditions import verdict as verdict_of
from lineattn.cli.compare import markdown, spread
from lineattn.cli.demo.cls import CLS
from lineattn.cli.demo.result import Method

ROOT = Path(__file__).parents[1]


def demo() -> str:
    """Accuracy on the bundled digits."""
    found = _read("demo")
    rows = [Method(CLS, part["name"], part["runs"], []).row() for part in found["methods"]]
    rows.append(dict.fromkeys(rows[0], "") | {"method": "chance", "test accuracy, %": f"{found['chance']:.0f}"})
    return "\n\n".join([markdown(rows, list(rows[0])), found["sentence"], _origin("`make demo`", found["environment"])])


def bench() -> str:
    """Time and memory against the plain network."""
    parts = []
    for path in sorted((ROOT / "results").glob("bench_depth_*.json")):
        found = json.loads(path.read_text())
        rows, setting = found["rows"], found["setting"]
        methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "none"))
        table = [_bench_row(mode, rows, methods) for mode in dict.fromkeys(row["mode"] for row in rows)]
        title = (
            f"**{rows[0]['network']}**, {setting['batch_size']} images of {setting['image_size']} pixels a call, "
            f"float32, channels_last, {setting['allocator']} allocator; medians of {setting['rounds']} calls in turns:"
        )
        parts += [title, markdown(table, list(table[0])), _origin_of(found)]
    if not parts:
        raise FileNotFoundError("results/bench_depth_*.json")
    return "\n\n".join(parts)


def _bench_row(mode: str, rows: list[dict[str, Any]], methods: list[str]) -> dict[str, Any]:
    of_mode = {row["method"]: row for row in rows if row["mode"] == mode}
    plain = of_mode["none"]
    size = f"{plain['saved_mb']:,.0f} MB" if mode == "saved" else f"{plain['cpu_ms']:,.0f} ms"
    ratios = {name: of_mode[name].get("cpu_ratio", of_mode[name].get("saved_ratio")) for name in methods}
    label = "saved for the backward, bytes" if mode == "saved" else f"{mode}, processor time"
    return {"": label, "plain": size} | {name: f"{ratio:.2f}x" for name, ratio in ratios.items()}


# What a row measures: the label of the table's row, how a number is written, and the ratio that stands beside it.
_FIGURES = {
    "cpu_ms": ("processor time", "{:,.1f} ms", "cpu_ratio"),
    "cpu_us": ("processor time", "{:,.0f} µs", "cpu_ratio"),
    "saved_mb": ("saved for the backward", "{:,.1f} MB", None),
    "saved_maps": ("maps saved a layer", "{:.2f}", None),
    "state_mb": ("state", "{:,.2f} MB", None),
    "exponent": ("", "{:.2f}", None),
}
_GROUP = {"length": "{:,} tokens", "context": "{:,} tokens", "positions": "{:,} positions", "size": "{}", "mode": "{}"}


def layer() -> str:
    """KCLA by itself against its published form."""
    found = _read("bench_depth")
    rows = []
    for row in found["rows"]:
        if row["part"] == "chain":
            row = {key: value for key, value in row.items() if key != "saved_mb"}
        elif row["part"] == "growth" and "exponent" in row:
            row |= {"mode": f"exponent of {row['name']}", "name": "ours"}
        if row["part"] != "growth" or "exponent" in row:
            rows.append(row)
    return _beside(found, rows)


def operator(subject: str) -> str:
    """An operator against what it is compared with, one column each."""
    found = _read(f"bench_{subject}")
    return _beside(found, found["rows"])


def _beside(found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["name"] for row in rows))
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        shared = [form.format(row[key]) for key, form in _GROUP.items() if row.get(key, "saved") != "saved"]
        for key, (what, form, ratio) in _FIGURES.items():
            if key in row:
                label = ", ".join([*shared, what] if what else shared)
                beside = f" ({row[ratio]:.2f}x)" if row.get(ratio, 1) != 1 else ""
                table.setdefault(label, {"": label} | dict.fromkeys(names, ""))[row["name"]] = (
                    form.format(row[key]) + beside
                )
    setting = found["setting"]
    title = (
        f"float32, {setting['allocator']} allocator; medians of {setting['rounds']} calls in turns; in brackets, "
        "times ours:"
    )
    return "\n\n".join([title, markdown(list(table.values()), ["", *names]), _origin_of(found)])


def _origin_of(found: dict[str, Any]) -> str:
    return _origin(f"`{found['command']}`", found["environment"])


def _read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def _origin(command: str, environment: dict[str, Any]) -> str:
    commit = re.sub(r"\b([0-9a-f]{10})[0-9a-f]+\b", r"\1", environment["git"] or "unknown")
    versions, native = environment["versions"], environment["native"]
    kernels = f", native kernels {native}" if native else ""
    return (
        f"<sub>{command}; commit {commit}, PyTorch {versions['torch']}, Python {versions['python']}, "
        f"{environment['processor']}, {environment['threads']} threads{kernels}.</sub>"
    )


def finetune() -> str:
    """Validation accuracy from before the first step on, from both starts."""
    found = _read("finetune")
    trunk = f"{found['trunk']['val/acc1']:.2f}"
    rows = [{"": "trunk, no attention", "before the first step": trunk, "after 1 epoch": "", "after the last": ""}]
    for init in dict.fromkeys(run["init"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["init"] == init]
        points = ([run["start"]["val/acc1"] for run in runs], *zip(*(run["val/acc1"] for run in runs), strict=True))
        shown = [spread(list(values)) for values in (points[0], points[1], points[-1])]
        rows.append(dict(zip(rows[0], [f"KCLA, `init={init!r}`", *shown], strict=True)))
    return "\n\n".join([markdown(rows, list(rows[0])), _origin("`make finetune`", found["environment"])])


_SEEDS_OF_A_TEST = 5


def study(name: str) -> str:
    """What a study measures on a few real images, and the paired difference from the first row."""
    found = _read(f"study_{name}")
    metric = found["metric"]
    first, rows = found["cells"][0], []
    interval = " (95 % interval)" if first["wanted"] >= _SEEDS_OF_A_TEST else ""
    for cell in found["cells"]:
        ours = _by_seed(cell, metric)
        rows.append(
            {
                "": cell["name"],
                found["what"]: spread(list(ours.values())),
                "seeds": f"{len(ours)}" if len(ours) == cell["wanted"] else f"{len(ours)} of {cell['wanted']}",
                f"minus {first['name']}{interval}": "" if cell is first else _paired(ours, _by_seed(first, metric)),
                "parameters": f"{cell['params']:,}",
                "MMACs": f"{cell['macs'] / 1e6:.1f}",
            }
        )
    rows += [
        dict.fromkeys(rows[0], "") | {"": row["name"], found["what"]: f"{row[metric]:.2f}"}
        for row in found.get("baselines", [])
    ]
    environment = found["environment"] | {"git": " and ".join(commit[:10] for commit in found["commits"])}
    return "\n\n".join([markdown(rows, list(rows[0])), _origin(f"`make study STUDY={name}`", environment)])


def recall() -> str:
    """Associative recall of each method at its best rate, by what it keeps of a sequence."""
    found = _read("study_mqar")
    rows = [
        {
            "": cell["name"],
            found["what"]: spread([run[found["metric"]] for run in cell["runs"]]),
            "seeds": len(cell["runs"]),
            f"best of {cell['rates']} rates": cell["settings"]["optim.lr"],
            "numbers kept": f"{cell['state_numbers']:,}",
            "parameters": f"{cell['params']:,}",
        }
        for cell in sorted(found["best"], key=lambda cell: (cell["state_numbers"], cell["name"]))
    ]
    return "\n\n".join([markdown(rows, list(rows[0])), _origin("`make study STUDY=mqar`", found["environment"])])


def _by_seed(cell: dict[str, Any], metric: str) -> dict[int, float]:
    return {run["seed"]: run[metric] for run in cell["runs"]}


def _paired(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """The mean difference over common seeds; an interval, and a verdict, from five seeds on."""
    seeds = sorted(ours.keys() & theirs.keys())
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    if len(seeds) < _SEEDS_OF_A_TEST:
        return f"{statistics.mean(differences):+.2f}, no test"
    centre, low, high = paired_interval([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    return f"{centre:+.2f} ({low:+.2f} to {high:+.2f}), {verdict(low, high)}"


def conditions() -> str:
    """Which methods along tokens can stand for softmax attention."""
    found = _read("conditions")
    names = {
        "linear": "linear cost",
        "dynamic": "dynamic memory",
        "static": "static approximation",
        "least": "least parameters",
    }
    rows = [
        {"": row["method"], "maps of the token": row["of_token"] or "not shown"}
        | {f"C{i} {name}": verdict_of(row[key]) for i, (key, name) in enumerate(names.items())}
        for row in found["rows"]
    ]
    return "\n\n".join([markdown(rows, list(rows[0])).replace("---:", "---"), _origin_of(found)])


def conditions_measured() -> str:
    """The numbers behind them."""
    found = _read("conditions")
    rows = [
        {
            "": row["method"],
            "state after 64, 1,024 tokens": ", ".join(f"{size:,}" for size in row["state"]),
            "exponent of work": f"{row['growth']:.2f}",
            "off from overwriting": "" if row["overwriting"] is None else f"{row['overwriting']:.0e}",
            "least decay, tokens of size 1, 10, 100": ", ".join(f"{decay:.1g}" for decay in row["least_decays"][:3]),
            "off from softmax maps": f"{max(row['fits'].values()):.0e}, {list(row['fits'])[-1]} tokens",
            "rank of a block": f"{row['rank']} of {row['block']}",
            "spare numbers": "" if row["redundant"] is None else row["redundant"],
            "parameters": "" if row["parameters"] is None else f"{row['parameters']:,}",
        }
        for row in found["rows"]
    ]
    notes = [f"- {row['method']}: {note}." for row in found["rows"] for note in row["notes"]]
    return "\n\n".join([markdown(rows, list(rows[0])), "\n".join(notes), _origin_of(found)])


TABLES = {
    "demo": demo,
    "bench": bench,
    "layer": layer,
    "finetune": finetune,
    "conditions": conditions,
    "recall": recall,
}
SUBJECTS = ("scan", "memory", "decode")
STUDIES = ("depth", "sample", "kvasir", "metala")
PAGES = {
    "README.md": TABLES
    | {subject: partial(operator, subject) for subject in SUBJECTS}
    | {f"study {name}": partial(study, name) for name in STUDIES},
    "docs/conditions.md": {"conditions": conditions, "conditions measured": conditions_measured},
}


def main(check: bool) -> int:
    """Rewrites the pages, or compares."""
    return next((code for page, tables in PAGES.items() if (code := _page(page, tables, check))), 0)


def _page(page: str, tables: dict[str, Callable[[], str]], check: bool) -> int:
    path = ROOT / page
    before = text = path.read_text()
    for name, table in tables.items():
        start, end = f"<!-- table: {name} -->", "<!-- end -->"
        if start not in before:
            print(f"{page}: the marker of the table {name} is missing", file=sys.stderr)
            return 1
        try:
            block = f"{start}\n{table()}\n{end}"
        except FileNotFoundError as error:
            print(
                f"{page}: {error.filename or error} is missing; `make results`, `finetune` and `study` measure",
                file=sys.stderr,
            )
            return 1
        text = re.sub(rf"{start}.*?{end}", lambda _, block=block: block, text, flags=re.DOTALL)
    if check and text != before:
        print(f"{page}: its tables are not those of results/*.json; run tools/readme_tables.py", file=sys.stderr)
        return 1
    if not check:
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
