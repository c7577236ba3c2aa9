"""Intake: a task is looked at closely before anything is learned from it."""

import logging
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from cps.data.examples import ClassName, Examples, TensorExamples, as_examples
from cps.data.normalize import are_pixels, range_of
from cps.data.rotations import RotationScheme, View, check_rotations
from cps.data.tasks import Scenario, Task
from cps.network.backbone_checks import check_references, first_pass
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import local_labels
from cps.runtime.cuda_graphs import first_line

log = logging.getLogger(__name__)

SOME = 16  # images of a data set, that tell the range of all
LARGE = 2**20  # pixels; batches of this size keep a GPU busy


def take_in(
    task: Task, network: SharedNetwork, rotations: RotationScheme, workers: int
) -> tuple[Examples, Examples | None, int]:
    """Return a task's examples, those that are held out, and how many features the backbone gives."""
    if not isinstance(task, Task):
        hint = "; learn its tasks one by one" if isinstance(task, Scenario) else ""
        raise TypeError(f"what is learned is a cps.Task, got {type(task).__name__}{hint}")
    examples = _training_examples(task, network, num_rotations=rotations.num_rotations, workers=workers)
    features = _first_look(examples, network, rotations)
    return examples, _held_out_examples(task, network, workers=workers), features


def _training_examples(task: Task, network: SharedNetwork, *, num_rotations: int = 1, workers: int = 0) -> Examples:
    """Return the task's training examples; raise `ValueError` for a task that could not be learned."""
    classes = task.classes
    if len(set(classes)) != len(classes):
        raise ValueError(f"the task names a class twice: {list(classes)}")
    if not classes:
        raise ValueError("the task names no class")
    if len(classes) * num_rotations < 2:
        raise ValueError(
            "the task has one class; a head needs at least two to tell apart, so learn this class together with "
            "another one, or in its four turns (rotations=cps.Rotations())"
        )
    for index, subnetwork in enumerate(network.subnetworks):
        known = set(classes) & set(subnetwork.classes)
        if known:
            raise ValueError(f"class {min(known, key=str)!r} was learned already, in task {index}")
    examples = as_examples(task.train, partial(local_labels, classes), workers=workers)
    labels = examples.labels()
    if labels is not None:
        counts = torch.bincount(labels, minlength=len(classes))
        if (counts == 0).any():
            raise ValueError(f"class {classes[int(counts.argmin())]!r} has no training image")
    return examples


def _held_out_examples(task: Task, network: SharedNetwork, *, workers: int = 0) -> Examples | None:
    """Return the task's examples that are held out of training, if there are any; refuse images of another form."""
    if task.val is None:
        return None
    examples = as_examples(task.val, partial(local_labels, task.classes), workers=workers)
    if examples.labels() is None:  # they are not needed, and too late to be refused when they are read
        examples = as_examples(task.val, _of_no_interest, workers=workers)
    images, _ = next(examples.batches([torch.arange(1)]))
    _check_shape(tuple(images.shape[1:]), network)
    return examples


def _of_no_interest(labels: Sequence[ClassName]) -> Tensor:
    return torch.zeros(len(labels), dtype=torch.long)


def _first_look(examples: Examples, network: SharedNetwork, rotations: RotationScheme) -> int:
    """Pass two images through the backbone; return how many features it gives, and note the images' shape and range."""
    images = _some_of(examples)
    shape = tuple(images.shape[1:])
    _check_shape(shape, network)
    _check_range(images, network)
    check_rotations(shape, rotations.num_rotations, rotations.flips)
    pixels = network.pixels(images[:2])
    passed = first_pass(network.backbone, network.parts.shared, pixels)
    if not network.subnetworks:
        network.input_range = network.input_range or range_of(images)
        check_references(network.backbone, pixels)
        if passed.uncalled:
            _keep_apart(passed.uncalled, network)
    network.input_shape = network.input_shape or shape
    return passed.features


def _some_of(examples: Examples) -> Tensor:
    """Return all images where they are at hand, else some from here and there; at least two if there are two."""
    if isinstance(examples, TensorExamples):
        return examples.images
    places = torch.linspace(0, len(examples) - 1, min(SOME, len(examples))).long()
    return next(examples.batches([places]))[0]


def _keep_apart(names: list[str], network: SharedNetwork) -> None:
    """Give each task its own copy of weights that are read without calling their layer."""
    if len(names) == len(network.weights):
        raise ValueError(f"no layer is called, so nothing can be pruned; call '{names[0].removesuffix('.weight')}'")
    log.warning(
        "'%s' (%d in all) is read without calling its layer, so it cannot be pruned; every task keeps its own copy",
        names[0], len(names),
    )  # fmt: skip
    network.make_private(names)


def check_images(images: Tensor, network: SharedNetwork) -> None:
    """Refuse images that a network cannot look at, any where it has learned nothing; warn of unlike ones."""
    if not network.subnetworks:
        raise RuntimeError("nothing has been learned yet; call learn(task) first")
    _check_shape(tuple(images.shape[1:]), network)
    _check_range(images, network)


def _check_shape(shape: tuple[int, ...], network: SharedNetwork) -> None:
    """Refuse images with other channels or axes than those learned first; height and width may differ."""
    expected = network.input_shape
    if expected is None or shape == expected:
        return
    if len(shape) != len(expected) or shape[0] != expected[0]:
        raise ValueError(f"expected images of shape {expected}, as learned first, got {shape}{_hint(shape, expected)}")
    network.warn_once(f"some images are not {expected}, as those learned first: answers may be worse; scale them alike")
    if network.subnetworks and shape not in network.other_shapes:
        _look_at_a_blank(shape, network)
        network.other_shapes.add(shape)


def _hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return what images of another shape may want."""
    if shape == expected[1:] and expected[0] == 1:
        return "; grey images are images[:, None]"
    hint = "; one image is image[None]" if len(shape) == len(expected) - 1 else ""
    return hint + ("; channels come first" if len(expected) == 3 and shape[-1] == expected[0] else "")


def _look_at_a_blank(shape: tuple[int, ...], network: SharedNetwork) -> None:
    """Refuse images of a size that the backbone cannot process."""
    try:
        network.whole_outputs([torch.zeros(1, *shape)], 0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"the backbone cannot process images of shape {shape}; those learned first are {network.input_shape} "
            f"({first_line(error)})"
        ) from error


def _check_range(images: Tensor, network: SharedNetwork) -> None:
    """Warn of images whose values are far from those learned first, as bytes are that were made floats unscaled."""
    if images.dtype == torch.uint8 and images.ndim < 4:
        network.warn_once("bytes are taken for pixels and divided by 255; give other whole numbers as int64")
    known = network.input_range
    if known is None or known[0] == known[1] or not (images.is_floating_point() or images.dtype == torch.uint8):
        return
    (low, high), (lowest, highest) = known, range_of(images)
    slack = 0.5 if are_pixels(low, high) else high - low
    if lowest < low - slack or highest > high + slack:
        network.warn_once(
            f"some images have values far from those learned first, which are {low:g} to {high:g}: answers may be "
            "wrong; scale them alike"
        )


def check_task_number(task: int, network: SharedNetwork) -> None:
    """Refuse the number of a task, which counts from 1 as commands do, that was not learned."""
    known = len(network.subnetworks)
    if not 1 <= task <= known:
        raise ValueError(f"there is no task {task}; the model has {known}, counted from 1")


def some_pixels(
    examples: Examples,
    number: int,
    draws: torch.Generator,
    network: SharedNetwork,
    *,
    batch_size: int,
    num_rotations: int,
) -> list[Tensor]:
    """Return the pixels of a number of examples, a part of them in each turn, in batches: larger ones on a GPU."""
    chosen = torch.randperm(len(examples), generator=draws)[:number]
    pixels = math.prod((network.input_shape or ())[1:])
    size = max(batch_size, LARGE // max(1, pixels) if network.device.type == "cuda" else 0)
    batches = (network.pixels(images) for images, _ in examples.batches(chosen.split(size)))
    return [torch.cat([View(turn, False)(p) for turn, p in enumerate(b.chunk(num_rotations))]) for b in batches]
