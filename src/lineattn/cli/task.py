"""`lineattn fit|validate|test|predict TASK`, and the same from Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from lineattn.analysis.cost import count_macs, count_params
from lineattn.analysis.runs import ATTENTION_KEYS
from lineattn.cli.task_options import TaskCLI
from lineattn.cli.task_predict import PREDICTIONS
from lineattn.errors import InputError, unknown
from lineattn.files import write_json, write_text
from lineattn.measure import environment
from lineattn.models.language import LanguageModel
from lineattn.ops import native
from lineattn.tasks import console
from lineattn.tasks.checkpoint import Interrupted, epoch_is_done, load
from lineattn.tasks.data.source import Source

_NO_SPLIT = {"val": "pass --data.val_fraction as in training", "test": "add a test/ folder, or validate instead"}


def run(
    verb: str, task: str, args: list[str], *, quiet: bool = False, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Runs one verb of a task as the command line would, and returns what it found.

    Args:
        verb: `fit`, `validate`, `test` or `predict`.
        task: One of `lineattn.tasks.kinds.KINDS`.
        args: The options, as on the command line.
        quiet: Print nothing.
        callbacks: Further ones for the trainer, to follow the run.

    Returns:
        For `fit` the content of `summary.json`, for `validate` and `test` the metrics, for `predict` the predictions
        by file.

    Raises:
        InputError: Something that the user can mend.
        KeyboardInterrupt: The user stopped the run; the message says how to go on.
    """
    if verb not in _VERBS:
        raise unknown("command", verb, _VERBS)
    with console.hush_libraries(), console.muted(quiet):
        try:
            cli = TaskCLI(task, verb, args, progress=sys.stdout.isatty() and not quiet, callbacks=callbacks)
            return _VERBS[verb](cli)
        except Interrupted as stop:
            raise KeyboardInterrupt(str(stop)) from None
        except MisconfigurationException as error:
            raise InputError(" ".join(str(error).split())) from error
        except SystemExit as stop:
            # Lightning turns a Ctrl-C outside of training into this.
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt("stopped") from None
            raise


def _fit(cli: TaskCLI) -> dict[str, Any]:
    """Trains, then evaluates the last and the best weights on the test split, if there is one."""
    if cli.ckpt_path is None and _holds_a_run(cli):
        raise InputError(f"{cli.out} holds a run already: go on with --ckpt_path last, or choose another --out")
    if cli.ckpt_path is not None and _holds_a_run(cli) and not _inside(cli.ckpt_path, cli.out):
        raise InputError(f"{cli.out} holds a run that {cli.ckpt_path} is not of: choose another --out")
    if cli.config.out is None and cli.ckpt_path is None and cli.trainer.world_size > 1:
        raise InputError("--out is missing: each process would choose a run folder of its own by the clock; name one")
    splits = cli.data.splits
    if cli.trainer.is_global_zero:
        write_text(cli.out / "config.yaml", yaml.safe_dump(cli.settings, sort_keys=False))
        write_json(cli.out / "env.json", environment(cli.seed, native=native.status()))
        write_json(cli.out / "classes.json", cli.classes)
        for line in splits.notices:
            console.note(line)
        _header(cli)
    if cli.ckpt_path is None:
        for report in cli.module.reports:
            console.say(str(report))
        if cli.config.model.get("trunk") is not None and splits.val is not None:
            cli.recorder.start = _evaluate(cli, "val")
            found = "  ".join(f"{key} {value:.4g}" for key, value in cli.recorder.start.items())
            console.say(f"before the first step: {found}")
    cli.trainer.fit(cli.module, datamodule=cli.data, ckpt_path=cli.ckpt_path, weights_only=True)
    last = dict(cli.recorder.last_val())
    best: dict[str, Any] | None = dict(cli.checkpoints.best) if cli.checkpoints.best else None
    if cli.config.test_after_fit and splits.test is not None:
        last |= _evaluate(cli, "test")
        best_path = cli.checkpoints.folder / "best.ckpt"
        if best is not None and best_path.is_file():
            _restore(cli, best_path)
            best |= _evaluate(cli, "test")
    summary = _summary(cli, last, best)
    if cli.trainer.is_global_zero:
        cli.recorder.plot()
        write_json(cli.out / "summary.json", summary)
        _footer(cli, summary)
    return summary


def _validate(cli: TaskCLI) -> dict[str, Any]:
    """Evaluates a checkpoint on the validation split."""
    return _report(cli, "val", cli.data.splits.val)


def _test(cli: TaskCLI) -> dict[str, Any]:
    """Evaluates a checkpoint on the test split."""
    return _report(cli, "test", cli.data.splits.test)


def _predict(cli: TaskCLI) -> dict[str, Any]:
    """Prints and writes what the network says of what it is given."""
    _restore(cli, _given(cli))
    prediction = PREDICTIONS[cli.task]
    found, text = prediction.run(cli)
    written = cli.out / prediction.writes
    write_text(written, text)
    _skipped(cli)
    console.say(f"written: {written}")
    return found


def _report(cli: TaskCLI, split: str, source: Source | None) -> dict[str, Any]:
    if source is None:
        raise InputError(f"the data set has no {split} split: {_NO_SPLIT[split]}")
    _restore(cli, _given(cli))
    found = _evaluate(cli, split)
    if cli.trainer.is_global_zero:
        written = cli.out / f"{split}.json"
        write_json(written, found | {"checkpoint": str(cli.ckpt_path), cli.module.counted: cli.module.evaluated})
        console.table(
            f"{split}: {cli.module.evaluated:,} {cli.module.counted}",
            ["metric", "value"],
            [[k, f"{v:.4f}"] for k, v in found.items()],
        )
        _skipped(cli)
        console.say(f"written: {written}")
    return found


def _evaluate(cli: TaskCLI, split: str) -> dict[str, float]:
    evaluate = cli.trainer.validate if split == "val" else cli.trainer.test
    evaluate(cli.module, datamodule=cli.data, verbose=False)
    return dict(cli.module.results)


def _given(cli: TaskCLI) -> Path:
    assert cli.ckpt_path is not None
    return cli.ckpt_path


def _restore(cli: TaskCLI, path: Path) -> None:
    try:
        cli.module.load_state_dict(load(path)["state_dict"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the weights in {path} do not fit the network: {reason}") from error


def _holds_a_run(cli: TaskCLI) -> bool:
    return (cli.out / "summary.json").exists() or (cli.checkpoints.folder / "last.ckpt").exists()


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _header(cli: TaskCLI) -> None:
    splits, model = cli.data.splits, cli.config.model
    counts = {"train": splits.train, "val": splits.val, "test": splits.test}
    classes = ", ".join(cli.classes[:8]) + (f", ... {len(cli.classes)} in all" if len(cli.classes) > 8 else "")
    console.facts(
        {
            "run folder": str(cli.out),
            "settings": str(cli.out / "config.yaml"),
            "device": f"{cli.trainer.strategy.root_device}, precision {cli.trainer.precision}",
            cli.data.unit: ", ".join(f"{len(source)} {name}" for name, source in counts.items() if source is not None),
            **({"classes": classes} if classes else {}),
            "network": f"{cli.network}, attention {model.attn}, {count_params(cli.module.net):,} parameters",
            **({"goes on from": str(cli.ckpt_path)} if cli.ckpt_path else {}),
        }
    )


def _summary(cli: TaskCLI, last: dict[str, Any], best: dict[str, Any] | None) -> dict[str, Any]:
    net = cli.module.net.eval()
    recipe = {key: value for key, value in cli.settings.items() if key != "seed_everything"}
    recipe["model"] = {key: value for key, value in recipe["model"].items() if f"model.{key}" not in ATTENTION_KEYS}
    peak = cli.recorder.peak_mib
    example = cli.data.example()
    state = {"state_numbers": net.state_size(example.shape[1])} if isinstance(net, LanguageModel) else {}
    return {
        "task": cli.task,
        "status": "done" if _ran_to_its_end(cli) else "stopped",
        "model": cli.network,
        "attn": cli.config.model.attn,
        "metric": cli.module.metric,
        "params": count_params(net),
        "trainable_params": count_params(net, trainable=True),
        "macs": count_macs(net, example),
        **state,
        "peak_memory_mib": None if peak is None else round(peak, 2),
        "peak_memory_of": "saved tensors, parameters, gradients" if _on_cpu(cli) else "allocator",
        "seconds_per_epoch": cli.recorder.seconds_per_epoch(),
        "epochs": len(cli.recorder.rows),
        "seed": cli.seed,
        "start": cli.recorder.start,
        "last": last,
        "best": best,
        "classes": len(cli.classes),
        "skipped_images": len(cli.module.unreadable.messages),
        "recipe": recipe,
    }


def _ran_to_its_end(cli: TaskCLI) -> bool:
    """Not so where `--trainer.max_time` or a callback ended it, maybe within an epoch."""
    epochs = cli.trainer.max_epochs or 0
    return cli.trainer.current_epoch >= epochs and epoch_is_done(cli.trainer)


def _on_cpu(cli: TaskCLI) -> bool:
    return cli.trainer.strategy.root_device.type == "cpu"


def _footer(cli: TaskCLI, summary: dict[str, Any]) -> None:
    last, best = summary["last"], summary["best"] or {}
    rows = [
        [f"{split} {name}", *(f"{found[key]:.2f}" if key in found else "-" for found in (last, best))]
        for split in ("val", "test")
        for metric, name in cli.module.names.items()
        if metric != "loss" and ((key := f"{split}/{metric}") in last or key in best)
    ]
    if rows:
        console.table("Results", ["metric", "last weights", "best weights"], rows)
    _skipped(cli)
    console.say(f"written: {cli.out / 'summary.json'}, {cli.out / 'curves.png'}")


def _skipped(cli: TaskCLI) -> None:
    if count := len(cli.module.unreadable.messages):
        console.note(f"{count} {cli.data.unit} could not be read and were skipped")


_VERBS = {"fit": _fit, "validate": _validate, "test": _test, "predict": _predict}
