"""The tasks by name: what is trained, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lineattn.errors import unknown
from lineattn.tasks.base import Task
from lineattn.tasks.cls import Classifier
from lineattn.tasks.data.base import TaskData
from lineattn.tasks.data.images import ImageData
from lineattn.tasks.data.mqar import RecallData
from lineattn.tasks.data.scenes import SceneData
from lineattn.tasks.data.text import TextData
from lineattn.tasks.lm import LanguageModelling
from lineattn.tasks.mqar import AssociativeRecall
from lineattn.tasks.seg import Segmenter


@dataclass(frozen=True)
class Kind:
    """A task.

    Attributes:
        module: What is trained.
        data: What it is trained on.
        what: What a user calls it.
        predicts: What `predict` gives, for its help; empty where there is nothing to predict.
        defaults: Settings of a run that are usual for it, where they are others than those of image classification.
    """

    module: type[Task]
    data: type[TaskData]
    what: str
    predicts: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


_ADAMW = {
    "optim.name": "adamw",
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.1,
    "optim.decay_all": False,
    "optim.per_step": True,
    "optim.warmup_lr": 0.0,
    "trainer.max_epochs": 10,
    "trainer.gradient_clip_val": 1.0,
}
KINDS = {
    "cls": Kind(
        Classifier, ImageData, "an image classifier", "Class names and probabilities for a file, a folder or a glob"
    ),
    "seg": Kind(
        Segmenter,
        SceneData,
        "a network that gives each pixel a class",
        "Masks and overlays for a file, a folder or a glob",
    ),
    "lm": Kind(
        LanguageModelling,
        TextData,
        "a language model",
        "What comes next in a text, given with --prompt or in a file",
        _ADAMW,
    ),
    "mqar": Kind(AssociativeRecall, RecallData, "a model that recalls pairs", "", _ADAMW),
}


def kind(task: str) -> Kind:
    """A task by its name.

    Raises:
        InputError: There is none of that name.
    """
    if task not in KINDS:
        raise unknown("task", task, KINDS)
    return KINDS[task]
