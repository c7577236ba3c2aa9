"""Closed forms as a continual-learning method: sums over fixed features, and a classifier computed from the sums.

Nothing is trained and no image or feature is kept. The result does not depend on the order of tasks and images. A task
is learned in one pass, more images of its classes are added to its sums, and it is unlearned by dropping them.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cps.closed_form.classifiers import LDA, Classifier, LinearScores
from cps.closed_form.spaces import Pretrained, RandomPatches, RandomReLU, Space, default_space
from cps.closed_form.sums import Moments, Sums, pack, unpack
from cps.data.examples import ClassName, Examples, as_examples, read_labels
from cps.data.images import as_images
from cps.data.normalize import Normalize, Prepare
from cps.data.rotations import check_rotations
from cps.data.tasks import Task
from cps.method import Assumptions
from cps.methods.blocks.task_checks import check_classes, check_counts, check_shape
from cps.network.outputs import Evidence, Outputs
from cps.network.partition import named_tensors
from cps.network.subnetwork import Statistics, local_labels
from cps.runtime.devices import full_precision
from cps.selection.groups import consecutive_groups, mean_by_group
from cps.selection.max_output import MaxOutput
from cps.storage import container
from cps.storage.container import FileError, digest
from cps.storage.settings_codec import contains_setting, decode, encode, unknown_in

KIND = "closed form"  # of the file
BATCH = 256  # images whose features are in memory at a time
MAX_PIXELS = 2**28  # of an image, as in model files
SHRINKAGES: dict[type, float] = {RandomReLU: 0.1, RandomPatches: 0.001, Pretrained: 0.5}  # best on held-out images
OTHER_SHRINKAGE = 0.1  # of modules and other spaces


class ClosedForm:
    """Class means and covariances of fixed features, and the classifier that they give.

    `space` is a space such as `cps.RandomPatches()`, a module (pixels -> features (N, d)) such as
    `learner.extract(0).backbone`, or None for `suggested_space` of the images' shape. `cps.Pretrained()` needs the
    `backbone`. The default `classifier` is linear discriminant analysis with a shrinkage that depends on the space
    (studies/closed_forms.py chose it on held-out images). With `flips`, mirror images of training images are added to
    the sums.

    Each task keeps a covariance of its own, so that it can be forgotten; with `pooled`, all tasks share one, which
    takes less memory, and no task can be forgotten. If learning, adding or merging fails, nothing has changed.

    >>> import torch, cps
    >>> images, labels = torch.randn(40, 1, 4, 4), [0, 1, 2, 3] * 10
    >>> images += 3 * torch.tensor(labels)[:, None, None, None]
    >>> method = ClosedForm(cps.RandomReLU(50))
    >>> for task in cps.split_by_class((images, labels), sizes=2):
    ...     method.learn(task)
    >>> method.classes
    [(0, 1), (2, 3)]
    >>> method.predict(images[:4]) == labels[:4]
    True
    """

    name = "closed form"
    assumes = Assumptions()
    is_sealed = False
    selector = group_selector = MaxOutput()
    image_passes = 0  # nothing is trained

    def __init__(
        self,
        space: Space | nn.Module | None = None,
        classifier: Classifier | None = None,
        *,
        backbone: nn.Module | None = None,
        normalize: Normalize | None = None,
        flips: bool = False,
        pooled: bool = False,
        workers: int = 0,
        device: torch.device | str = "cpu",
    ):
        if space is not None and not isinstance(space, nn.Module) and not hasattr(space, "make"):
            raise TypeError(f"space must be a space such as cps.RandomPatches(), a module or None, got {space!r}")
        if classifier is not None and not hasattr(classifier, "fit"):
            raise TypeError(f"classifier must be a classifier such as cps.LDA(), got {classifier!r}")
        self.space, self._given_classifier = space, classifier
        self.normalize, self.flips, self.pooled = normalize, flips, pooled
        self.workers, self.device = workers, torch.device(device)
        self.classes: list[tuple[ClassName, ...]] = []
        self.input_shape: tuple[int, ...] | None = None
        self._sums: list[Sums] = []  # one for each task, or one for all if pooled
        self._backbone = backbone
        self._module: tuple[tuple[int, ...], nn.Module] | None = None  # and the shape that it was made for
        self._uses_given_weights = isinstance(space, nn.Module)
        self._linear: LinearScores | None = None

    def __repr__(self) -> str:
        return f"ClosedForm({self.space_name}, {self.classifier}, tasks={len(self.classes)})"

    @property
    def space_name(self) -> str:
        """The space and its settings; the class of a module."""
        return type(self.space).__name__ if isinstance(self.space, nn.Module) else str(self._space(self.input_shape))

    @property
    def classifier(self) -> Classifier:
        """The classifier, the given one or the default of the space."""
        if self._given_classifier is not None:
            return self._given_classifier
        return LDA(SHRINKAGES.get(type(self._space(self.input_shape)), OTHER_SHRINKAGE))

    def learn(self, task: Task, *, checkpoint: object = None, on_epoch: object = None) -> None:
        """Learn the classes of a task in one pass over its training images.

        It takes the options of all methods, but has no epochs after which it could report or resume.
        """
        classes = check_classes(task, self.classes, hint="; add(task) adds images")
        examples = as_examples(task.train, partial(local_labels, classes), workers=self.workers)
        labels = examples.labels()
        if labels is not None:
            check_counts(classes, torch.bincount(labels, minlength=len(classes)))
        shape = self._check_first(examples)
        sums = self._sum(examples, torch.arange(len(examples)), torch.arange(len(classes)), len(classes), shape)
        check_counts(classes, sums.counts)
        self._update([*self.classes, classes], self._with_task(sums), shape)

    def add(self, task: Task) -> None:
        """Add training images of known classes, which may belong to several tasks: as if they had been there at once.

        `task.classes` are some of the learned classes, in any order.
        """
        classes = check_classes(task)
        known = self._owners()
        for name in classes:
            if name not in known:
                raise ValueError(f"class {name!r} has not been learned; learn(task) learns new classes")
        examples = as_examples(task.train, partial(local_labels, classes), workers=self.workers)
        shape = self._check_first(examples)
        labels = read_labels(examples).cpu()
        owners = torch.tensor([0 if self.pooled else known[name] for name in classes])
        blocks = self._blocks()
        sums = list(self._sums)
        for block in owners[labels].unique().tolist():
            places = torch.tensor([blocks[block].index(name) if name in blocks[block] else 0 for name in classes])
            images = (owners[labels] == block).nonzero()[:, 0]
            sums[block] = sums[block] + self._sum(examples, images, places, len(blocks[block]), shape)
        self._update(self.classes, sums, shape)

    def merge(self, other: "ClosedForm") -> None:
        """Add what another process has summed: more images of the same tasks, or further tasks."""
        self._check_mergeable(other)
        known = {frozenset(classes): index for index, classes in enumerate(self.classes)}
        classes, sums = list(self.classes), list(self._sums)
        for theirs, part in zip(other.classes, other._by_task(), strict=True):
            index = known.get(frozenset(theirs))
            if index is None:
                if shared := set(theirs) & set(self._owners()):
                    raise ValueError(
                        f"class {min(shared, key=str)!r} is in tasks of different classes; cut the tasks alike to merge"
                    )
                classes.append(theirs)
                sums = self._with_task(part, sums)
            else:
                block = 0 if self.pooled else index
                names = [name for group in classes for name in group] if self.pooled else classes[index]
                places = torch.tensor([list(names).index(name) for name in theirs])
                sums[block] = sums[block] + _placed(part, places, len(names))
        if self.pooled and sums and other._sums:  # their covariance is about all of their tasks
            total = sums[0]
            sums = [Sums(total.counts, total.means, total.scatter + other._sums[0].scatter)]
        self._update(classes, sums, self.input_shape or other.input_shape)

    def forget(self, task: int) -> None:
        """Unlearn a task; later tasks move down by one. Nothing is left of it, to the bit."""
        self._check_task(task)
        if self.pooled:
            raise ValueError("a task cannot be forgotten if all share one covariance; use ClosedForm(pooled=False)")
        remaining = [index for index in range(len(self.classes)) if index != task]
        classes, sums = [self.classes[index] for index in remaining], [self._sums[index] for index in remaining]
        self._update(classes, sums, self.input_shape if classes else None)

    def scores(self, images: Any) -> Tensor:
        """Return the scores (N, classes) of all classes learned, task after task, in float64 on the CPU.

        Those of `LDA` and `NearestMean` are log likelihoods up to a constant.
        """
        linear = self.linear_scores()
        pixels = as_images(images)
        check_shape(pixels, self.input_shape)
        return torch.cat([linear(self.features(batch).double()) for batch in pixels.split(BATCH)])

    def evidence(self, images: Any) -> Evidence:
        """Return features (N, d) and the scores of the classes of each task for the images."""
        linear, pixels = self.linear_scores(), as_images(images)
        check_shape(pixels, self.input_shape)
        features = torch.cat([self.features(batch) for batch in pixels.split(BATCH)])
        scores = torch.cat([linear(part.double()) for part in features.split(BATCH)])
        parts = scores.split([len(classes) for classes in self.classes], dim=1)
        return Evidence.of([Outputs(features, part) for part in parts])

    def statistics(self, selector: str) -> list[Statistics]:
        """Return nothing for each task: no selector keeps statistics."""
        return [{} for _ in self.classes]

    def predict(self, images: Any, *, task: int | None = None, group_size: int = 1) -> list[ClassName]:
        """Return the class of each image, among those of `task` if it is given.

        With `group_size` above 1, every `group_size` consecutive images are assumed to share a task.
        """
        scores = self.scores(images)
        sizes = [len(classes) for classes in self.classes]
        if task is None:
            groups = consecutive_groups(len(scores), group_size)
            tasks = select_tasks(scores, sizes, groups)[groups]
        else:
            self._check_task(task)
            tasks = torch.full((len(scores),), task)
        names = [name for classes in self.classes for name in classes]
        return [names[index] for index in best_classes(scores, sizes, tasks).tolist()]

    def linear_scores(self) -> LinearScores:
        """Return the scores of all classes as a function of features."""
        if not self.classes:
            raise RuntimeError("nothing has been learned yet; call learn(task) first")
        if self._linear is None:
            self._linear = self.classifier.fit(Moments.of(self._sums))
        return self._linear

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return the features (N, d) of a batch of images, on the CPU."""
        module = self._made(tuple(images.shape[1:]))
        with full_precision():
            features = module(Prepare(self.normalize)(images.to(self.device)))
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(images):
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(f"the space must return features of shape ({len(images)}, d), got {found}")
        return features.float().cpu()

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes of a file by what they are; `weights` are those of a given network, which no file holds.

        While it learns it needs no more.
        """
        tensors = self._tensors()
        kinds = ("counts", "means", "covariances")
        sizes = {kind: sum(value.nbytes for name, value in tensors.items() if kind in name) for kind in kinds}
        module = self._module[1] if self._module and self._uses_given_weights else nn.Module()
        return {**sizes, "weights": sum(value.nbytes for value in named_tensors(module).values())}

    def save(self, path: str | Path) -> None:
        """Write all sums and settings to a file. A previous file stays intact until the new one is complete."""
        space = self._space(self.input_shape)  # by name, since suggestions may change from version to version
        header = {
            "classes": [list(classes) for classes in self.classes],
            "space": {"type": None, "was": "a module"} if isinstance(space, nn.Module) else encode(space),
            "classifier": encode(self._given_classifier if space is None else self.classifier),
            "normalize": encode(self.normalize),
            "flips": self.flips,
            "pooled": self.pooled,
            "input_shape": list(self.input_shape or ()),
            "weights": self._digest_of_weights(self.input_shape),
        }
        container.write(path, KIND, header, self._tensors())

    @classmethod
    def load(
        cls,
        path: str | Path,
        space: nn.Module | None = None,
        *,
        classifier: Classifier | None = None,
        backbone: nn.Module | None = None,
        workers: int = 0,
        device: torch.device | str = "cpu",
    ) -> "ClosedForm":
        """Return what `save` wrote. A module or a backbone that gave the features must be given with equal weights.

        `classifier` replaces that of the file, and must be given if the file cannot hold it.
        """
        header, tensors = container.read(path, KIND)
        settings = _decoded_settings(path, header)
        if classifier is not None:
            settings["classifier"] = classifier
        if space is not None:
            if not unknown_in(settings["space"]):
                raise ValueError(f"'{path}' has its own space, {settings['space']}; leave out space=...")
            settings["space"] = space
        if backbone is None and contains_setting(settings["space"], Pretrained):
            raise ValueError(f"'{path}' was made with the features of a pretrained network; pass backbone=...")
        for name in ("space", "classifier"):
            if lost := unknown_in(settings[name]):
                raise ValueError(f"'{path}' was made with {name} {lost[0]}, which files cannot hold; pass {name}=...")
        try:
            method = cls(**settings, backbone=backbone, workers=workers, device=device)
        except TypeError as error:
            raise FileError(f"'{path}' has damaged settings: {error}") from None
        method._fill(path, header, tensors)
        return method

    def _sum(self, examples: Examples, indices: Tensor, places: Tensor, classes: int, shape: tuple[int, ...]) -> Sums:
        """Sum over some of the images; `places[label]` is the class of a label among `classes` classes."""

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for images, labels in examples.batches(indices.split(BATCH)):
                check_shape(images, shape)
                for view in (images, images.flip(-1)) if self.flips else (images,):
                    yield self.features(view), places[labels.cpu()]

        return Sums.of(batches(), classes)

    def _with_task(self, task: Sums, sums: Sequence[Sums] | None = None) -> list[Sums]:
        """Return the sums with those of another task."""
        sums = self._sums if sums is None else sums
        if not self.pooled or not sums:
            return [*sums, task]
        (known,) = sums
        counts, means = torch.cat([known.counts, task.counts]), torch.cat([known.means, task.means])
        return [Sums(counts, means, known.scatter + task.scatter)]

    def _by_task(self) -> list[Sums]:
        """Return the sums of each task; if they are pooled, without a covariance."""
        if not self.pooled or not self._sums:
            return self._sums
        sizes, (known,) = [len(classes) for classes in self.classes], self._sums
        parts = zip(known.counts.split(sizes), known.means.split(sizes), strict=True)
        return [Sums(counts, means, torch.zeros_like(known.scatter)) for counts, means in parts]

    def _blocks(self) -> list[tuple[ClassName, ...]]:
        """Return the classes that each of the sums is about."""
        if not self.pooled:
            return self.classes
        return [tuple(name for classes in self.classes for name in classes)] if self.classes else []

    def _owners(self) -> dict[ClassName, int]:
        """Return the task of each class."""
        return {name: task for task, classes in enumerate(self.classes) for name in classes}

    def _update(self, classes: list[tuple[ClassName, ...]], sums: list[Sums], shape: tuple[int, ...] | None) -> None:
        self.classes, self._sums, self.input_shape, self._linear = classes, sums, shape, None

    def _check_task(self, task: int) -> None:
        if not hasattr(task, "__index__") or isinstance(task, bool):
            raise TypeError(f"task must be an integer index from 0, got {task!r}")
        if not 0 <= task < len(self.classes):
            raise ValueError(
                f"task must be an index below {len(self.classes)}, the number of learned tasks, got {task}"
            )

    def _check_first(self, examples: Examples) -> tuple[int, ...]:
        """Check the shape of the first image, and return it."""
        images, _ = next(examples.batches([torch.arange(1)]))
        shape = tuple(images.shape[1:])
        check_rotations(shape, 1, self.flips)
        check_shape(images, self.input_shape)
        return shape

    def _made(self, shape: tuple[int, ...]) -> nn.Module:
        """Return the module that computes features of images of this shape."""
        if self._module is None or self._module[0] != shape:
            space = self._space(shape)
            assert space is not None
            if isinstance(space, nn.Module):
                module = copy.deepcopy(space)  # later changes to the caller's module must not change the features
            else:
                module = space.make(shape, self._given_backbone)
            self._module = shape, module.eval().requires_grad_(False).to(self.device)
        return self._module[1]

    def _space(self, shape: tuple[int, ...] | None) -> Space | nn.Module | None:
        """Return the given space, or the one suggested for images of this shape; None if neither is known."""
        return suggested_space(shape) if self.space is None and shape is not None else self.space

    def _given_backbone(self) -> nn.Module:
        if self._backbone is None:
            raise ValueError(f"{self.space} needs the pretrained network; pass backbone=...")
        self._uses_given_weights = True
        return copy.deepcopy(self._backbone)

    def _digest_of_weights(self, shape: tuple[int, ...] | None) -> str:
        """Return a digest of the weights that the caller gave, or nothing if the space needs none."""
        if shape is None:
            return ""
        module = self._made(shape)
        return digest(named_tensors(module)) if self._uses_given_weights else ""

    def _check_mergeable(self, other: "ClosedForm") -> None:
        if not isinstance(other, ClosedForm):
            raise TypeError(f"other must be a ClosedForm, got {type(other).__name__}")
        shape = self.input_shape or other.input_shape
        settings = {name: (getattr(self, name), getattr(other, name)) for name in ("normalize", "flips", "pooled")}
        settings["space"] = self._space(shape), other._space(shape)
        settings["input_shape"] = shape, other.input_shape or shape
        for name, (own, theirs) in settings.items():
            are_modules = isinstance(own, nn.Module) and isinstance(theirs, nn.Module)  # their weights are compared
            if own != theirs and not are_modules:
                raise ValueError(f"sums with different settings cannot be merged: {name} is {own} and {theirs}")
        if self._digest_of_weights(shape) != other._digest_of_weights(shape):
            raise ValueError("sums over the features of networks with different weights cannot be merged")

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for index, sums in enumerate(self._sums):
            tensors |= {f"{index}/counts": sums.counts, f"{index}/means": sums.means}
            tensors[f"{index}/covariances"] = pack(sums.scatter)
        return tensors

    def _fill(self, path: str | Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the sums from a file, checking every tensor."""
        classes = [tuple(names) for names in header["classes"]]
        self.classes = classes
        sums, rest = [], dict(tensors)
        for index, names in enumerate(self._blocks()):
            found = [rest.pop(f"{index}/{kind}", None) for kind in ("counts", "means", "covariances")]
            sums.append(_checked_sums(path, index, len(names), found))
        if rest:
            raise FileError(f"'{path}' is inconsistent: unexpected tensor '{min(rest)}'")
        if len({part.dims for part in sums}) > 1:
            raise FileError(f"'{path}' is inconsistent: its tasks have different numbers of features")
        self._update(classes, sums, tuple(header["input_shape"]) or None)
        if self.input_shape is None:
            return
        try:
            dims = self.features(torch.zeros(1, *self.input_shape)).shape[1]
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            raise FileError(f"'{path}' has a space that cannot process its images: {error}") from None
        if dims != sums[0].dims:
            raise FileError(f"'{path}' is inconsistent: it has sums of {sums[0].dims} features, its space gives {dims}")
        if self._digest_of_weights(self.input_shape) != header["weights"]:
            raise FileError(f"'{path}' was made with other weights than those of the given network; pass the same ones")


def suggested_space(shape: tuple[int, ...]) -> Space:
    """Return the space for inputs of this shape, without a pretrained network.

    The default number of random patches is chosen for a selector, which adds to what a network keeps. A method of its
    own takes as many as fit into about 16 MiB.
    """
    space = default_space(shape)
    return RandomPatches(250) if isinstance(space, RandomPatches) else space


def select_tasks(scores: Tensor, sizes: Sequence[int], groups: Tensor) -> Tensor:
    """Return the most probable task of each group, from the scores (N, classes) of images.

    It is the task with the largest mean score of its best class, so a group of one image gets the task of its best
    class. For scores that are log likelihoods this is the mean log probability of the best class; no temperature
    changes it.
    """
    best = torch.stack([part.amax(dim=1) for part in scores.split(list(sizes), dim=1)], dim=1)  # (N, tasks)
    return mean_by_group(best, groups).argmax(dim=1)


def best_classes(scores: Tensor, sizes: Sequence[int], tasks: Tensor) -> Tensor:
    """Return the index among all classes of the best class in the task of each image."""
    task_of_class = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return scores.masked_fill(task_of_class[None] != tasks[:, None], -torch.inf).argmax(dim=1)


def _placed(sums: Sums, places: Tensor, classes: int) -> Sums:
    """Return the sums as those of more classes; `places` are the classes that they are about."""
    counts, means = sums.counts.new_zeros(classes), sums.means.new_zeros(classes, sums.dims)
    counts[places], means[places] = sums.counts, sums.means
    return Sums(counts, means, sums.scatter)


def _decoded_settings(path: str | Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a header; raise `FileError` if a part of the header is missing or of another type."""
    kinds = {"classes": list, "flips": bool, "pooled": bool, "input_shape": list, "weights": str}
    groups: Any = header.get("classes")
    shape: Any = header.get("input_shape")
    is_valid = (
        all(isinstance(header.get(name), kind) for name, kind in kinds.items())
        and {"space", "classifier", "normalize"} <= set(header)
        and all(isinstance(group, list) and group for group in groups)
        and all(isinstance(name, str | int) and not isinstance(name, bool) for group in groups for name in group)
        and all(isinstance(length, int) and not isinstance(length, bool) and length > 0 for length in shape)
        and math.prod(shape) < MAX_PIXELS
        and bool(shape) == bool(groups)
    )
    if not is_valid:
        raise FileError(f"'{path}' has a damaged header")
    names = [name for group in groups for name in group]
    if len(set(names)) != len(names):
        raise FileError(f"'{path}' has a damaged header: a class appears twice")
    try:
        settings = {name: decode(header[name]) for name in ("space", "classifier", "normalize")}
    except (ValueError, RecursionError) as error:
        raise FileError(f"'{path}' has damaged settings: {error}") from None
    if settings["normalize"] is not None and not isinstance(settings["normalize"], Normalize):
        raise FileError(f"'{path}' has damaged settings: normalize must be a Normalize or null")
    return {**settings, "flips": header["flips"], "pooled": header["pooled"]}


def _checked_sums(path: str | Path, index: int, classes: int, found: Sequence[Tensor | None]) -> Sums:
    """Return the sums of a file; raise `FileError` if a tensor is missing, of another shape or not finite."""
    counts, means, packed = found
    if counts is None or means is None or packed is None:
        raise FileError(f"'{path}' is inconsistent: a tensor of the sums {index} is missing")
    dims = means.shape[1] if means.ndim == 2 else 0
    is_valid = (
        all(part.dtype == torch.float64 for part in (counts, means, packed))
        and counts.shape == (classes,)
        and means.shape == (classes, dims)
        and dims > 0
        and packed.shape == (dims * (dims + 1) // 2,)
        and all(bool(part.isfinite().all()) for part in (counts, means, packed))
        and bool((counts >= 1).all())
    )
    if not is_valid:
        raise FileError(f"'{path}' is inconsistent: the sums {index} have a wrong shape or type, or are no numbers")
    return Sums(counts, means, unpack(packed, dims))
