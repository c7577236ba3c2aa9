"""Streams: images that arrive one by one, whose task changes now and then, nobody knows when.

Each image says something about its task, and so do those before it. A posterior over the tasks is carried from image
to image, for several rates of change at once, of which the images themselves show the likely one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cps.evidence import Evidence
from cps.network import SharedNetwork
from cps.prediction import Prediction, classify
from cps.selection import Selector

RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)  # at which the task may change, from one image to the next


class Stream:
    """Predicts images in the order they arrive; the posterior over the tasks goes on from call to call."""

    def __init__(self, network: SharedNetwork, selector: Selector, look: Callable[[Any], Evidence]):
        """`look` returns the evidence of images. The selector's scores count as logarithms of probabilities."""
        self._network, self._selector, self._look = network, selector, look
        self._posterior = torch.empty(0, 0)  # (rates, tasks)

    @property
    def tasks(self) -> Tensor:
        """The probability of each task for the last image seen."""
        return self._posterior.sum(dim=0).float()

    def predict(self, images: Any) -> Prediction:
        """Predict the classes of the next images, each from itself and all before it."""
        evidence = self._look(images)
        statistics = self._network.statistics(self._selector.name)
        each = torch.arange(len(evidence[0].logits), device=self._network.device)
        scores = self._selector(evidence, statistics, each).double().log_softmax(dim=1).cpu()
        tasks = torch.stack([self._follow(said) for said in scores])
        return classify(self._network, evidence, tasks.to(self._network.device))

    def _follow(self, said: Tensor) -> Tensor:
        """Return the most probable task after an image with these log-probabilities."""
        tasks = len(said)
        if self._posterior.shape[1] != tasks:  # the first image, or the learner has learned another task
            self._posterior = torch.full((len(RATES), tasks), 1 / (len(RATES) * tasks), dtype=torch.float64)
        rates = torch.tensor(RATES, dtype=torch.float64)[:, None]
        elsewhere = (self._posterior.sum(dim=1, keepdim=True) - self._posterior) / max(1, tasks - 1)
        self._posterior = ((1 - rates) * self._posterior + rates * elsewhere) * said.exp()
        self._posterior /= self._posterior.sum()
        return self._posterior.sum(dim=0).argmax()
