"""`lineattn fit|validate|test|predict TASK`: LightningCLI, subclassed where it misleads.

What differs from LightningCLI: the settings of a checkpoint are defaults, so an explicit flag wins over them or is an
error, never ignored; one parser a verb; errors are one line.
"""

from __future__ import annotations

import re
import sys
import time
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lineattn.analysis.cost import count_macs, count_params
from lineattn.errors import InputError, unknown
from lineattn.tasks import console, predict
from lineattn.tasks.checkpoint import KEY, CheckpointIO, Checkpoints, Interrupted, load
from lineattn.tasks.cls import Classifier
from lineattn.tasks.data.images import ImageData
from lineattn.tasks.data.source import Files
from lineattn.tasks.optim import Optim
from lineattn.tasks.record import Record, environment, write_json, write_text

TASKS = ["cls"]
VERBS = ["fit", "validate", "test", "predict"]

# What a network is must not change under its weights ...
_NETWORK = ("model.name", "model.attn", "model.init", "model.scope", "model.attn_args", "model.width", "data.channels")
# ... and what a run computes must not change in its middle.
_RUN = (
    "optim",
    "seed_everything",
    *(f"data.{key}" for key in ("name", "batch_size", "image_size", "augment", "rand_augment", "erasing", "mixup")),
    *(f"data.{key}" for key in ("cutmix", "mean", "std", "val_fraction", "on_error")),
    *(f"trainer.{key}" for key in ("precision", "accumulate_grad_batches", "gradient_clip_val")),
)
_ATTENTION = ("attn", "attn_args", "init", "scope")


def run(
    verb: str, task: str, args: list[str], *, quiet: bool = False, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Runs one verb of a task as the command line would, and returns what it found.

    Args:
        verb: `fit`, `validate`, `test` or `predict`.
        task: `cls`.
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
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if verb not in VERBS:
        raise unknown("command", verb, VERBS)
    with console.hush_libraries(), console.muted(quiet):
        try:
            cli = TaskCLI(verb, args, progress=sys.stdout.isatty() and not quiet, callbacks=callbacks)
            return getattr(cli, verb)()
        except Interrupted as stop:
            raise KeyboardInterrupt(str(stop)) from None
        except MisconfigurationException as error:
            raise InputError(" ".join(str(error).split())) from error
        except SystemExit as stop:
            # Lightning turns a Ctrl-C outside of training into this.
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt("stopped") from None
            raise


class TaskCLI(LightningCLI):
    """Parses the options of one verb, and makes the data, the network and the trainer.

    Args:
        verb: Which options there are.
        args: The options.
        progress: Show a progress bar unless told otherwise.
        callbacks: Further callbacks of the trainer.
    """

    def __init__(self, verb: str, args: list[str], *, progress: bool, callbacks: Sequence[Callback] = ()) -> None:
        self.verb, self.callbacks = verb, callbacks
        self.stored: dict[str, Any] | None = None
        self.ckpt_path: Path | None = None
        defaults: dict[str, Any] = {
            "max_epochs": 100,
            "logger": False,
            "enable_model_summary": False,
            "enable_progress_bar": progress,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
        }
        super().__init__(
            args=args,
            run=False,
            save_config_callback=None,
            trainer_defaults=defaults | ({"devices": 1} if verb == "predict" else {}),
            seed_everything_default=0,
            parser_kwargs={
                "prog": f"lineattn {verb} cls",
                "description": _HELP[verb],
                "exit_on_error": False,
                "allow_abbrev": False,
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # Options

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({f"trainer.{key}": value for key, value in self.trainer_defaults.items()})
        given: set[str | int] = {"classes", "in_chans", "optim", "mixup", "cutmix", "seed"}
        parser.add_class_arguments(Classifier, "model", skip=given, instantiate=False)
        parser.add_class_arguments(ImageData, "data", skip={"seed"}, instantiate=False)
        parser.add_class_arguments(Optim, "optim", instantiate=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--out", type=str | None, default=None, help="run folder; default runs/cls/TIME-NAME")
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None, help="a checkpoint, or last or best of the run folder"
        )
        if self.verb == "fit":
            parser.add_argument(
                "--checkpoint_every", type=int, default=0, help="steps between checkpoints, beside one an epoch"
            )
            parser.add_argument("--test_after_fit", type=bool, default=True, help="end with the test split")
        if self.verb == "predict":
            parser.add_argument("--input", type=str | None, default=None, help="an image, a folder or a glob")
            parser.add_argument("--top", type=int, default=3, help="classes to print an image")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if not any(str(arg).startswith("--print_config") for arg in args):
            explicit = _parse(parser, args, defaults=False)
            self.ckpt_path = self._checkpoint(explicit)
            if self.ckpt_path is not None:
                self.stored = load(self.ckpt_path)
                self._inherit(parser, explicit)
        self.config = _parse(parser, args, defaults=True)

    def _checkpoint(self, explicit: Any) -> Path | None:
        given, out = explicit.get("ckpt_path"), explicit.get("out")
        if given is None:
            if self.verb != "fit":
                raise InputError(f"--ckpt_path is missing: name the checkpoint to {self.verb} with")
            return None
        if given not in ("last", "best"):
            return Path(given)
        if out is None:
            raise InputError(f"--ckpt_path {given} needs --out: name the run folder that holds it")
        path = Path(out) / "checkpoints" / f"{given}.ckpt"
        if self.verb == "fit" and not path.is_file():
            console.note(f"{path} does not exist yet: starting from the beginning")
            return None
        return path

    def _inherit(self, parser: LightningArgumentParser, explicit: Any) -> None:
        """Makes the checkpoint's settings the defaults; an explicit flag that cannot win over them is an error."""
        assert self.stored is not None
        stored = dict(_flat(self.stored[KEY]["config"]))
        frozen = _NETWORK + (_RUN if self.verb == "fit" else ())
        for key, value in _flat(explicit.as_dict()):
            # What was not set is not in the file.
            if value != stored.get(key) and any(key == k or key.startswith(f"{k}.") for k in frozen):
                raise InputError(
                    f"--{key} {value} contradicts {self.ckpt_path}, made with {stored.get(key)}: leave it out, or "
                    "start a new run without --ckpt_path"
                )
        known = dict(_flat(parser.get_defaults().as_dict()))
        sections = ("model", "data", "optim", "seed_everything", "trainer.precision")
        if self.verb == "fit":
            sections = (*sections, "trainer", "checkpoint_every", "test_after_fit")
        parser.set_defaults(
            {
                key: value
                for key, value in stored.items()
                if key in known and any(key == section or key.startswith(f"{section}.") for section in sections)
            }
        )

    # Objects

    def instantiate_classes(self) -> None:
        config = self.config
        self.seed: int = config.seed_everything
        self.data = ImageData(**config.data.as_dict(), seed=self.seed)
        for key in ("name", "image_size", "channels", "augment", "mean", "std", "crop"):
            config.data[key] = getattr(self.data, key)  # what "by default" came to
        self.classes: list[str] = self._classes()
        model = config.model.as_dict()
        if self.stored is not None:
            model["weights"] = None  # the checkpoint's take their place
        self.module = Classifier(
            **model,
            classes=len(self.classes),
            in_chans=self.data.channels,
            optim=Optim(**config.optim.as_dict()),
            mixup=self.data.mixup,
            cutmix=self.data.cutmix,
            seed=self.seed,
        )
        self.out = self._run_folder()
        self.recorder = Record(self.out)
        self.checkpoints = Checkpoints(
            self.out / "checkpoints",
            every=config.get("checkpoint_every", 0),
            content={"config": self._settings(), "classes": self.classes},
        )
        instantiate = getattr(self.parser, "instantiate", None) or self.parser.instantiate_classes  # before 4.49
        trainer = dict(instantiate(config)["trainer"])
        trainer["callbacks"] = [*(trainer["callbacks"] or []), *self.callbacks, self.recorder, self.checkpoints]
        trainer["plugins"] = [*_listed(trainer["plugins"]), CheckpointIO()]
        try:
            self.trainer = Trainer(**trainer)
        except (ValueError, TypeError) as error:
            raise InputError(" ".join(f"--trainer: {error}".split())) from error

    def _classes(self) -> list[str]:
        if self.stored is None:
            return self.data.classes
        known = self.stored[KEY]["classes"]
        if self.verb != "predict":
            found = self.data.classes
            if len(found) != len(known):
                raise InputError(
                    f"{self.ckpt_path} knows {len(known)} classes, the data has {len(found)}: use the data it was "
                    "trained on, or start a new run without --ckpt_path"
                )
            for mine, theirs in zip(known, found, strict=True):
                if mine != theirs:
                    raise InputError(f"{self.ckpt_path} has the class {mine!r} where the data has {theirs!r}")
        return known

    def _run_folder(self) -> Path:
        if self.config.out is not None:
            return Path(self.config.out)
        if self.ckpt_path is not None:
            here = self.ckpt_path.parent
            return here.parent if here.name == "checkpoints" else here
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return Path("runs") / "cls" / f"{stamp}-{self.config.model.name}-{self.config.model.attn}"

    def _settings(self) -> dict[str, Any]:
        """The resolved configuration as plain values, without what names this run only."""
        settings = yaml.safe_load(self.parser.dump(self.config, format="yaml"))
        return {key: value for key, value in settings.items() if key not in ("config", "out", "ckpt_path")}

    # Verbs

    def fit(self) -> dict[str, Any]:
        """Trains, then evaluates the last and the best weights on the test split, if there is one."""
        if self.ckpt_path is None and self._holds_a_run():
            raise InputError(f"{self.out} holds a run already: go on with --ckpt_path last, or choose another --out")
        splits = self.data.splits
        if self.trainer.is_global_zero:
            settings = self._settings()
            write_text(self.out / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
            write_json(self.out / "env.json", environment(self.seed))
            write_json(self.out / "classes.json", self.classes)
            for line in splits.notices:
                console.note(line)
            self._header()
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.ckpt_path, weights_only=True)
        last = dict(self.recorder.last_val())
        best: dict[str, Any] | None = dict(self.checkpoints.best) if self.checkpoints.best else None
        if self.config.test_after_fit and splits.test is not None:
            last |= self._evaluate("test")
            best_path = self.checkpoints.folder / "best.ckpt"
            if best is not None and best_path.is_file():
                self._restore(best_path)
                best |= self._evaluate("test")
        summary = self._summary(last, best)
        if self.trainer.is_global_zero:
            self.recorder.plot()
            write_json(self.out / "summary.json", summary)
            self._footer(summary)
        return summary

    def validate(self) -> dict[str, Any]:
        """Evaluates a checkpoint on the validation split."""
        return self._report("val", self.data.splits.val)

    def test(self) -> dict[str, Any]:
        """Evaluates a checkpoint on the test split."""
        return self._report("test", self.data.splits.test)

    def predict(self) -> dict[str, Any]:
        """Prints and writes the classes of images."""
        if self.config.input is None:
            raise InputError("--input is missing: name an image, a folder or a glob in quotes")
        paths = predict.find_images(self.config.input)
        self._restore(self._given())
        loader = self.data.eval_loader(Files(paths, [0] * len(paths), self.data.channels))
        batches: Any = self.trainer.predict(self.module, dataloaders=loader)
        found = predict.gather(paths, batches)
        predict.show(found, self.classes, self.config.top)
        written = self.out / "predictions.csv"
        write_text(written, predict.as_csv(found, self.classes))
        self._skipped()
        console.say(f"written: {written}")
        return {str(one.path): dict(zip(self.classes, one.probabilities, strict=True)) for one in found}

    def _report(self, split: str, source: Any) -> dict[str, Any]:
        if source is None:
            raise InputError(f"the data set has no {split} split: {_NO_SPLIT[split]}")
        self._restore(self._given())
        found = self._evaluate(split)
        if self.trainer.is_global_zero:
            written = self.out / f"{split}.json"
            write_json(written, found | {"checkpoint": str(self.ckpt_path), "images": len(source)})
            console.table(
                f"{split}: {len(source)} images", ["metric", "value"], [[k, f"{v:.4f}"] for k, v in found.items()]
            )
            self._skipped()
            console.say(f"written: {written}")
        return found

    def _evaluate(self, split: str) -> dict[str, float]:
        evaluate = self.trainer.validate if split == "val" else self.trainer.test
        evaluate(self.module, datamodule=self.data, verbose=False)
        return dict(self.module.results)

    def _given(self) -> Path:
        assert self.ckpt_path is not None
        return self.ckpt_path

    def _restore(self, path: Path) -> None:
        try:
            self.module.load_state_dict(load(path)["state_dict"])
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"the weights in {path} do not fit the network: {reason}") from error

    def _holds_a_run(self) -> bool:
        return (self.out / "summary.json").exists() or (self.checkpoints.folder / "last.ckpt").exists()

    # What is printed and kept

    def _header(self) -> None:
        splits, model = self.data.splits, self.config.model
        counts = {"train": splits.train, "val": splits.val, "test": splits.test}
        classes = ", ".join(self.classes[:8]) + (f", ... {len(self.classes)} in all" if len(self.classes) > 8 else "")
        console.facts(
            {
                "run folder": str(self.out),
                "settings": str(self.out / "config.yaml"),
                "device": f"{self.trainer.strategy.root_device}, precision {self.trainer.precision}",
                "images": ", ".join(f"{len(source)} {name}" for name, source in counts.items() if source is not None),
                "classes": classes,
                "network": f"{model.name}, attention {model.attn}, {count_params(self.module.net):,} parameters",
                **({"goes on from": str(self.ckpt_path)} if self.ckpt_path else {}),
            }
        )

    def _summary(self, last: dict[str, Any], best: dict[str, Any] | None) -> dict[str, Any]:
        net = self.module.net.eval()
        size = self.data.image_size
        recipe = self._settings()
        del recipe["seed_everything"]
        recipe["model"] = {key: value for key, value in recipe["model"].items() if key not in _ATTENTION}
        peak = self.recorder.peak_mib
        return {
            "task": "cls",
            "status": "done",
            "model": self.config.model.name,
            "attn": self.config.model.attn,
            "params": count_params(net),
            "trainable_params": count_params(net, trainable=True),
            "macs": count_macs(net, torch.zeros(1, self.data.channels, size, size)),
            "peak_memory_mib": None if peak is None else round(peak, 2),
            "peak_memory_of": "saved tensors, parameters, gradients" if self._on_cpu() else "allocator",
            "seconds_per_epoch": self.recorder.seconds_per_epoch(),
            "epochs": len(self.recorder.rows),
            "seed": self.seed,
            "last": last,
            "best": best,
            "classes": len(self.classes),
            "skipped_images": len(self.module.unreadable.messages),
            "recipe": recipe,
        }

    def _on_cpu(self) -> bool:
        return self.trainer.strategy.root_device.type == "cpu"

    def _footer(self, summary: dict[str, Any]) -> None:
        rows = [
            [name, *(f"{found[key]:.2f}" if key in found else "-" for key in ("val/acc1", "test/acc1", "test/acc5"))]
            for name, found in (("last", summary["last"]), ("best", summary["best"]))
            if found
        ]
        if rows:
            console.table("Accuracy, %", ["weights", "val top-1", "test top-1", "test top-5"], rows)
        self._skipped()
        console.say(f"written: {self.out / 'summary.json'}, {self.out / 'curves.png'}")

    def _skipped(self) -> None:
        if count := len(self.module.unreadable.messages):
            console.note(f"{count} images could not be read and were skipped")


_HELP = {
    "fit": "Trains an image classifier.",
    "validate": "Evaluates a checkpoint on the validation split.",
    "test": "Evaluates a checkpoint on the test split.",
    "predict": "Class names and probabilities for a file, a folder or a glob.",
}
_NO_SPLIT = {"val": "pass --data.val_fraction as in training", "test": "add a test/ folder, or validate instead"}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a dictionary that is a value itself stays one."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name != "model.attn_args":
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _parse(parser: LightningArgumentParser, args: Any, *, defaults: bool) -> Any:
    try:
        return parser.parse_args(args, defaults=defaults)
    except ArgumentError as error:
        raise _readable(str(error), parser) from error


def _readable(text: str, parser: LightningArgumentParser) -> InputError:
    """jsonargparse's message, which runs over many lines, as one."""
    if found := re.search(r"unrecognized arguments: (\S+)", text):
        options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
        return unknown("option", found.group(1).split("=")[0], options)
    key = re.search(r'Parser key "([^"]+)"', text)
    value = re.search(r"Given value: (.*)", text)
    if key and value:
        kinds = ", ".join(dict.fromkeys(re.findall(r"Expected an? (?:<class ')?([\w.]+)", text)))
        wanted = f"expected {kinds}" if kinds else " ".join(text.splitlines()[-1].split())
        return InputError(f"--{key.group(1)} {value.group(1)}: {wanted}")
    return InputError(" ".join(text.split()))
