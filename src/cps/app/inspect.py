"""Describe and verify a model file."""

from pathlib import Path
from typing import Any, NamedTuple

from cps.app.class_accuracy import read_confusion
from cps.app.task_metadata import OUTPUTS, OUTPUTS_CONTEXT, OUTPUTS_DIGEST, without_digests
from cps.learner import Learner
from cps.loading import Load, load
from cps.network.architectures import Architecture
from cps.network.masks import count_weights, density
from cps.network.model_file import ModelContent, parse_model, read_model
from cps.runtime.environment import reproducibility_context
from cps.storage.container import FileError

OUTPUTS_CHECK = "outputs on fixed inputs, bit for bit"


class Check(NamedTuple):
    """A check of a model file: what was checked, how many of it, and the result."""

    what: str
    number: int
    result: str


def describe(path: str | Path) -> dict[str, Any]:
    """Return the content of a model file as JSON data: tasks with notes, capacity, size, settings. Tasks count from 1.

    The backbone is not needed. The digest of every tensor is checked.
    """
    header, tensors = read_model(path)
    content = parse_model(path, header, tensors)
    if not content.weights:
        raise FileError(f"'{path}' is inconsistent: it contains no weights")
    backbone = header["settings"].get("backbone")
    tasks = [
        {
            "task": index + 1,
            "classes": list(subnetwork.classes),
            "density": density(subnetwork.masks, content.weights),
            "fingerprint": subnetwork.digest,
            "frozen": subnetwork.is_frozen,
            "notes": without_digests(subnetwork.notes),
        }
        for index, subnetwork in enumerate(content.subnetworks)
    ]
    confusion = read_confusion((subnetwork.classes, subnetwork.notes) for subnetwork in content.subnetworks)
    return {
        "file": Path(path).name,
        "bytes": Path(path).stat().st_size,
        "backbone": backbone.name if isinstance(backbone, Architecture) else None,
        "pretrained": backbone.weights if isinstance(backbone, Architecture) else "",
        "input_shape": header["input_shape"],
        "weights": sum(weight.numel() for weight in content.weights.values()),
        "free": 1 - density(content.taken, content.weights),
        "fullest": [[name, share] for share, name in _fullest(content)],
        "settings": {name: str(value) for name, value in header["settings"].items()},
        "tasks": tasks,
        "accuracy": [
            {"class": name, "right": right, "held_out": held_out} for name, right, held_out in confusion.classes
        ],
        "confused": [{"classes": [one, other], "images": images} for one, other, images in confusion.pairs],
    }


def verify(path: str | Path, loader: Load | None = None) -> list[Check]:
    """Check everything in a model file that can be checked; raise `FileError` if anything is wrong.

    `loader` loads a model with a custom backbone, which `cps.load` alone cannot.
    """
    header, tensors = read_model(path)
    tasks = len(header["classes"])
    learner = None
    if loader is not None or isinstance(header["settings"].get("backbone"), Architecture):
        learner = (loader or load)(path)
    else:
        parse_model(path, header, tensors).check(path)  # loading checks this too
    checks = [
        Check("header digest", 1, "ok"),
        Check("tensor digests", len(tensors), "ok"),
        Check("masks within the taken weights", tasks, "ok"),
        Check("subnetwork fingerprints", tasks, "ok"),
    ]
    if learner is None:
        return [*checks, Check(OUTPUTS_CHECK, tasks, "not compared: the model has a custom backbone; use --loader")]
    return [*checks, *_check_outputs(path, learner)]


def _check_outputs(path: str | Path, learner: Learner) -> list[Check]:
    """Compare outputs with those noted when the tasks were learned, for tasks learned on hardware like this."""
    here, identical = reproducibility_context(learner.network.device), 0
    elsewhere = []
    for task, subnetwork in enumerate(learner.network.subnetworks):
        noted = subnetwork.notes.get(OUTPUTS)
        if not isinstance(noted, dict) or noted.get(OUTPUTS_CONTEXT) != here:
            elsewhere.append(str(noted.get(OUTPUTS_CONTEXT)) if isinstance(noted, dict) else "an unknown machine")
        elif noted.get(OUTPUTS_DIGEST) != learner.fingerprint(task).outputs:
            raise FileError(f"'{path}': the outputs of task {task + 1} on fixed inputs differ from when it was learned")
        else:
            identical += 1
    checks = []
    if identical:
        checks.append(Check(OUTPUTS_CHECK, identical, "identical to when they were learned"))
    if elsewhere:
        result = f"not compared: learned on {'; '.join(sorted(set(elsewhere)))}; this is {here}"
        checks.append(Check(OUTPUTS_CHECK, len(elsewhere), result))
    return checks


def _fullest(content: ModelContent) -> list[tuple[float, str]]:
    """Return the three layers with the fewest free weights: the share that is taken, and the name."""
    shares = [
        (count_weights(mask, content.weights[name]) / content.weights[name].numel(), name.removesuffix(".weight"))
        for name, mask in content.taken.items()
    ]
    return sorted(shares, key=lambda entry: (-entry[0], entry[1]))[:3]
