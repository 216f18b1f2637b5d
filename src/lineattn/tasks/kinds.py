"""The tasks by name: what is trained, and on what."""

from __future__ import annotations

from dataclasses import dataclass

from lineattn.errors import unknown
from lineattn.tasks.base import Task
from lineattn.tasks.cls import Classifier
from lineattn.tasks.data.base import TaskData
from lineattn.tasks.data.images import ImageData
from lineattn.tasks.data.scenes import SceneData
from lineattn.tasks.seg import Segmenter


@dataclass(frozen=True)
class Kind:
    """A task.

    Attributes:
        module: What is trained.
        data: What it is trained on.
        what: What a user calls it.
        predicts: What `predict` gives, for its help.
    """

    module: type[Task]
    data: type[TaskData]
    what: str
    predicts: str


KINDS = {
    "cls": Kind(Classifier, ImageData, "an image classifier", "Class names and probabilities"),
    "seg": Kind(Segmenter, SceneData, "a network that gives each pixel a class", "Masks and overlays"),
}


def kind(task: str) -> Kind:
    """A task by its name.

    Raises:
        InputError: There is none of that name.
    """
    if task not in KINDS:
        raise unknown("task", task, KINDS)
    return KINDS[task]
