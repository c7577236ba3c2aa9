"""Inspection: what a model file holds, and whether it still is what was learned."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cps.loading import Load, load
from cps.network.backbones import Builtin
from cps.network.masks import mask_shape, unpack, weights_on
from cps.network.model_file import content_of, read_model
from cps.runtime.environment import reproducibility_context
from cps.storage.container import FileError


class Check(NamedTuple):
    """Something that was checked: what, how many of it, and what came out."""

    what: str
    number: int
    result: str


def describe(path: str | Path) -> dict[str, Any]:
    """Return what a model file holds, as plain data: tasks with notes, capacity, size, settings. Tasks count from 1.

    The backbone is not needed. Reading it checks the digest of every tensor.
    """
    header, tensors = read_model(path)
    weights = {n.removeprefix("weight/"): value for n, value in tensors.items() if n.startswith("weight/")}
    total = sum(value.numel() for value in weights.values())
    if not weights:
        raise FileError(f"'{path}' is inconsistent: it holds no weights")
    taken = {name: _weights_on(path, tensors, f"taken/{name}", value) for name, value in weights.items()}
    backbone = header["settings"].get("backbone")
    tasks = []
    for index, classes in enumerate(header["classes"]):
        used = sum(_weights_on(path, tensors, f"task/{index}/mask/{name}", value) for name, value in weights.items())
        known = {"task": index + 1, "classes": classes, "density": used / total}
        tasks.append({**known, "fingerprint": header["fingerprints"][index], "notes": header["notes"][index]})
    return {
        "file": Path(path).name,
        "bytes": Path(path).stat().st_size,
        "backbone": backbone.name if isinstance(backbone, Builtin) else None,
        "input_shape": header["input_shape"],
        "weights": total,
        "free": 1 - sum(taken.values()) / total,
        "fullest": [[name, share] for share, name in _fullest(taken, weights)],
        "settings": {name: str(value) for name, value in header["settings"].items()},
        "tasks": tasks,
    }


def verify(path: str | Path, own: Load | None = None) -> list[Check]:
    """Check everything about a model file that can be checked; raise `FileError` if anything is wrong.

    `own` opens a model of a network of one's own, which `cps.load` alone cannot.
    """
    header, tensors = read_model(path)
    tasks = len(header["classes"])
    learner = None
    if own is not None or isinstance(header["settings"].get("backbone"), Builtin):
        learner = (own or load)(path)
    else:
        content_of(path, header, tensors)  # which loading checks too
    checks = [
        Check("header against its digest", 1, "holds"),
        Check("tensors against their digests", len(tensors), "hold"),
        Check("masks within the weights that are taken", tasks, "hold"),
        Check("subnetworks against their fingerprints", tasks, "hold"),
    ]
    if learner is None:
        result = "not compared: the backbone is your own; give --loader"
        return [*checks, Check("answers on fixed inputs, to the bit", tasks, result)]
    here, same = reproducibility_context(learner.network.device), 0
    elsewhere = set()
    for task, subnetwork in enumerate(learner.network.subnetworks):
        then = subnetwork.notes.get("answers")
        if not isinstance(then, dict) or then.get("on") != here:
            elsewhere.add(str(then.get("on")) if isinstance(then, dict) else "a computer that was not noted")
        elif then.get("digest") != learner.fingerprint(task).outputs:
            raise FileError(f"'{path}': task {task + 1} gives other answers on fixed inputs than when it was learned")
        else:
            same += 1
    if same:
        checks.append(Check("answers on fixed inputs, to the bit", same, "as when they were learned"))
    if elsewhere:
        result = f"not compared: learned on {'; '.join(sorted(elsewhere))}; this is {here}"
        checks.append(Check("answers on fixed inputs, to the bit", tasks - same, result))
    return checks


def _weights_on(path: str | Path, tensors: dict[str, Tensor], name: str, weight: Tensor) -> int:
    shape = mask_shape(weight.shape)
    packed = tensors.get(name)
    fits = packed is not None and packed.dtype == torch.uint8 and packed.numel() == -(-math.prod(shape) // 8)
    if packed is None or not fits or weight.ndim < 2 or not weight.numel():
        raise FileError(f"'{path}' is inconsistent: tensor '{name}' is missing or has a wrong form")
    return weights_on(unpack(packed, shape), weight)


def _fullest(taken: dict[str, int], weights: dict[str, Tensor]) -> list[tuple[float, str]]:
    """Return the three layers with the least room: the share that is taken, and the name."""
    shares = [(number / weights[name].numel(), name.removesuffix(".weight")) for name, number in taken.items()]
    return sorted(shares, key=lambda entry: (-entry[0], entry[1]))[:3]
