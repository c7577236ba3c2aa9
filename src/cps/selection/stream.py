"""Streams: images that arrive one by one, whose task changes now and then, nobody knows when.

Each image says something about its task, and so do those before it. A posterior over the tasks is carried from image
to image, for several rates of change at once, of which the images themselves show the likely one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cps.data.examples import ClassName
from cps.data.images import as_images
from cps.network.outputs import Evidence
from cps.network.shared import SharedNetwork
from cps.selection.base import Selector, task_scores, task_shares
from cps.selection.predict import Prediction, classify
from cps.selection.rejection import check_reject

STRAY = 0.1  # the share of images that are taken to say nothing about their task, whatever their scores
RESTLESS = 0.001  # the share in which the rate itself is taken to change
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)  # at which the task may change, from one image to the next


class Stream:
    """Predicts images in the order they arrive; what is known of their task goes on from call to call."""

    def __init__(self, network: SharedNetwork, selector: Selector, look: Callable[[Any], Evidence]):
        """`look` returns the evidence of images. The selector's scores count as logarithms of probabilities."""
        self._network, self._selector, self._look = network, selector, look
        self._learned: list[tuple[ClassName, ...]] = []  # the classes of each task that the numbers are about
        self._rates = torch.empty(0)  # the probability of each rate of change
        self._tasks = torch.empty(0, 0)  # that of each task, given the rate

    @property
    def tasks(self) -> Tensor:
        """The probability of each task for the last image seen."""
        return (self._rates @ self._tasks).float()

    def predict(self, images: Any, *, reject: float = 0.0) -> Prediction:
        """Predict the classes of the next images, each from itself and all before it; `reject` as `Learner.predict`."""
        with self._network.in_use():
            return self.predict_by(self._look(as_images(images)), reject=reject)

    def predict_by(self, evidence: Evidence, *, reject: float = 0.0) -> Prediction:
        """Predict the next images by the evidence of them, if that is at hand."""
        check_reject(reject)  # before the stream moves on
        with self._network.in_use():
            if len(evidence) != len(self._network.subnetworks):
                raise ValueError(
                    f"the evidence is of {len(evidence)} tasks, not of all that were learned; ask for it anew"
                )
            statistics = self._network.statistics(self._selector.name)
            groups = torch.arange(len(next(iter(evidence)).logits), device=self._network.device)
            shares = task_shares(task_scores(self._selector, evidence, statistics, groups).double())
            self._begin()
            known = torch.stack([self._follow(each) for each in (1 - STRAY) * shares + STRAY / shares.shape[1]])
            share, tasks = known.max(dim=1)
            return classify(self._network, evidence, tasks, share, reject=reject)

    def _begin(self) -> None:
        """Know nothing, if this is the first call or other tasks have been learned."""
        learned = [subnetwork.classes for subnetwork in self._network.subnetworks]
        if learned != self._learned:
            self._learned = learned
            self._rates = torch.full((len(RATES),), 1 / len(RATES), dtype=torch.float64)
            self._tasks = torch.full((len(RATES), len(learned)), 1 / len(learned), dtype=torch.float64)

    def _follow(self, said: Tensor) -> Tensor:
        """Return the probability of each task after an image that says this about it."""
        rates = torch.tensor(RATES, dtype=torch.float64)[:, None]
        elsewhere = (1 - self._tasks) / max(1, len(said) - 1)
        joint = ((1 - rates) * self._tasks + rates * elsewhere) * said
        likely = joint.sum(dim=1)  # how well each rate has foreseen the image
        self._tasks = joint / likely[:, None]
        self._rates = ((1 - RESTLESS) * self._rates + RESTLESS / len(RATES)) * likely
        self._rates /= self._rates.sum()
        return self._rates @ self._tasks
