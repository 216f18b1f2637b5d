"""A trained network from its checkpoint alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lineattn.errors import InputError
from lineattn.tasks.base import Task
from lineattn.tasks.checkpoint import KEY, load
from lineattn.tasks.data.base import TaskData, VisualData
from lineattn.tasks.kinds import kind
from lineattn.tasks.optim import Optim


@dataclass(frozen=True)
class Trained:
    """A network as it was trained.

    Attributes:
        net: The network in evaluation mode, with averaged weights where the run kept them.
        arguments: What `lineattn.create_model` builds it from, or `LanguageModel`.
        classes: Names of the classes, in order of the outputs.
        task: What it was trained for.
        data: The data module it was trained on; nothing is read before it is asked.
    """

    net: nn.Module
    arguments: dict[str, Any]
    classes: list[str]
    task: str
    data: TaskData

    @property
    def visual(self) -> VisualData:
        """The data of a network that sees images.

        Raises:
            InputError: It sees none.
        """
        if not isinstance(self.data, VisualData):
            raise InputError(
                f"the checkpoint is of the task {self.task}: this command is for networks that see images "
                "(a language model goes out with lineattn to-hf)"
            )
        return self.data


def restore(path: Path) -> Trained:
    """Builds the network of a checkpoint and loads its weights.

    Raises:
        InputError: The file is missing, damaged, holds code, or is no checkpoint of a run.
    """
    found = load(path)
    task, config, classes = (found[KEY][key] for key in ("task", "config", "classes"))
    make_data: Any = kind(task).data
    make_module: Any = kind(task).module
    data: TaskData = make_data(**config["data"], seed=config["seed_everything"])
    # The checkpoint's weights take the place of those that it started from.
    model = {key: None if key == "trunk" else value for key, value in config["model"].items()}
    module: Task = make_module(**model, **data.for_model(classes), optim=Optim(**config["optim"]))
    module.load_state_dict(found["state_dict"])
    return Trained(module.evaluated_net.eval(), module.arguments, classes, task, data)
