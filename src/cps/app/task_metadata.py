"""The notes that `cps learn` stores with a task in the model file.

Notes can also come from other programs, so the readers check their form.
"""

import base64
from collections.abc import Iterable, Mapping
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
CONFUSION = "confusion"
ADDITIONS = "additions"
IMAGE_DIGESTS = "image digests"
OUTPUTS = "answers"
OUTPUTS_DIGEST = "digest"
OUTPUTS_CONTEXT = "on"


BY_CLASS = (CLASS_COUNTS, TYPICAL_OUTPUTS, CONFUSION, IMAGE_DIGESTS)  # notes with values by the name of the class
DIGEST_BYTES = 6  # of the digest of an image's file that are kept; two of a million files agree with probability 0.002


def encode_digests(digests: Iterable[str]) -> str:
    """Return the digests of image files (in hexadecimal) as text for a note: the first bytes of each."""
    return base64.b64encode(b"".join(bytes.fromhex(each)[:DIGEST_BYTES] for each in digests)).decode()


def read_digests(notes: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the beginnings of the digests of the images of each class, if noted."""
    noted = notes.get(IMAGE_DIGESTS)
    found: dict[str, set[str]] = {}
    for name, text in noted.items() if isinstance(noted, dict) else ():
        try:
            values = base64.b64decode(text, validate=True).hex()
        except (TypeError, ValueError):
            continue
        size = 2 * DIGEST_BYTES
        found[name] = {values[start : start + size] for start in range(0, len(values), size)}
    return found


def without_digests(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes without the digests of images, which are of no use to readers."""
    return {key: value for key, value in notes.items() if key != IMAGE_DIGESTS}


def renamed_class(notes: Mapping[str, Any], old: str, new: str | None) -> dict[str, Any]:
    """Return the notes with another name for a class, or without it if the new name is None."""

    def rename(value: Any, key: str) -> Any:
        if key == ADDITIONS and isinstance(value, list):
            return [{k: rename(v, k) for k, v in each.items()} if isinstance(each, dict) else each for each in value]
        if key not in BY_CLASS or not isinstance(value, dict):
            return value
        values = {name: rename(each, key) for name, each in value.items() if name != old or new is not None}
        return {new if name == old and new is not None else name: each for name, each in values.items()}

    changed = {key: rename(value, key) for key, value in notes.items()}
    if new is None and old in (notes.get(CLASS_COUNTS) or {}):
        changed |= {NUM_IMAGES: sum(changed[CLASS_COUNTS].values()), SCAN_DIGEST: None}
    return changed


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
    added = notes.get(ADDITIONS)
    added = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    counts = f"{notes.get(NUM_IMAGES)} images, {notes.get(NUM_HELD_OUT)} of them held out"
    text = f"learned on {notes[DATE]} from '{notes.get(FOLDER)}', {counts}, in {notes.get(SECONDS)} s"
    more = [f"{each.get(NUM_IMAGES)} from '{each.get(FOLDER)}' on {each.get(DATE)}" for each in added]
    return f"{text}; of these images were added later: {', '.join(more)}" if more else text
