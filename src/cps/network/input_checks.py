"""Check the images and labels of a task before training, and images before prediction."""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from cps.data.examples import ClassName, Examples, TensorExamples, as_examples
from cps.data.images import AS_RGB
from cps.data.normalize import image_range, is_pixel_range
from cps.data.rotations import RotationScheme, check_rotations
from cps.data.tasks import Scenario, Task
from cps.network.backbone_checks import check_forward, check_functional_call, check_masks_hold
from cps.network.shared import SharedNetwork
from cps.network.subnetwork import local_labels
from cps.runtime.text import first_line

log = logging.getLogger(__name__)

SAMPLE = 16  # images of a data set from which the value range is estimated


def prepare_task(
    task: Task,
    network: SharedNetwork,
    rotations: RotationScheme,
    workers: int,
    *,
    is_frozen: bool = False,
    new_versions: bool = False,
) -> tuple[Examples, Examples | None, int]:
    """Return a task's training examples, its held-out examples or None, and the number of features of the backbone.

    Raise an error for a task that the network could not learn. If `is_frozen`, nothing will be trained or pruned.
    Known classes are an error, too, unless `new_versions`.
    """
    if not isinstance(task, Task):
        hint = "; learn its tasks one by one" if isinstance(task, Scenario) else ""
        raise TypeError(f"task must be a cps.Task, got {type(task).__name__}{hint}")
    if len(task.classes) * rotations.num_rotations == 1 and not is_frozen:
        raise ValueError(
            "the task has one class, and a head needs at least two outputs; learn it together with another class, or "
            "in four rotations (rotations=cps.Rotations())"
        )
    if not new_versions:
        _check_new(task.classes, network)
    examples = _training_examples(task, network, workers=workers)
    features = _run_first_images(examples, network, rotations, is_frozen=is_frozen)
    return examples, _held_out_examples(task, network, workers=workers), features


def prepare_known(task: Task, network: SharedNetwork, workers: int) -> Examples:
    """Return the examples of a task of known classes; raise an error if a class is new or the images do not fit."""
    if not isinstance(task, Task):
        raise TypeError(f"task must be a cps.Task, got {type(task).__name__}")
    if not network.subnetworks:
        raise RuntimeError("nothing has been learned yet; call learn(task) first")
    unknown = [name for name in task.classes if not network.tasks_of(name)]
    if unknown:
        raise ValueError(f"class {unknown[0]!r} was not learned yet; only images of known classes can be added")
    examples = _training_examples(task, network, workers=workers)
    check_images(_sample(examples), network)
    return examples


def _check_new(classes: Sequence[ClassName], network: SharedNetwork) -> None:
    """Raise `ValueError` for a class that was learned before."""
    for name in classes:
        known = network.tasks_of(name)
        if known:
            raise ValueError(
                f"class {name!r} was already learned, in task {known[0]}; add its images to the sums with add(task), "
                "or learn a new version of it with learn(task, new_versions=True)"
            )


def _training_examples(task: Task, network: SharedNetwork, *, workers: int = 0) -> Examples:
    """Return the task's training examples; raise `ValueError` if it cannot be learned."""
    classes = task.classes
    if len(set(classes)) != len(classes):
        raise ValueError(f"the task names a class twice: {list(classes)}")
    if not classes:
        raise ValueError("the task names no class")
    examples = as_examples(task.train, partial(local_labels, classes), workers=workers)
    labels = examples.labels()
    if labels is not None:
        counts = torch.bincount(labels, minlength=len(classes))
        if (counts == 0).any():
            raise ValueError(f"class {classes[int(counts.argmin())]!r} has no training image")
    return examples


def _held_out_examples(task: Task, network: SharedNetwork, *, workers: int = 0) -> Examples | None:
    """Return the task's held-out examples, or None; raise `ValueError` if their shape is wrong."""
    if task.val is None:
        return None
    examples = as_examples(task.val, partial(local_labels, task.classes), workers=workers)
    if examples.labels() is None:  # not needed, and errors in them would come too late
        examples = as_examples(task.val, _ignore_labels, workers=workers)
    images, _ = next(examples.batches([torch.arange(1)]))
    _check_shape(tuple(images.shape[1:]), network)
    return examples


def _ignore_labels(labels: Sequence[ClassName]) -> Tensor:
    return torch.zeros(len(labels), dtype=torch.long)


def _run_first_images(examples: Examples, network: SharedNetwork, rotations: RotationScheme, *, is_frozen: bool) -> int:
    """Run two images through the backbone; return its number of features, and record the images' shape and range."""
    images = _sample(examples)
    shape = tuple(images.shape[1:])
    _check_shape(shape, network)
    _check_range(images, network)
    check_rotations(shape, rotations.num_rotations, rotations.flips)
    pixels = network.pixels(images[:2])
    passed = check_forward(network.backbone, network.parts.shared, pixels)
    if not network.subnetworks:
        check_functional_call(network.backbone, pixels)
        if passed.unscored:
            _make_private(passed.unscored, network)
    elif passed.unscored:
        layer = passed.unscored[0].removesuffix(".weight")
        raise ValueError(f"layer '{layer}' must pass its weight to F.conv2d or F.linear, to be pruned like before")
    if not is_frozen:
        check_masks_hold(network.backbone, passed.computed, pixels)
    network.set_input(shape, image_range(images))
    return passed.features


def _sample(examples: Examples) -> Tensor:
    """Return all images if they are in memory, else a few spread over the data set; two or more if there are two."""
    if isinstance(examples, TensorExamples):
        return examples.images
    indices = torch.linspace(0, len(examples) - 1, min(SAMPLE, len(examples))).long()
    return next(examples.batches([indices]))[0]


def _make_private(names: list[str], network: SharedNetwork) -> None:
    """Give every task its own copy of weights that cannot be scored."""
    if len(names) == len(network.weights):
        layer = names[0].removesuffix(".weight")
        raise ValueError(
            "no layer of the backbone passes its weight to F.conv2d or F.linear, so nothing can be pruned; call "
            f"'{layer}', whose forward must do so"
        )
    log.warning(
        "'%s' (%d in all) is used without calling its layer, or by another function than F.conv2d and F.linear, so it "
        "cannot be pruned; every task keeps its own copy",
        names[0], len(names),
    )  # fmt: skip
    network.make_private(names)


def check_images(images: Tensor, network: SharedNetwork) -> None:
    """Raise an error for images that the network cannot process; warn if they differ from the learned ones."""
    if not network.subnetworks:
        raise RuntimeError("nothing has been learned yet; call learn(task) first")
    _check_shape(tuple(images.shape[1:]), network)
    _check_range(images, network)


def _check_shape(shape: tuple[int, ...], network: SharedNetwork) -> None:
    """Raise `ValueError` for other channels or axes than those of the first task; height and width may differ."""
    expected = network.input_shape
    if expected is None or shape == expected:
        return
    if len(shape) != len(expected) or shape[0] != expected[0]:
        hint = _hint(shape, expected)
        raise ValueError(f"images must have shape {expected}, as in the first task, got {shape}{hint}")
    network.warn_once(f"some images do not have shape {expected}, as in the first task: accuracy may drop; resize them")
    if network.subnetworks and shape not in network.accepted_shapes:
        _run_blank(shape, network)
        network.accept_shape(shape)


def _hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return a hint at the likely mistake behind a wrong shape."""
    if shape == expected[1:] and expected[0] == 1:
        return "; add the channel axis of grey images with images[:, None]"
    if shape[1:] == expected[1:] and expected[0] == 3 and shape[0] in (1, 4):
        return f"; make pictures RGB with {AS_RGB}"
    hint = "; pass a single image as image[None]" if len(shape) == len(expected) - 1 else ""
    return hint + ("; the channel axis must come first" if len(expected) == 3 and shape[-1] == expected[0] else "")


def _run_blank(shape: tuple[int, ...], network: SharedNetwork) -> None:
    """Raise `ValueError` if the backbone cannot process images of this shape."""
    try:
        network.full_outputs([torch.zeros(1, *shape)], 0)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:  # timm asserts sizes
        raise ValueError(
            f"the backbone cannot process images of shape {shape}; those of the first task are {network.input_shape} "
            f"({first_line(error)})"
        ) from error


def _check_range(images: Tensor, network: SharedNetwork) -> None:
    """Warn if values are far from those of the first task, for instance bytes converted to float without scaling."""
    if images.dtype == torch.uint8 and images.ndim < 4:
        network.warn_once("uint8 inputs are treated as pixels and divided by 255; pass other integers as int64")
    known = network.input_range
    if known is None or known[0] == known[1] or not (images.is_floating_point() or images.dtype == torch.uint8):
        return
    (low, high), (lowest, highest) = known, image_range(images)
    slack = 0.5 if is_pixel_range(low, high) else high - low
    if lowest < low - slack or highest > high + slack:
        network.warn_once(
            f"some images have values far from those of the first task, {low:g} to {high:g}: predictions may be wrong; "
            "scale all images alike"
        )
