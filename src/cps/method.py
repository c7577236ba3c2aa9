"""What every continual-learning method has in common: the learner of this library, and those it is compared with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from cps.data.examples import ClassName
from cps.data.images import as_images
from cps.data.tasks import Task
from cps.network.outputs import Evidence
from cps.network.subnetwork import Statistics
from cps.selection.base import Oracle, Selector
from cps.selection.groups import consecutive_groups
from cps.selection.predict import Prediction
from cps.selection.predict import predict as predict_evidence


@dataclass(frozen=True)
class Assumptions:
    """What a method needs, beyond the images of one task at a time."""

    replay: bool = False  # it keeps images of earlier tasks
    groups: bool = False  # it needs several test images that share a task
    adapts: bool = False  # it adapts its weights to a task before it predicts
    grows: bool = False  # its network grows with every task
    pretrained: bool = False  # its backbone starts from pretrained weights
    task_given: bool = False  # in its paper, the task of a test image is given

    def encode(self) -> dict[str, bool]:
        """Return the assumptions as JSON data."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Method(Protocol):
    """A continual-learning method: it learns one task after the other, and scores the classes of all tasks so far."""

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    @property
    def assumes(self) -> Assumptions:
        """What the method needs."""
        ...

    @property
    def is_sealed(self) -> bool:
        """Whether its outputs for a task never change again, so that measuring them once is enough."""
        ...

    @property
    def classes(self) -> Sequence[tuple[ClassName, ...]]:
        """The classes of each task, in the order of learning."""
        ...

    @property
    def selector(self) -> Selector:
        """The selector for single images."""
        ...

    @property
    def group_selector(self) -> Selector:
        """The selector for groups of images."""
        ...

    @property
    def image_passes(self) -> int:
        """The number of images in all training steps so far."""
        ...

    def learn(
        self,
        task: Task,
        *,
        checkpoint: Path | None = None,
        on_epoch: Callable[[Any], None] | None = None,
    ) -> object:
        """Learn a task. Its images are not used again, but for those that the method declares in `kept`.

        With `checkpoint`, a call that is interrupted resumes from that file; `on_epoch` is called after every epoch. A
        method that learns in seconds may ignore both.
        """
        ...

    def save(self, path: Path) -> None:
        """Write everything learned to a file."""
        ...

    def evidence(self, images: Any) -> Evidence:
        """Return, for each task, features (N, d) and scores (N, classes of the task) of the images.

        Scores of different tasks can be compared as far as the method goes.
        """
        ...

    def statistics(self, selector: str) -> Sequence[Statistics]:
        """Return what a selector of this name has kept about each task."""
        ...

    def kept(self, *, learning: bool = False) -> Mapping[str, int]:
        """Return the bytes kept between tasks, or while a task is learned, by what they are."""
        ...


def predict(
    method: Method, images: Any, *, task: int | None = None, group_size: int = 1, selector: Selector | None = None
) -> Prediction:
    """Predict classes with any method: Algorithm 2, as `Learner.predict` does."""
    pixels = as_images(images)
    if task is not None:
        if selector is not None:
            raise ValueError("pass either task or selector, not both")
        if not 0 <= task < len(method.classes):
            raise ValueError(f"task must be in [0, {len(method.classes)}), got {task}")
        selector = Oracle(int(task))
    selector = selector or (method.selector if group_size == 1 else method.group_selector)
    groups = consecutive_groups(len(pixels), group_size, torch.device("cpu"))
    return predict_evidence(method, method.evidence(pixels), selector, groups)
