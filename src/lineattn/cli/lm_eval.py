"""`lineattn lm-eval`: a language model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lineattn.errors import InputError, need

if TYPE_CHECKING:
    from lineattn.tasks.lm_harness import Result

_RESULTS = "lm_eval.json"


def run(args: list[str]) -> int:
    """Scores a model and prints a table."""
    parser = argparse.ArgumentParser(
        prog="lineattn lm-eval",
        description="A language model in a folder that save_pretrained has written, on tasks of lm-evaluation-harness: "
        "those of the harness, with data from the hub, or those of a folder, with data from another.",
        epilog="Offline: lineattn lm-eval MODEL_DIR --tasks piqa,arc_easy --include recipes/lm_eval --data FOLDER",
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="folder with config, weights and tokenizer")
    parser.add_argument("--tasks", required=True, help="names, tags or patterns, with commas between")
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder of tasks (YAML), and then these alone")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the files that these tasks name")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N items of a task alone")
    parser.add_argument("--batch_size", type=int, default=8, metavar="N", help="texts at a time (8)")
    parser.add_argument("--max_length", type=int, metavar="N", help="tokens of a text at most (the configuration's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {_RESULTS} there")
    options = parser.parse_args(args)
    for name in ("limit", "batch_size", "max_length"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name} is {value}; it must be 1 or more")
    names = [name for name in (part.strip() for part in options.tasks.split(",")) if name]
    if not names:
        raise InputError("--tasks names none; give names with commas between, as piqa,arc_easy")
    need("transformers", "lm", "lm-eval")
    need("lm_eval", "lm", "lm-eval")

    from lineattn.files import need_folder, write_json
    from lineattn.measure import environment
    from lineattn.ops import native
    from lineattn.tasks import console, lm_harness

    need_folder(options.out)
    measured_with = environment(seed=0, native=native.status())  # the seed is that of the harness's standard errors
    measured_with["versions"] |= {name: version(name) for name in ("transformers", "lm_eval")}
    model = lm_harness.load_model(options.model, batch_size=options.batch_size, max_length=options.max_length)
    with TemporaryDirectory() as scratch:
        tasks = lm_harness.load_tasks(names, Path(scratch), include=options.include, data=options.data)
        results = lm_harness.run(model, tasks, limit=options.limit)
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    console.table(f"{options.model}: {parameters:,} parameters", *_table(results))
    if options.out is not None:
        path = options.out / _RESULTS
        content: dict[str, Any] = {
            "model": str(options.model),
            "parameters": parameters,
            "max_length": model.max_length,
            "limit": options.limit,
            "tasks": {name: _content(result) for name, result in results.items()},
        }
        write_json(path, {**content, "environment": measured_with})
        console.say(f"wrote {path}")
    return 0


def _table(results: dict[str, Result]) -> tuple[list[str], list[list[str]]]:
    metrics = list(dict.fromkeys(metric for result in results.values() for metric in result.metrics))
    rows = [
        [name, str(result.items), *(str(result.metrics.get(metric, "")) for metric in metrics)]
        for name, result in results.items()
    ]
    return ["task", "items", *metrics], rows


def _content(result: Result) -> dict[str, Any]:
    return {"items": result.items, **{name: score._asdict() for name, score in result.metrics.items()}}
