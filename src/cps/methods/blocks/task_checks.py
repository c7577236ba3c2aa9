"""Checks of a task's classes and images, for methods without a shared network."""

from collections.abc import Sequence

from torch import Tensor

from cps.data.examples import ClassName
from cps.data.tasks import Scenario, Task


def check_classes(task: Task, learned: Sequence[Sequence[ClassName]] = (), *, hint: str = "") -> tuple[ClassName, ...]:
    """Return the classes of a task; raise an error if there are none, if one comes twice, or if one was learned.

    `hint` tells what to do with a class that was learned.
    """
    if not isinstance(task, Task):
        hint = "; learn its tasks one by one" if isinstance(task, Scenario) else ""
        raise TypeError(f"task must be a cps.Task, got {type(task).__name__}{hint}")
    classes = tuple(task.classes)
    if not classes:
        raise ValueError("the task names no class")
    if len(set(classes)) != len(classes):
        raise ValueError(f"the task names a class twice: {list(classes)}")
    owners = {name: index for index, names in enumerate(learned) for name in names}
    for name in classes:
        if name in owners:
            raise ValueError(f"class {name!r} was already learned, in task {owners[name]}{hint}")
    return classes


def check_counts(classes: Sequence[ClassName], counts: Tensor) -> None:
    """Raise `ValueError` if a class has no image; `counts` are those of all classes."""
    if (counts == 0).any():
        raise ValueError(f"class {classes[int(counts.argmin())]!r} has no training image")


def check_shape(images: Tensor, expected: tuple[int, ...] | None) -> None:
    """Raise `ValueError` for images of another shape than the expected one."""
    shape = tuple(images.shape[1:])
    if expected not in (None, shape):
        raise ValueError(f"images must have shape {expected}, as those before, got {shape}; resize them")
