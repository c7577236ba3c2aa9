"""A model card: a short page in Markdown about what a model knows, how well, and how to use it."""

import re
from pathlib import Path
from typing import Any

from cps.app.class_accuracy import read_confusion
from cps.app.inspect import describe
from cps.app.task_metadata import ADDITIONS, DATE, NUM_IMAGES
from cps.evaluation.confusion import Confusion
from cps.runtime.text import format_bytes, format_count

MOST_CLASSES = 50  # in the table of classes
MOST_PAIRS = 10


def model_card(path: str | Path, *, title: str | None = None) -> str:
    """Return the model card of a model file; raise `ValueError` for a model without tasks.

    `title` is that of the page; by default, it is the name of the file.
    """
    model = describe(path)
    if not model["tasks"]:
        raise ValueError(f"'{path}' has no tasks, so there is nothing to describe; learn one first")
    confusion = read_confusion((task["classes"], task["notes"]) for task in model["tasks"])
    return (
        "\n\n".join(
            [
                f"# {_escape(title or Path(path).stem)}",
                _summary(model, confusion),
                "## What it knows\n\n" + _tasks(model),
                "## How accurate it is\n\n" + _accuracy(confusion),
                "## What it is made of\n\n" + _backbone(model),
                "## Limits\n\n" + _limits(model, confusion),
                "## How to use it\n\n" + _usage(model),
            ]
        )
        + "\n"
    )


def _summary(model: dict[str, Any], confusion: Confusion) -> str:
    images = [task["notes"].get(NUM_IMAGES) for task in model["tasks"]]
    learned = f", learned from {format_count(sum(images), 'image')}" if all(type(n) is int for n in images) else ""
    classes, tasks = format_class_count(len(confusion.names)), format_count(len(model["tasks"]), "task")
    return (
        f"An image classifier of {classes} in {tasks}{learned}. Made by cps (`pip install continual-prune-and-select`)."
    )


def format_class_count(number: int) -> str:
    """Return a number of classes with its noun."""
    return "1 class" if number == 1 else f"{number:,} classes"


def _tasks(model: dict[str, Any]) -> str:
    rows = ["| task | classes | images | learned | last images |", "| --- | --- | --- | --- | --- |"]
    for task in model["tasks"]:
        notes = task["notes"]
        added = notes.get(ADDITIONS)
        last = added[-1].get(DATE) if isinstance(added, list) and added and isinstance(added[-1], dict) else None
        names = ", ".join(_escape(name) for name in task["classes"])
        cells = (task["task"], names, notes.get(NUM_IMAGES, ""), notes.get(DATE, ""), last or notes.get(DATE, ""))
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(rows)


def _accuracy(confusion: Confusion) -> str:
    measured = [each for each in confusion.classes if each.images]
    total, right = sum(each.images for each in measured), sum(each.right for each in measured)
    if not total:
        return "Not measured: no images were held out."
    text = (
        f"{right / total:.1%} of {format_count(total, 'image')} were recognised. These images were not used for "
        "learning when they were predicted, each at the time its folder was learned, so classes that were learned "
        "later could not be confused with them."
    )
    rows = ["| class | right | held-out images |", "| --- | --- | --- |"]
    worst = sorted(measured, key=lambda each: each.right / each.images)
    rows += [f"| {_escape(name)} | {right / images:.0%} | {images} |" for name, right, images in worst[:MOST_CLASSES]]
    left = len(worst) - MOST_CLASSES
    table = "\n".join(rows) + (f"\n\nThe other {left} classes are at least as accurate." if left > 0 else "")
    pairs = [f"- {_escape(a)} and {_escape(b)}: {format_count(n, 'image')}" for a, b, n in confusion.pairs[:MOST_PAIRS]]
    confused = "Most often confused:\n\n" + "\n".join(pairs) if pairs else "No held-out image was confused."
    return "\n\n".join([text, confused, table])


def _backbone(model: dict[str, Any]) -> str:
    shape = " x ".join(map(str, model["input_shape"]))
    weights = model["pretrained"]
    return "\n".join(
        [
            f"- Backbone: {model['backbone'] or 'custom'}, {model['weights']:,} shared weights; images {shape}",
            f"- Pretrained weights: {_escape(weights) if weights else 'none noted'}",
            f"- Learning: {_method(model)}",
            f"- File: {format_bytes(model['bytes'])}, {model['free']:.0%} of the weights are free for new tasks",
        ]
    )


def _method(model: dict[str, Any]) -> str:
    frozen = sum(task["frozen"] for task in model["tasks"])
    if frozen == len(model["tasks"]):
        return "a closed form over the features of the frozen backbone; no weights were trained"
    closed = f"; {format_count(frozen, 'task')} by a closed form over frozen features" if frozen else ""
    return f"pruned subnetworks of one network (Continual Prune-and-Select){closed}"


def _limits(model: dict[str, Any], confusion: Confusion) -> str:
    few = [each.name for each in confusion.classes if each.images < 5]
    is_measured = any(each.images for each in confusion.classes)
    lines = [
        "- An image that belongs to no class is only sometimes recognised as unknown; measure it on your own images."
    ]
    if is_measured:
        lines.append(
            "- The accuracy is that of images like those in the folders; other cameras, places or seasons may differ."
        )
    if is_measured and few:
        lines.append(
            f"- Fewer than 5 images were held out for {len(few)} of {format_class_count(len(confusion.names))}, so "
            "their accuracy is uncertain."
        )
    if model["pretrained"]:
        lines.append("- The licence and the biases of the pretrained weights apply.")
    return "\n".join(lines)


def _usage(model: dict[str, Any]) -> str:
    name, shape = model["file"], model["input_shape"]
    if model["backbone"] and len(shape) == 3 and shape[0] == 3:
        lines = [
            f"cps predict IMAGES --model {name}    # class and task of each image",
            f"cps serve {name}                     # a web page and an HTTP API",
            f"cps learn FOLDER --model {name}      # new classes, or more images of known ones",
        ]
    else:  # the commands read colour images, and open backbones that the file names
        backbone = "" if model["backbone"] else ", backbone"
        lines = [
            "import cps",
            "",
            f'learner = cps.load("{name}"{backbone})',
            f"learner.predict(images).classes    # images of shape (N, {', '.join(map(str, shape))})",
        ]
    return "\n".join(f"    {line}".rstrip() for line in lines)


def _escape(text: object) -> str:
    """Return text without characters that Markdown or HTML would interpret."""
    single = " ".join(str(text).split())
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", single)


def _cell(value: object) -> str:
    return str(value) if value else " "
