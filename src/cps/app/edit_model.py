"""Change what a model knows about classes: forget a task or a class, and rename a class. Notes follow.

None of this can be undone. The model file is replaced at the end, and files beside it that may hold what was forgotten
are removed.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from cps.app import task_metadata as keys
from cps.app.learn_folder import checkpoint_path, outputs_note
from cps.data.examples import ClassName
from cps.learner import Learner
from cps.network.subnetwork import Subnetwork
from cps.selection.known_classes import known_tasks
from cps.storage.atomic import remove, remove_temporary


def find_class(learner: Learner, name: str) -> ClassName:
    """Return the class that a user calls `name`: it may be a number. Raise `ValueError` for an unknown one."""
    known = {str(known): known for classes in learner.classes for known in classes}
    if name not in known:
        known_tasks(learner.network, name)  # raises, with the nearest names
    return known[name]


def forget_task(learner: Learner, task: int, model: Path, *, fresh: nn.Module | None = None) -> bool:
    """Forget a task, remove its classes from all notes, and replace the model file.

    Return True if the checkpoint of an interrupted run was removed, too.
    """
    classes = learner.network.subnetworks[task].classes
    learner.forget(task, fresh=fresh)
    _remove_from_notes(learner, classes)
    return _save(learner, model)


def forget_class(learner: Learner, name: ClassName, model: Path, *, fresh: nn.Module | None = None) -> bool:
    """Forget a class in all its versions, also in all notes, and replace the model file; return as `forget_task`."""
    tasks = [learner.network.subnetworks[task] for task in known_tasks(learner.network, name)]
    learner.forget_class(name, fresh=fresh)
    _remove_from_notes(learner, [name])
    _note_outputs(learner, tasks)
    return _save(learner, model)


def rename_class(learner: Learner, old: ClassName, new: str, model: Path) -> None:
    """Rename a class, also in all notes, and replace the model file."""
    learner.rename(old, new)
    for task, subnetwork in enumerate(learner.network.subnetworks):
        learner.annotate(task, **keys.renamed_class(subnetwork.notes, str(old), new))
    learner.save(model)


def shares_covariance(subnetwork: Subnetwork) -> bool:
    """Return True if the sums of a task for the covariance cannot be divided by class, so they go with any class."""
    return any(key.endswith("scatter") for kept in subnetwork.statistics.values() for key in kept)


def _remove_from_notes(learner: Learner, names: Sequence[ClassName]) -> None:
    """Remove classes from all notes, but for names that another version of the class still has."""
    gone = [name for name in names if not learner.network.tasks_of(name)]
    for task, subnetwork in enumerate(learner.network.subnetworks):
        notes = dict(subnetwork.notes)
        for name in gone:
            notes = keys.renamed_class(notes, str(name), None)
        learner.annotate(task, **notes)


def _note_outputs(learner: Learner, before: Sequence[Subnetwork]) -> None:
    """Note the outputs of tasks that have lost a class, so that they can be verified."""
    changed = {subnetwork.notes.get(keys.OUTPUTS, {}).get(keys.OUTPUTS_DIGEST) for subnetwork in before}
    for task, subnetwork in enumerate(learner.network.subnetworks):
        noted = subnetwork.notes.get(keys.OUTPUTS)
        if isinstance(noted, dict) and noted.get(keys.OUTPUTS_DIGEST) in changed:
            learner.annotate(task, **{keys.OUTPUTS: outputs_note(learner, task)})


def _save(learner: Learner, model: Path) -> bool:
    learner.save(model)  # raises if any other task has changed
    had_checkpoint = checkpoint_path(model).exists()
    remove_temporary(model, min_age=0)  # no other program writes it while we hold the lock
    remove(checkpoint_path(model), min_age=0)
    return had_checkpoint
