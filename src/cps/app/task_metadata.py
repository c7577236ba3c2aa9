"""The notes that `cps learn` stores with a task in the model file.

Notes can also come from other programs, so the readers check their form.
"""

from collections.abc import Mapping
from typing import Any

from cps.runtime.text import format_count

# Keys of the notes. Model files and `cps inspect --json` contain them, so they must not change.
DATE = "day"
FOLDER = "folder"
SCAN_DIGEST = "shipment"
NUM_IMAGES = "images"
CLASS_COUNTS = "classes"
NUM_SKIPPED = "skipped"
NUM_HELD_OUT = "held out"
ACCURACY = "accuracy"
WITH_TASK_KNOWN = "task known"
WITH_TASK_SELECTED = "task found"
TYPICAL_OUTPUTS = "usual output"
SECONDS = "seconds"
CPS_VERSION = "cps"
OUTPUTS = "answers"
OUTPUTS_DIGEST = "digest"
OUTPUTS_CONTEXT = "on"


def read_accuracy(notes: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the accuracy on held-out images with the task known and with the task selected, if noted."""
    noted = notes.get(ACCURACY)
    if not isinstance(noted, dict):
        return None
    known, selected = noted.get(WITH_TASK_KNOWN), noted.get(WITH_TASK_SELECTED)
    return (known, selected) if isinstance(known, float) and isinstance(selected, float) else None


def read_typical_outputs(notes: Mapping[str, Any]) -> dict[str, float]:
    """Return the typical largest logit for images of each class, if noted."""
    noted = notes.get(TYPICAL_OUTPUTS)
    return {k: v for k, v in noted.items() if isinstance(v, float)} if isinstance(noted, dict) else {}


def accuracy_text(notes: Mapping[str, Any]) -> str:
    """Return the accuracy on held-out images as text."""
    accuracy = read_accuracy(notes)
    if accuracy is None:
        return "not measured: no images were held out"
    known, selected = accuracy
    classes = len(notes[CLASS_COUNTS])
    measured = f"{selected:.1%} with the task selected among all ({format_count(notes[NUM_HELD_OUT], 'image')})"
    if classes == 1:
        return f"{measured}; once the task is known, a single class is always right"
    if known <= 1 / classes:
        measured += "; this is no better than guessing: train longer, or check the images"
    return f"{known:.1%} with the task known, {measured}"


def history_text(notes: Mapping[str, Any]) -> str:
    """Return when, from what and how long a task was learned, as text."""
    if DATE not in notes:
        return "learned without notes"
    counts = f"{notes.get(NUM_IMAGES)} images, {notes.get(NUM_HELD_OUT)} of them held out"
    return f"learned on {notes[DATE]} from '{notes.get(FOLDER)}', {counts}, in {notes.get(SECONDS)} s"
