"""Notes: what `cps learn` writes about a task into the model file. They may be anyone's, and say something else."""

from collections.abc import Mapping
from typing import Any

from cps.runtime.text import number_of


def accuracy_of(notes: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the accuracy with the task known and with it to be found, on held-out images."""
    noted = notes.get("accuracy")
    if not isinstance(noted, dict):
        return None
    known, found = noted.get("task known"), noted.get("task found")
    return (known, found) if isinstance(known, float) and isinstance(found, float) else None


def usual_outputs_of(notes: Mapping[str, Any]) -> dict[str, float]:
    """Return the output that is usual for images of each class."""
    noted = notes.get("usual output")
    return {k: v for k, v in noted.items() if isinstance(v, float)} if isinstance(noted, dict) else {}


def accuracy_in_words(notes: Mapping[str, Any]) -> str:
    """Return how many held-out images were right when a task was learned."""
    accuracy = accuracy_of(notes)
    if accuracy is None:
        return "not measured, since no image was held out"
    known, found = accuracy
    measured = f"{found:.1%} among all tasks ({number_of(notes['held out'], 'image')})"
    if len(notes["classes"]) > 1 and known <= 1 / len(notes["classes"]):
        measured += "; that is no better than guessing: train longer, or look at the images"
    if len(notes["classes"]) == 1:
        return f"{measured}; alone, one class cannot be mistaken"
    return f"{known:.1%} with the task known, {measured}"


def history_in_words(notes: Mapping[str, Any]) -> str:
    """Return what was noted when a task was learned."""
    if "day" not in notes:
        return "learned without notes"
    counts = f"{notes.get('images')} images, {notes.get('held out')} of them held out"
    return f"learned on {notes['day']} from '{notes.get('folder')}', {counts}, in {notes.get('seconds')} s"
