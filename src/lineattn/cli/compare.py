"""`lineattn compare`: finished runs side by side."""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineattn.errors import InputError, unknown
from lineattn.files import write_text

if TYPE_CHECKING:
    from lineattn.analysis.runs import Group

# Two measurements under one name in summary.json: told apart by what was measured.
_MEMORY = {
    "saved tensors, parameters, gradients": "step memory MiB (saved+params+grads)",
    "allocator": "peak MiB (allocator)",
}
_FALLING = ("loss", "ppl", "bpb")  # metrics that are better the smaller they are
_LEAST = 5  # common seeds, for a statement about a difference


def run(args: list[str]) -> int:
    """Prints a table of finished runs, one row for what differs only in the seed, and writes it as CSV."""
    options = _parser().parse_args(args)
    from lineattn.analysis.runs import differing_keys, find_runs, group_runs

    runs, unfinished = find_runs(options.folders)
    keys = differing_keys(runs)
    if keys and not options.allow_different_recipes:
        shown = "; ".join(f"{key}: {_some({str(run.recipe.get(key)) for run in runs})}" for key in keys[:8])
        raise InputError(
            f"these runs have different recipes ({shown}{'; ...' if len(keys) > 8 else ''}): compare runs of one "
            "recipe, or add --allow_different_recipes"
        )
    groups = group_runs(runs)
    base = _base(groups, options.against)
    metric = options.metric or f"test/{runs[0].summary.get('metric', 'acc1')}"
    rows = [_row(group, metric, base) for group in groups]
    if all(row["n"] == 0 for row in rows):
        known = sorted({name for run in runs for name in run.summary["last"]})
        raise InputError(f"no run here has the metric {metric!r}; they have {', '.join(known)}")
    columns = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    if options.markdown:
        print(markdown(rows, columns))
    else:
        _print(rows, columns)
    path = options.csv or options.folders[0] / "compare.csv"
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
    if not options.markdown:
        if base is not None and len(groups) > 1 and f"vs {base.label}" not in columns:
            print(f"no difference from {base.label} is tested under {_LEAST} common seeds")
        if unfinished:
            print(f"left out, not finished: {_some(set(map(str, unfinished)))}")
        print(f"wrote {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lineattn compare",
        description="Finished runs side by side: mean ± standard deviation over seeds (n - 1). (best): the weights "
        "that were best on the validation set. vs: mean difference over common seeds, its 95 % t-interval, and whether "
        "that holds 0 (within noise); from five seeds on.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="run folders, or folders that hold them")
    parser.add_argument("--metric", help="which metric of summary.json (default: the task's, such as test/acc1)")
    parser.add_argument("--against", metavar="METHOD", help="row that the others are compared with (default: none)")
    parser.add_argument("--csv", type=Path, help="where to write the table (default: compare.csv in the first DIR)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown, and nothing else")
    parser.add_argument(
        "--allow_different_recipes", action="store_true", help="compare runs whose other settings differ too"
    )
    return parser


def _base(groups: list[Group], label: str | None) -> Group | None:
    """The row to compare with: the one that is asked for, or the plain network where there is one of it."""
    found = [group for group in groups if group.label == (label or "none")]
    if label is not None and not found:
        raise unknown("row", label, [group.label for group in groups])
    return found[0] if found else None


def _row(group: Group, metric: str, base: Group | None) -> dict[str, Any]:
    summary = group.runs[0].summary
    memory, seconds = group.mean("peak_memory_mib"), group.mean("seconds_per_epoch")
    return {
        "method": group.label,
        metric: spread(group.values(metric)),
        f"{metric} (best)": spread(group.values(metric, "best")),
        "n": len(group.values(metric)),
        **({} if base is None else {f"vs {base.label}": _difference(group, base, metric)}),
        "params": summary.get("params"),
        "MMACs": None if summary.get("macs") is None else round(summary["macs"] / 1e6, 2),
        **{
            label: None if memory is None or summary.get("peak_memory_of") != kind else round(memory, 1)
            for kind, label in _MEMORY.items()
        },
        "s/epoch": None if seconds is None else round(seconds, 2),
    }


def _difference(group: Group, base: Group, metric: str) -> str:
    """Mean difference over common seeds, with its interval and what that allows to say; nothing under five."""
    from lineattn.analysis.runs import paired_interval, verdict

    ours, theirs = group.by_seed(metric), base.by_seed(metric)
    seeds = sorted(ours.keys() & theirs.keys())
    if group is base or len(seeds) < _LEAST:
        return ""
    centre, low, high = paired_interval([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    return f"{centre:+.2f} ({low:+.2f} to {high:+.2f}), {verdict(low, high, less_is_better=metric.endswith(_FALLING))}"


def spread(values: list[float], digits: int = 2) -> str:
    """Mean ± standard deviation as text; nothing for no value.

    Example:
        >>> spread([97.0, 98.0]), spread([97.0]), spread([])
        ('97.50 ± 0.71', '97.00', '')
    """
    from lineattn.analysis.runs import mean_std

    if not values:
        return ""
    mean, std = mean_std(values)
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


def markdown(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """The rows as a Markdown table, numbers to the right."""
    lines = [columns, ["---" if name == columns[0] else "---:" for name in columns]]
    lines += [[_text(row[name]) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _print(rows: list[dict[str, Any]], columns: list[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lineattn.tasks.console import plain_console

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        # On a narrow terminal labels and differences are wrapped; numbers are never cut.
        words = name == "method" or name.startswith("vs ")
        longest = max(len(word) for row in rows for word in _text(row[name]).split() or [""])
        table.add_column(
            name.replace(" ", "\n").replace("+", "+\n"),
            justify="left" if words else "right",
            no_wrap=not words,
            min_width=longest if words else None,
        )
    for row in rows:
        table.add_row(*(_text(row[name]) for name in columns))
    plain_console().print(table)


def _text(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _some(values: set[str]) -> str:
    shown = sorted(values)
    return ", ".join(shown[:4]) + (f", ... {len(shown)} in all" if len(shown) > 4 else "")
