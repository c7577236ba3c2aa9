"""A continual learner as a scikit-learn classifier."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import nn

from cps.config import RETRAIN, TRAIN
from cps.data.examples import ClassName
from cps.data.tasks import Task
from cps.learner import Learner
from cps.network.architectures import Architecture
from cps.runtime.seeding import seeded
from cps.training.settings import Training

WIDTH = 128  # of the default network for rows of features


class ContinualClassifier(ClassifierMixin, BaseEstimator):
    """A `cps.Learner` with the interface of scikit-learn: `partial_fit` learns new classes and forgets none.

    >>> import numpy as np, cps
    >>> from cps.sklearn import ContinualClassifier
    >>> X = np.random.default_rng(0).normal(size=(40, 8)) + 4 * np.arange(40)[:, None]
    >>> few = cps.Training(3)
    >>> classifier = ContinualClassifier(train=few, retrain=few, rounds=1)
    >>> classifier.partial_fit(X[:20], ["ant", "bee"] * 10).partial_fit(X[20:], ["cat", "dog"] * 10).classes_.tolist()
    ['ant', 'bee', 'cat', 'dog']

    X has rows of features (N, d) or images (N, channels, height, width). `backbone` maps them to features; None is two
    fully connected layers for rows, and `cps.SmallConvNet` for images. `train`, `retrain` and `rounds` are those of
    `cps.Learner`, whose defaults None stands for, and `settings` has any others by name, such as
    `{"pruner": cps.NNrelief(0.8)}`.

    After fitting, `classes_` holds all classes in order, and `learner_` the learner.
    """

    def __init__(
        self,
        backbone: nn.Module | Architecture | None = None,
        *,
        train: Training | None = None,
        retrain: Training | None = None,
        rounds: int = 3,
        settings: Mapping[str, Any] | None = None,
        random_state: int = 0,
    ):
        self.backbone = backbone
        self.train = train
        self.retrain = retrain
        self.rounds = rounds
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Learn all classes of `y` as one task, with a new learner."""
        for name in [name for name in vars(self) if name.endswith("_") and not name.startswith("__")]:
            delattr(self, name)
        return self.partial_fit(X, y)

    def partial_fit(self, X: Any, y: Any, classes: ArrayLike | None = None) -> Self:
        """Learn the classes of `y` that are new as a task; images of known classes are added to sums (`Learner.add`).

        `classes`, which must contain all labels of `y`, is only checked: cps needs no list of the classes to come.
        """
        is_first = not hasattr(self, "learner_")
        checked: Any = validate_data(self, X, y, reset=is_first, allow_nd=True, dtype=None)
        samples, y = checked
        check_classification_targets(y)
        labels = column_or_1d(y, warn=True)
        if classes is not None:
            unknown = np.setdiff1d(labels, np.asarray(classes))
            if len(unknown):
                raise ValueError(f"classes must contain all labels of y, but {unknown[0]!r} is missing")
        if is_first:
            learner = self._new_learner(samples.shape)
            self._learn(learner, samples, labels)
            self.learner_, self.classes_ = learner, unique_labels(labels)
        else:
            self._learn(self.learner_, samples, labels)
            self.classes_ = unique_labels(self.classes_, labels)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class of each sample."""
        check_is_fitted(self)
        prediction = self.learner_.predict(self._checked(X))
        places = self._places()
        return self.classes_[[places[name] for name in prediction]]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each of `classes_`, shape (N, classes)."""
        check_is_fitted(self)
        prediction = self.learner_.predict(self._checked(X))
        places = self._places()
        order = np.argsort([places[name] for name in prediction.all_classes])
        return prediction.scores.double().softmax(dim=1).numpy()[:, order]

    def _learn(self, learner: Learner, X: NDArray[Any], labels: NDArray[Any]) -> None:
        names, images = [_name(label) for label in labels.tolist()], _as_pixels(X)
        known = {name for classes in learner.classes for name in classes}
        for is_new in (True, False):
            chosen = [index for index, name in enumerate(names) if (name not in known) == is_new]
            if chosen:
                own = [names[index] for index in chosen]
                task = Task(list(dict.fromkeys(sorted(own, key=str))), train=(images[chosen], own))
                _ = learner.learn(task) if is_new else learner.add(task)

    def _new_learner(self, shape: tuple[int, ...]) -> Learner:
        training = {"train": self.train or TRAIN, "retrain": self.retrain or RETRAIN, "rounds": self.rounds}
        backbone = self.backbone
        if backbone is None:
            with seeded(torch.device("cpu"), self.random_state):
                backbone = _default_backbone(shape)
        return Learner(backbone, seed=self.random_state, **training, **(self.settings or {}))

    def _checked(self, X: Any) -> NDArray[Any]:
        samples: Any = validate_data(self, X, reset=False, allow_nd=True, dtype=None)
        return _as_pixels(samples)

    def _places(self) -> dict[ClassName | None, int]:
        """Return the index in `classes_` of each of the learner's class names."""
        return {_name(label): index for index, label in enumerate(self.classes_.tolist())}


def _default_backbone(shape: tuple[int, ...]) -> nn.Module | Architecture:
    if len(shape) == 4:
        return Architecture("small", channels=shape[1])
    if len(shape) == 2:
        return nn.Sequential(nn.Linear(shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    raise ValueError(f"X must have shape (N, d) or (N, channels, height, width) without a backbone, got {shape}")


def _as_pixels(X: NDArray[Any]) -> NDArray[Any]:
    """Return bytes of images as they are, and anything else as floats."""
    return X if X.dtype == np.uint8 and X.ndim == 4 else X.astype(np.float32)


def _name(label: Any) -> ClassName:
    """Return a label as the name of a class: a string or an integer."""
    return label if isinstance(label, str) else int(label)
