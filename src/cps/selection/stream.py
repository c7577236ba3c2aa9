"""Streams: images that arrive one by one, whose task changes at unknown times.

Each image is evidence about its task, and so are the images before it. A posterior over tasks is filtered from image to
image for several rates of change at once, and the images themselves show which rate is likely.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cps.data.examples import ClassName
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.selection.base import Selector
from cps.selection.predict import Selection, classify, run_needed, task_scores, task_shares
from cps.selection.prediction import Prediction
from cps.selection.rejection import check_reject

OUTLIERS = 0.1  # assumed share of images whose scores say nothing about their task
RATE_CHANGE = 0.001  # assumed probability that the rate of change itself changes at an image
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)  # candidate probabilities that the task changes at an image


class Stream:
    """Predicts images in the order they arrive; the posterior over tasks persists between calls."""

    def __init__(self, network: SharedNetwork, selector: Selector, forward: Callable[[Any], Evidence]):
        """`forward` returns the evidence of images. The selector's scores are used as log probabilities."""
        self._network, self._selector, self._forward = network, selector, forward
        self._learned: list[tuple[ClassName, ...]] = []  # the classes of each task that the posterior is about
        self._filter = TaskFilter(1)

    @property
    def tasks(self) -> Tensor:
        """The posterior probability of each task for the last image."""
        return self._filter.tasks.float()

    def predict(self, images: Any, *, reject: float = 0.0) -> Prediction:
        """Predict the next images, each from itself and all before it; `reject` as in `Learner.predict`."""
        with self._network.in_use():
            return self.predict_evidence(self._forward(images), reject=reject)

    def predict_evidence(self, evidence: Evidence, *, reject: float = 0.0) -> Prediction:
        """Predict the next images from their evidence."""
        check_reject(reject)  # before the posterior changes
        with self._network.in_use():
            if len(evidence) != len(self._network.subnetworks):
                raise ValueError(
                    f"the evidence has {len(evidence)} tasks, but the network has {len(self._network.subnetworks)}; "
                    "compute it again"
                )
            statistics = self._network.statistics(self._selector.name)
            groups = torch.arange(evidence.num_images, device=self._network.device)
            run_needed(self._selector, evidence, statistics, groups)
            scores = task_scores(self._selector, evidence, statistics, groups)
            self._reset_if_tasks_changed()
            posterior = self._filter.update(task_shares(scores.double()))
            selection = Selection(posterior.argmax(dim=1), scores, posterior, posterior.log())
            return classify(self._network, evidence, selection, self._selector, reject=reject)

    def _reset_if_tasks_changed(self) -> None:
        """Start from a uniform posterior at the first call and whenever the learned tasks have changed."""
        learned = [subnetwork.classes for subnetwork in self._network.subnetworks]
        if learned != self._learned:
            self._learned = learned
            self._filter = TaskFilter(len(learned))


class TaskFilter:
    """The posterior over tasks: at first uniform, then updated image by image for every rate of change."""

    def __init__(self, tasks: int):
        self._rates = torch.full((len(RATES),), 1 / len(RATES), dtype=torch.float64)  # probability of each rate
        self._tasks = torch.full((len(RATES), tasks), 1 / tasks, dtype=torch.float64)  # of each task, given the rate

    @property
    def tasks(self) -> Tensor:
        """The posterior probability of each task after the last image."""
        return self._rates @ self._tasks

    def update(self, likelihoods: Tensor) -> Tensor:
        """Update the posterior by likelihoods (N, tasks) of images in order; return it after each of them."""
        robust = (1 - OUTLIERS) * likelihoods + OUTLIERS / likelihoods.shape[1]
        return torch.stack([self._update(likelihood) for likelihood in robust])

    def _update(self, likelihood: Tensor) -> Tensor:
        rates = torch.tensor(RATES, dtype=torch.float64)[:, None]
        others = (1 - self._tasks) / max(1, len(likelihood) - 1)
        joint = ((1 - rates) * self._tasks + rates * others) * likelihood
        predictive = joint.sum(dim=1)  # how well each rate predicted the image
        self._tasks = joint / predictive[:, None]
        self._rates = ((1 - RATE_CHANGE) * self._rates + RATE_CHANGE / len(RATES)) * predictive
        self._rates /= self._rates.sum()
        return self.tasks
