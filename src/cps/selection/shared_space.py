"""Select the task in a space that no task owns, by a closed form of sums.

The features of a subnetwork know its own task best. A space that was there before all tasks treats the classes of all
tasks alike, and linear discriminant analysis in it needs nothing but sums: counts, class means and one covariance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cps.closed_form.calibration import (
    SHRINKAGES,
    TEMPERATURES,
    best_temperature,
    leave_one_out_scores,
    log_loss_by_temperature,
    spread_indices,
)
from cps.closed_form.classifiers import LDA, TINY, LinearScores, nearest_mean_scores
from cps.closed_form.factors import ClassFactors
from cps.closed_form.relative_distance import RelativeDistance, leave_one_out_distances
from cps.closed_form.spaces import Flipped, Space
from cps.closed_form.sums import Moments, Sums, pack, unpack
from cps.network.outputs import Evidence
from cps.network.subnetwork import Subnetwork
from cps.runtime.devices import as_float64
from cps.selection.base import Statistics, precompute_once
from cps.selection.groups import mean_by_group
from cps.storage.settings_codec import NumericSettings, setting, stable_str

DISTANCE_CLASSES = 1000  # of all tasks; with more, relative distances would take longer than all else
DISTANCE_SHRINKAGE = 0.1  # with less, distances of the first tasks' images without themselves can be far too large
SCATTER_KEYS = {"scatter", "factors", "factor classes"}
MOST_ROWS = 2  # times the number of features: with more, the scatters of the classes are summed to one ...
ALWAYS_BY_CLASS = 2**18  # ... if they have more numbers than this
MOST_DIMS = 4096  # features, above which a small file could ask for much memory by the scatter of a few images
CALIBRATION_TASKS = 20  # tasks with leave-one-out scores; with more, learning would get slower with every task


@setting
@dataclass(frozen=True)
class SharedSpace(NumericSettings):
    """The task of the most probable class by linear discriminant analysis in a fixed space.

    `space` is the same for all tasks; None chooses it by the shape of the images (`default_space`). `classifier` holds
    the shrinkage of the covariance; with None, leave-one-out scores of the training images choose one of `SHRINKAGES`.
    These scores also calibrate the probabilities.

    Every task keeps the counts and means of its classes, and the first `covariances` tasks sums for the covariance,
    which all classes share. More of them take more memory and help if the images change from task to task. With
    `flips`, the mirror images of the training images are learned, too. Since all are sums, images of known classes can
    be added to them later, and a class can be taken out of them.
    """

    space: Space | None = None
    classifier: LDA | None = None
    covariances: int = 8
    flips: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.space is not None and not hasattr(self.space, "make"):
            raise TypeError(f"space of SharedSpace must be a space such as cps.RandomPatches(), got {self.space!r}")
        if self.classifier is not None and not isinstance(self.classifier, LDA):
            raise TypeError(f"classifier of SharedSpace must be a cps.LDA or None, got {self.classifier!r}")
        self._require("covariances", self.covariances >= 1, must="1 or more")

    @property
    def name(self) -> str:
        """The selector's name."""
        return "SharedSpace"

    @property
    def _candidates(self) -> list[LDA]:
        """The classifiers to choose from."""
        return [LDA(shrinkage) for shrinkage in SHRINKAGES] if self.classifier is None else [self.classifier]

    @property
    def _key(self) -> int:
        """A number that tells spaces apart, small enough for a float32."""
        return int.from_bytes(sha256(stable_str(self.space).encode()).digest()[:3])

    def observe(
        self, subnetwork: Subnetwork, evidence: Evidence, labels: Tensor, earlier: Sequence[Statistics]
    ) -> Statistics:
        """Keep counts and means of the classes, perhaps sums for the covariance, and log losses by temperature."""
        parts = self._parts(evidence, labels)
        own = Sums.of(parts, len(subnetwork.classes))
        kept = {"means": own.means, "counts": own.counts, "space": torch.tensor([float(self._key)])}
        if sum(map(_has_scatter, earlier)) < self.covariances:
            kept |= _encode_scatter(own, ClassFactors.of(parts, own.means) if _fits_by_class(own) else None)
        if len(earlier) >= CALIBRATION_TASKS:
            return kept
        losses = self._log_losses([*earlier, kept], len(earlier), evidence.features(self.space), labels)
        return {**kept, "log losses": losses}

    def add_images(self, statistics: Sequence[Statistics], task: int, evidence: Evidence, labels: Tensor) -> Statistics:
        """Return the statistics of a task with more images of its classes, as if they had all been there at once.

        Their log losses are those with the sums as they are then.
        """
        kept, parts = statistics[task], self._parts(evidence, labels)
        added = Sums.of(parts, len(kept["counts"]))
        scatter = _scatter(kept) if _has_scatter(kept) else torch.zeros_like(added.scatter)
        before = Sums(*(as_float64(each).to(added.means.device) for each in (kept["counts"], kept["means"], scatter)))
        total = before + added
        grown = {**kept, "means": total.means, "counts": total.counts}
        if _has_scatter(kept):
            factors = _class_factors(kept) if _fits_by_class(total) else None
            factors = factors and factors.grown(ClassFactors.of(parts, added.means), before, added)
            grown = {key: value for key, value in grown.items() if key not in SCATTER_KEYS}
            grown |= _encode_scatter(total, factors)
        if "log losses" in kept:
            of_all = [*statistics[:task], grown, *statistics[task + 1 :]]
            losses = self._log_losses(of_all, task, evidence.features(self.space), labels)
            grown["log losses"] = kept["log losses"] + losses.to(kept["log losses"])
        return grown

    def without_class(self, statistics: Statistics, index: int) -> Statistics:
        """Return the statistics of a task without one of its classes, as if it had never been there.

        A sum over the scatter of all classes of the task cannot be divided again, so it is left out.
        """
        stay = torch.arange(len(statistics["counts"]), device=statistics["counts"].device) != index
        left = {key: value for key, value in statistics.items() if key not in SCATTER_KEYS}
        left |= {"counts": statistics["counts"][stay], "means": statistics["means"][stay]}
        factors = _class_factors(statistics)
        if factors is None:
            return left
        return left | _encode_factors(factors.without_class(index))

    def _parts(self, evidence: Evidence, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return features and labels of the images, and of their mirror images if these are learned, too."""
        spaces = [self.space, *([Flipped(self.space)] if self.flips else [])]
        return [(evidence.features(space), labels) for space in spaces]

    def _log_losses(self, statistics: Sequence[Statistics], task: int, features: Tensor, labels: Tensor) -> Tensor:
        """Return the log losses of some images of a task, without themselves, by classifier and temperature."""
        moments = _moments(statistics)
        some = spread_indices(len(labels)).to(labels.device)
        classes = sum(len(each["counts"]) for each in statistics[:task]) + labels[some].to(moments.means.device)
        is_in = _has_scatter(statistics[task])
        losses = [
            log_loss_by_temperature(
                leave_one_out_scores(features[some], classes, moments, classifier, in_covariance=is_in), classes
            )
            for classifier in self._candidates
        ]
        return torch.stack(losses)

    def without_task(self, statistics: Sequence[Statistics], task: int) -> list[Statistics]:
        """Return the statistics of the other tasks. Only the log losses of later ones were influenced by `task`."""
        return [kept for index, kept in enumerate(statistics) if index != task]

    def needed(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Need no subnetwork: the space names the class, too."""
        return torch.zeros(len(groups), len(evidence), dtype=torch.bool)

    def __call__(self, evidence: Evidence, statistics: Sequence[Statistics], groups: Tensor) -> Tensor:
        """Return the log probability of each task, averaged over each group."""
        return mean_by_group(self.score_images(evidence, precompute_once(self, statistics, evidence)), groups)

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the discriminants of all classes, divided by the temperature, and the indices of each task's own."""
        classifier, temperature = self._choose(statistics)
        scores = _fit(classifier, statistics)
        device = statistics[0]["counts"].device
        indices = torch.arange(len(scores.offsets), device=device).split([len(kept["counts"]) for kept in statistics])
        common = {
            "centre": scores.centre,
            "weights": scores.weights / temperature,
            "offsets": scores.offsets / temperature,
        }
        precomputed: list[Statistics] = [{"classes": classes} for classes in indices]
        precomputed[0]["classes by task"] = pad_sequence([*indices], batch_first=True, padding_value=-1)
        precomputed[0] |= {name: value.float().to(device) for name, value in common.items()}
        return precomputed

    def score_images(self, evidence: Evidence, precomputed: Sequence[Statistics]) -> Tensor:
        """Return the log probability of each task for each image, shape (N, tasks)."""
        return self._scores(evidence, precomputed)[1]

    def score_best_classes(self, evidence: Evidence, precomputed: Sequence[Statistics]) -> Tensor:
        """Return the log probability of the best class of each task, shape (N, tasks)."""
        classes, _, total = self._scores(evidence, precomputed)
        return _reduce_tasks(torch.amax, classes, precomputed) - total

    def score_classes(self, evidence: Evidence, precomputed: Sequence[Statistics], task: int) -> Tensor:
        """Return the log probabilities (N, classes) of the classes of a task; those of all tasks sum to one."""
        classes, _, total = self._scores(evidence, precomputed)
        return classes[:, precomputed[task]["classes"]] - total

    def score_pairs(
        self, evidence: Evidence, precomputed: Sequence[Statistics], images: Tensor, tasks: Tensor
    ) -> Tensor:
        """Return the same (n, most classes) for pairs of an image and a task; rows may end in minus infinity."""
        (classes, _, total), table = self._scores(evidence, precomputed), precomputed[0]["classes by task"]
        images, columns = images.to(classes.device), table[tasks.to(table.device)]  # (n,), (n, most of all tasks)
        columns = columns[:, : int((columns >= 0).sum(dim=1).max())]
        return (classes[images[:, None], columns.clamp(min=0)] - total[images]).masked_fill(columns < 0, -torch.inf)

    def score_classes_without_subnetwork(
        self, evidence: Evidence, precomputed: Sequence[Statistics], task: int, images: Tensor
    ) -> Tensor:
        """Return the same, which needs no subnetwork."""
        return self.score_pairs(evidence, precomputed, images, torch.full_like(images, task))

    def relative_distances(self, evidence: Evidence, statistics: Sequence[Statistics]) -> Tensor | None:
        """Return how much closer each image is to a class than to all images; None with one class or too many."""
        if not _has_distances(statistics):
            return None
        (known,) = precompute_once(_Distances(self), statistics)
        scores = LinearScores(known["centre"], known["weights"], known["offsets"])
        return RelativeDistance(scores, known["whitening"])(evidence.features(self.space))

    def leave_one_out_distances(
        self, evidence: Evidence, labels: Tensor, statistics: Sequence[Statistics], images: Tensor
    ) -> Tensor | None:
        """Return the same of some training images of the latest task, each without itself."""
        if not _has_distances(statistics):
            return None
        classifier, moments = self.distance_classifier(statistics), _moments(statistics)
        first = sum(len(kept["counts"]) for kept in statistics[:-1])
        classes = first + labels[images].to(moments.means.device)
        features = evidence.features(self.space)[images]
        in_covariance = _has_scatter(statistics[-1])
        return leave_one_out_distances(features, classes, moments, classifier, in_covariance=in_covariance)

    def distance_classifier(self, statistics: Sequence[Statistics]) -> LDA:
        """Return the classifier that these statistics lead to, with a shrinkage of at least `DISTANCE_SHRINKAGE`."""
        return LDA(max(self._choose(statistics)[0].shrinkage, DISTANCE_SHRINKAGE))

    def _choose(self, statistics: Sequence[Statistics]) -> tuple[LDA, float]:
        """Return the classifier and the temperature with the smallest log loss of the leave-one-out scores."""
        known = [as_float64(kept["log losses"].cpu()) for kept in statistics if "log losses" in kept]
        shape = len(self._candidates), len(TEMPERATURES)
        if any(losses.shape != shape for losses in known) or any(
            float(kept["space"]) != self._key for kept in statistics
        ):
            raise ValueError(
                "SharedSpace can only select with the space and the classifier that it learned all tasks with"
            )
        losses = torch.stack([*known, torch.zeros(shape, dtype=torch.float64)]).sum(dim=0)
        best = int(losses.amin(dim=1).argmin())
        return self._candidates[best], best_temperature(losses[best])

    def _scores(self, evidence: Evidence, precomputed: Sequence[Statistics]) -> tuple[Tensor, Tensor, Tensor]:
        """Return log likelihoods of all classes (N, classes), log probabilities of the tasks (N, tasks), and totals.

        The log probability of a class is its log likelihood less the total (N, 1) of the image.
        """
        common = precomputed[0]
        scores = LinearScores(common["centre"], common["weights"], common["offsets"])

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            classes = scores(evidence.features(self.space))
            tasks = _reduce_tasks(torch.logsumexp, classes, precomputed)
            total = tasks.logsumexp(dim=1, keepdim=True)
            return classes, tasks - total, total

        return evidence.derived((self, id(common["weights"])), compute)


def _reduce_tasks(
    reduce: Callable[[Tensor, int], Tensor], classes: Tensor, precomputed: Sequence[Statistics]
) -> Tensor:
    """Return (N, tasks) from values of all classes (N, classes): those of each task's own classes, reduced."""
    of_tasks = precomputed[0]["classes by task"].shape
    if of_tasks.numel() == classes.shape[1]:  # equally many of each task
        return reduce(classes.unflatten(1, of_tasks), 2)
    sizes = [len(kept["classes"]) for kept in precomputed]
    return torch.stack([reduce(part, 1) for part in classes.split(sizes, dim=1)], dim=1)


@dataclass(frozen=True)
class _Distances:
    """What the relative distances of a shared space precompute."""

    shared: SharedSpace

    def precompute(self, statistics: Sequence[Statistics]) -> list[Statistics]:
        """Return the tensors of a `RelativeDistance` in one dict."""
        classifier = self.shared.distance_classifier(statistics)
        distance = RelativeDistance.of(_fit(classifier, statistics), *_counts_and_means(statistics))
        tensors = {**distance.scores._asdict(), "whitening": distance.whitening}
        device = statistics[0]["counts"].device
        return [{name: value.float().to(device) for name, value in tensors.items()}]


def _has_distances(statistics: Sequence[Statistics]) -> bool:
    """Return True if there are several classes, so that distances can be relative, and not too many."""
    return 1 < sum(len(kept["counts"]) for kept in statistics) <= DISTANCE_CLASSES


def _fit(classifier: LDA, statistics: Sequence[Statistics]) -> LinearScores:
    """Return the scores of the classes of all tasks; those of nearest means if all covariances were forgotten."""
    if any(map(_has_scatter, statistics)):
        return classifier.fit(_moments(statistics))
    counts, means = _counts_and_means(statistics)
    return nearest_mean_scores(counts, means, variance=max(float(means.var(dim=0, correction=0).mean()), TINY))


def _has_scatter(kept: Statistics) -> bool:
    return not SCATTER_KEYS.isdisjoint(kept)


def _fits_by_class(sums: Sums) -> bool:
    """Return True if the scatter of each class takes not much more memory than that of all together."""
    dims = sums.dims
    rows = int(sums.counts.clamp(max=dims).sum())
    return dims <= MOST_DIMS and rows * dims <= max(MOST_ROWS * dims**2, ALWAYS_BY_CLASS)


def _encode_scatter(sums: Sums, factors: ClassFactors | None) -> Statistics:
    """Return the scatter of a task as statistics: by class if it is known so."""
    return {"scatter": pack(sums.scatter)} if factors is None else _encode_factors(factors)


def _encode_factors(factors: ClassFactors) -> Statistics:
    return {"factors": factors.rows, "factor classes": factors.classes.float()}


def _class_factors(kept: Statistics) -> ClassFactors | None:
    """Return the scatter of a task by class, or None if only their sum is known."""
    if "factors" not in kept:
        return None
    rows = as_float64(kept["factors"])
    if (
        rows.shape[1:] != kept["means"].shape[1:]
        or rows.shape[1] > MOST_DIMS
        or len(kept["factor classes"]) != len(rows)
    ):
        raise ValueError(f"factors {tuple(rows.shape)} do not fit class means {tuple(kept['means'].shape)}")
    return ClassFactors(rows, kept["factor classes"].to(rows.device).long())


def _scatter(kept: Statistics) -> Tensor:
    """Return the scatter (d, d) of a task."""
    factors = _class_factors(kept)
    return unpack(as_float64(kept["scatter"]), kept["means"].shape[1]) if factors is None else factors.scatter


def _moments(statistics: Sequence[Statistics]) -> Moments:
    """Return the moments of all tasks; the covariance is that of the tasks that have kept a sum for it."""
    counts, means = _counts_and_means(statistics)
    with_scatter = [kept for kept in statistics if _has_scatter(kept)]
    scatter = _scatter(with_scatter[0])
    for kept in with_scatter[1:]:
        scatter += _scatter(kept)
    images = max(sum(float(kept["counts"].sum()) for kept in with_scatter), 1.0)
    return Moments(counts, means, scatter / images, images)


def _counts_and_means(statistics: Sequence[Statistics]) -> tuple[Tensor, Tensor]:
    """Return the counts (classes,) and means (classes, d) of the classes of all tasks."""
    for kept in statistics:
        if kept["counts"].shape != kept["means"].shape[:1]:
            raise ValueError(f"{len(kept['means'])} class means need as many counts, got {len(kept['counts'])}")
    counts = torch.cat([as_float64(kept["counts"]) for kept in statistics])
    return counts, torch.cat([as_float64(kept["means"]) for kept in statistics])
