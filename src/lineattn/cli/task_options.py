"""The options of `lineattn fit|validate|test|predict TASK`: LightningCLI, subclassed where it misleads.

What differs from LightningCLI: the settings of a checkpoint are defaults, so an explicit flag wins over them or is an
error, never ignored; one parser a verb; errors are one line.
"""

from __future__ import annotations

import re
import time
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lineattn.analysis.runs import ATTENTION_KEYS
from lineattn.cli.task_predict import PREDICTIONS
from lineattn.errors import InputError, unknown
from lineattn.tasks import console
from lineattn.tasks.base import Task
from lineattn.tasks.checkpoint import KEY, CheckpointIO, Checkpoints, load
from lineattn.tasks.data.base import TaskData
from lineattn.tasks.kinds import kind
from lineattn.tasks.optim import Optim
from lineattn.tasks.record import Record

# What a network is must not change under its weights ...
_NETWORK = (
    "model.name",
    *ATTENTION_KEYS,
    "model.net_args",
    *(f"model.{key}" for key in ("width", "depth", "hidden", "norm", "tied", "init_std")),
    "model.trunk",
    "model.loss",
    "data.channels",
    "data.tokenizer",
)
# ... and what a run computes must not change in its middle.
_RUN = (
    "optim",
    "seed_everything",
    "model.channels_last",
    "model.freeze_trunk",
    "model.class_weights",
    "model.over",
    "model.dropout",
    *(f"trainer.{key}" for key in ("precision", "accumulate_grad_batches", "gradient_clip_val")),
    *(f"trainer.{key}" for key in ("gradient_clip_algorithm", "limit_train_batches", "overfit_batches")),
    *(f"trainer.{key}" for key in ("devices", "num_nodes")),
)
# The trainer's settings that a checkpoint hands on. The others can name classes, which the parser would import and
# call: a checkpoint must not run code.
_TRAINER = {
    *("accelerator", "strategy", "devices", "num_nodes", "sync_batchnorm", "precision", "max_epochs", "min_epochs"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches", "check_val_every_n_epoch"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "log_every_n_steps"),
    *("deterministic", "benchmark", "inference_mode", "detect_anomaly"),
}
_WHOLE = ("model.attn_args", "model.net_args")  # dictionaries that are one value
_NAMED = ("trainer.accelerator", "trainer.strategy")  # by a word; one with a dot would be a class
# Of the terminal or of one run's time, so that nobody misses them.
_PASSING = {"enable_progress_bar", "max_time", "default_root_dir"}
_HELP = {
    "fit": "Trains {0.what}.",
    "validate": "Evaluates a checkpoint on the validation split.",
    "test": "Evaluates a checkpoint on the test split.",
    "predict": "{0.predicts}.",
}


class TaskCLI(LightningCLI):
    """Parses the options of one verb, and makes the data, the network and the trainer.

    Args:
        task: The task, see `lineattn.tasks.kinds`.
        verb: Which options there are.
        args: The options.
        progress: Show a progress bar unless told otherwise.
        callbacks: Further callbacks of the trainer.
    """

    def __init__(
        self, task: str, verb: str, args: list[str], *, progress: bool, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.task, self.kind, self.verb, self.callbacks = task, kind(task), verb, callbacks
        if verb == "predict" and not self.kind.predicts:
            raise InputError(f"there is nothing to predict for {task}: lineattn test {task} evaluates a checkpoint")
        self.stored: dict[str, Any] | None = None  # the checkpoint's settings and class names
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
                "prog": f"lineattn {verb} {task}",
                "description": _HELP[verb].format(self.kind),
                "exit_on_error": False,
                "allow_abbrev": False,
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # Options

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Trainer, "trainer")
        given: set[str | int] = {"optim", "seed", *self.kind.data.of_model}
        parser.add_class_arguments(self.kind.module, "model", skip=given, instantiate=False)
        parser.add_class_arguments(self.kind.data, "data", skip={"seed"}, instantiate=False)
        parser.add_class_arguments(Optim, "optim", instantiate=False)
        trainer = {f"trainer.{key}": value for key, value in self.trainer_defaults.items()}
        parser.set_defaults({**trainer, **self.kind.defaults})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--out", type=str | None, default=None, help="run folder; default runs/TASK/TIME-NAME")
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None, help="a checkpoint, or last or best of the run folder"
        )
        if self.verb == "fit":
            parser.add_argument(
                "--checkpoint_every", type=int, default=0, help="steps between checkpoints, beside one an epoch"
            )
            parser.add_argument("--test_after_fit", type=bool, default=True, help="end with the test split")
        if self.verb == "predict":
            parser.add_argument("--input", type=str | None, default=None, help=PREDICTIONS[self.task].input)
            PREDICTIONS[self.task].options(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        args = _configs_first(args)
        if not any(str(arg).startswith("--print_config") for arg in args):
            explicit = _parse(parser, args, defaults=False)
            self.ckpt_path = self._checkpoint(explicit)
            if self.ckpt_path is not None:
                self.stored = self._load(self.ckpt_path)
                self._inherit(parser, explicit)
            elif explicit.get("ckpt_path") is not None:
                args = ["--config", str(_config_of(explicit.out)), *args]
        self.config = _parse(parser, args, defaults=True)

    def _load(self, path: Path) -> dict[str, Any]:
        stored = load(path)[KEY]
        if stored["task"] != self.task:
            raise InputError(f"{path} is of the task {stored['task']}: lineattn {self.verb} {stored['task']}")
        return stored

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
            if not _config_of(out).is_file() or (Path(out) / "summary.json").exists():
                raise InputError(f"no checkpoint at {path}: leave out --ckpt_path to start a run, or name its --out")
            console.note(f"{path} does not exist yet: starting from the beginning, with {_config_of(out)}")
            return None
        return path

    def _inherit(self, parser: LightningArgumentParser, explicit: Any) -> None:
        """Makes the checkpoint's settings the defaults; an explicit flag that cannot win over them is an error."""
        assert self.stored is not None
        stored = dict(_flat(self.stored["config"]))
        given = dict(_flat(explicit.as_dict()))
        frozen = _NETWORK + (_RUN if self.verb == "fit" else ())
        free = {f"data.{key}" for key in self.kind.data.free}
        for key, value in given.items():
            fixed = any(key == k or key.startswith(f"{k}.") for k in frozen)
            fixed |= self.verb == "fit" and key.startswith("data.") and key not in free
            # What was not set is not in the file.
            if fixed and value != stored.get(key):
                raise InputError(
                    f"--{key} {value} contradicts {self.ckpt_path}, made with {stored.get(key)}: leave it out, or "
                    "start a new run without --ckpt_path"
                )
        known = dict(_flat(parser.get_defaults().as_dict()))
        whole = {"model", "data", "optim", "seed_everything"}
        whole |= {"checkpoint_every", "test_after_fit"} if self.verb == "fit" else set()
        trainer = _TRAINER if self.verb == "fit" else {"precision"}
        defaults = Namespace()
        for key, value in stored.items():
            section, _, name = key.partition(".")
            if key in known and (section in whole or (section == "trainer" and name in trainer)):
                if not _plain(key, value):
                    raise InputError(f"{self.ckpt_path} is damaged: its {key} is no plain value")
                defaults[key] = value
        if self.verb == "fit":
            self._tell_left_out(given, known)
        parser.set_defaults(dict(_flat(self._typed(parser, defaults).as_dict())))

    def _typed(self, parser: LightningArgumentParser, values: Namespace) -> Namespace:
        """Checks the values' types, which jsonargparse doesn't do for defaults."""
        try:
            return parser.parse_object(values, defaults=False)
        except ArgumentError as error:
            raise InputError(f"{self.ckpt_path} is damaged: {_readable(str(error), parser)}") from error

    def _tell_left_out(self, given: dict[str, Any], known: dict[str, Any]) -> None:
        """Names the trainer's settings that the checkpoint had and that don't come from it."""
        assert self.stored is not None
        left = [
            f"--trainer.{key}"
            for key, value in (self.stored["config"].get("trainer") or {}).items()
            if key not in _TRAINER | _PASSING
            and value != known.get(f"trainer.{key}")
            and not any(
                name.partition(".")[2].partition(".")[0] == key for name in given if name.startswith("trainer.")
            )
        ]
        if left:
            console.note(f"not taken from {self.ckpt_path}, give them again where they matter: {', '.join(left)}")

    # Objects

    def instantiate_classes(self) -> None:
        config = self.config
        self.seed: int = config.seed_everything
        data: Any = self.kind.data
        self.data: TaskData = data(**config.data.as_dict(), seed=self.seed)
        for key in self.data.resolved:
            config.data[key] = getattr(self.data, key)  # what "by default" came to
        self.classes: list[str] = self._classes()
        model = config.model.as_dict()
        if self.stored is not None and "trunk" in model:
            model["trunk"] = None  # the checkpoint's weights take their place
        module: Any = self.kind.module
        self.module: Task = module(
            **model,
            **self.data.for_model(self.classes),
            optim=Optim(**config.optim.as_dict()),
            seed=self.seed,
        )
        self.out = self._run_folder()
        self.recorder = Record(self.out, self.module)
        self.checkpoints = Checkpoints(
            self.out / "checkpoints",
            every=config.get("checkpoint_every", 0),
            content={"task": self.task, "config": self.settings, "classes": self.classes, **self._facts()},
        )
        instantiate = getattr(self.parser, "instantiate", None) or self.parser.instantiate_classes  # before 4.49
        trainer = dict(instantiate(config)["trainer"])
        trainer["callbacks"] = [*(trainer["callbacks"] or []), *self.callbacks, self.recorder, self.checkpoints]
        trainer["plugins"] = [*_listed(trainer["plugins"]), CheckpointIO()]
        if trainer["max_steps"] != -1 or (trainer["max_epochs"] or 0) < 1:
            # Counted in steps, Lightning loses an epoch's batches at a resume; and a schedule needs an end.
            raise InputError(
                "--trainer.max_epochs gives the length of a run, not max_steps, and must be 1 or more: "
                "--trainer.limit_train_batches shortens an epoch"
            )
        try:
            self.trainer = Trainer(**trainer)
        except (ValueError, TypeError) as error:
            raise InputError(" ".join(f"--trainer: {error}".split())) from error

    def _classes(self) -> list[str]:
        if self.stored is None:
            return self.data.classes
        known = self.stored["classes"]
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

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint tells of the data beside the names of its classes."""
        if self.stored is None:
            return self.data.facts
        return {key: value for key, value in self.stored.items() if key not in ("task", "config", "classes")}

    def _run_folder(self) -> Path:
        if self.config.out is not None:
            return Path(self.config.out)
        if self.ckpt_path is not None:
            here = self.ckpt_path.parent
            return here.parent if here.name == "checkpoints" else here
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return Path("runs") / self.task / f"{stamp}-{self.network.replace('/', '-')}-{self.config.model.attn}"

    @property
    def network(self) -> str:
        """The network's name; that of a task is the same for all its networks."""
        return self.config.model.get("name") or self.task

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved configuration as plain values, without what names this run only."""
        settings = yaml.safe_load(self.parser.dump(self.config, format="yaml"))
        return {key: value for key, value in settings.items() if key not in ("config", "out", "ckpt_path")}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a dictionary that is a value itself stays one."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in _WHOLE:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _plain(key: str, value: Any) -> bool:
    """Whether a value from a checkpoint is one that the parser takes as it stands."""
    if key in _WHOLE and isinstance(value, dict):
        return "class_path" not in value and all(_plain(key, inner) for inner in value.values())
    if key in _NAMED:
        return isinstance(value, str) and re.fullmatch(r"[a-z0-9_]+", value) is not None
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, (bool, int, float, str)) for part in parts)


def _config_of(out: str) -> Path:
    return Path(out) / "config.yaml"


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _configs_first(args: list[str]) -> list[str]:
    """The options with the recipes in front, in their order: jsonargparse lets the later one win, flag or recipe."""
    configs: list[str] = []
    flags: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg in ("-c", "--config"):
            configs += [arg, *([value] if (value := next(rest, None)) is not None else [])]
        elif arg.startswith("--config="):
            configs.append(arg)
        else:
            flags.append(arg)
    return configs + flags


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
