"""Writes the tables of README.md from results/*.json, between the markers; with --check, only says whether they differ.

`make results` runs the commands that the numbers come from, then this.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from lineattn.cli.compare import markdown
from lineattn.cli.demo.result import Method

ROOT = Path(__file__).parents[1]


def demo() -> str:
    """Accuracy on the bundled digits."""
    found = _read("demo")
    rows = [Method(part["name"], part["title"], part["runs"], []).row() for part in found["methods"]]
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
        parts += [title, markdown(table, list(table[0])), _origin(f"`{found['command']}`", found["environment"])]
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


def _read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def _origin(command: str, environment: dict[str, Any]) -> str:
    commit = (environment["git"] or "unknown")[:10] + ("-dirty" if "dirty" in (environment["git"] or "") else "")
    versions = environment["versions"]
    return (
        f"<sub>{command}; commit {commit}, PyTorch {versions['torch']}, Python {versions['python']}, "
        f"{environment['processor']}, {environment['threads']} threads.</sub>"
    )


def main(check: bool) -> int:
    """Rewrites README.md, or compares."""
    path = ROOT / "README.md"
    before = text = path.read_text()
    try:
        tables = {"demo": demo(), "bench": bench()}
    except FileNotFoundError as error:
        print(f"README.md: {error.filename or error} is missing; `make results` measures it", file=sys.stderr)
        return 1
    for name, table in tables.items():
        block = f"<!-- table: {name} -->\n{table}\n<!-- end -->"
        text = re.sub(rf"<!-- table: {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    if check and text != before:
        print("README.md: its tables are not those of results/*.json; run tools/readme_tables.py", file=sys.stderr)
        return 1
    if not check:
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
