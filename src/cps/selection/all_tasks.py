"""All subnetworks and a selector as one plain module, which needs no task."""

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cps.closed_form.spaces import Pretrained, Space
from cps.network.outputs import Evidence, Outputs
from cps.network.shared import SharedNetwork
from cps.selection.base import ClassSelector, GraphSelector, Selector, Statistics
from cps.selection.predict import best_class, best_task


class AllTasksOutput(NamedTuple):
    """What `AllTasksModule` returns for N images.

    `class_index` (N,) is an index into the module's `classes`, `task` (N,) the index of the selected task from 0,
    `confidence` (N,) the softmax share of the class within that task, `scores` (N, tasks) the selector's scores, and
    `class_scores` (N, classes) the log probabilities of all `classes`.
    """

    class_index: Tensor
    task: Tensor
    confidence: Tensor
    scores: Tensor
    class_scores: Tensor


class AllTasksModule(nn.Module):
    """Selects the task of each image and classifies it, like `learner.predict`, in operations that a graph can hold.

    Images are floats from 0 to 1 or bytes, on the module's device; each is scored on its own. The module holds copies,
    so it does not change when the network learns or forgets a task. `classes` lists the classes of all tasks in order.

    Raises RuntimeError if the network has no tasks, and ValueError if the selector is not a `GraphSelector` or has no
    statistics of some task.
    """

    def __init__(self, network: SharedNetwork, selector: Selector | GraphSelector):
        super().__init__()
        if not network.subnetworks:
            raise RuntimeError("nothing has been learned yet; call learn(task) first")
        if not isinstance(selector, GraphSelector):
            raise ValueError(
                f"the selector {selector.name} cannot be part of a graph: it has no methods 'precompute' and "
                "'score_images'; choose another selector, e.g. MaxOutput, or export the tasks one by one"
            )
        self.selector = selector
        self.trunk = nn.Identity() if network.trunk is None else copy.deepcopy(network.trunk)
        self.subnetworks = nn.ModuleList(network.extract_own(task) for task in range(len(network.subnetworks)))
        self._is_frozen = [each.is_frozen for each in network.subnetworks]
        class_counts = [len(subnetwork.classes) for subnetwork in network.subnetworks]
        self.classes = tuple(name for subnetwork in network.subnetworks for name in subnetwork.classes)
        self._first_classes = [sum(class_counts[:task]) for task in range(len(class_counts))]
        self.spaces = nn.ModuleList()
        self._space_numbers: dict[Space | None, int] = {}
        self._make_space: Callable[[Space | None], nn.Module] | None = network.space_module
        try:
            precomputed = selector.precompute(network.statistics(selector.name))
            self._keys = [list(statistics) for statistics in precomputed]
            for task, statistics in enumerate(precomputed):
                for number, value in enumerate(statistics.values()):
                    self.register_buffer(f"statistic_{task}_{number}", value.clone())
            # This first call also makes the modules of the spaces that the selector reads.
            self.eval()(torch.zeros(1, *(network.input_shape or ()), device=network.device))
            self._make_space = None
        except KeyError as error:
            raise ValueError(
                f"{selector.name} has no {error} statistics of some task; choose another selector"
            ) from None

    def forward(self, images: Tensor) -> AllTasksOutput:
        """Return class, task, confidence, and the scores of tasks and classes."""
        pixels = self.trunk(self.subnetworks[0].pixels(images))  # pyright: ignore[reportCallIssue]
        features = cache(partial(self._features, pixels))
        evidence = Evidence(partial(self._outputs, pixels, features), len(self.subnetworks), features)
        precomputed = self._precomputed()
        scores = self.selector.score_images(evidence, precomputed)  # (N, tasks)
        task = best_task(scores)
        selector = self.selector
        of_classes = [
            selector.score_classes(evidence, precomputed, index)
            if isinstance(selector, ClassSelector)
            else evidence[index].logits
            for index in range(len(evidence))
        ]
        confidences, classes = zip(*map(best_class, of_classes), strict=True)
        classes = [index + first for index, first in zip(classes, self._first_classes, strict=True)]
        selected = task[:, None]
        return AllTasksOutput(
            class_index=torch.stack(classes, dim=1).gather(1, selected)[:, 0],
            task=task,
            confidence=torch.stack(confidences, dim=1).gather(1, selected)[:, 0],
            scores=scores,
            class_scores=join_class_scores(scores, of_classes),
        )

    def _outputs(
        self, pixels: Tensor, features: Callable[[Space | None], Tensor], tasks: Sequence[int]
    ) -> list[Outputs]:
        """Return the outputs of subnetworks; all share the trunk and the features in the space `Pretrained`."""
        pretrained = partial(features, Pretrained())
        return [
            self.subnetworks[task].from_features(pretrained()[None])  # pyright: ignore[reportCallIssue]
            if self._is_frozen[task]
            else self.subnetworks[task].from_pixels(pixels, pretrained)  # pyright: ignore[reportCallIssue]
            for task in tasks
        ]

    def _features(self, pixels: Tensor, space: Space | None) -> Tensor:
        """Return the features of the backbone's input in a space that no task owns."""
        if space not in self._space_numbers:
            assert self._make_space is not None, "the first call has shown which spaces the selector reads"
            self._space_numbers[space] = len(self.spaces)
            self.spaces.append(copy.deepcopy(self._make_space(space)))
        return self.spaces[self._space_numbers[space]](pixels)

    def _precomputed(self) -> list[Statistics]:
        return [
            {key: self.get_buffer(f"statistic_{task}_{number}") for number, key in enumerate(keys)}
            for task, keys in enumerate(self._keys)
        ]


class ClassScores(nn.Module):
    """Images -> the log probability of each of its `classes` (N, classes), those of `Prediction.scores`.

    Every subnetwork runs, and each image is scored on its own.
    """

    def __init__(self, all_tasks: AllTasksModule):
        super().__init__()
        self.all_tasks = all_tasks
        self.classes = tuple(dict.fromkeys(all_tasks.classes))
        self._versions = [[i for i, other in enumerate(all_tasks.classes) if other == name] for name in self.classes]
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return the log probabilities; of several versions of a class, the most probable one counts."""
        scores = self.all_tasks(images).class_scores
        if len(self.classes) == scores.shape[1]:
            return scores
        best = [scores[:, versions].amax(dim=1) for versions in self._versions]
        return torch.stack(best, dim=1).log_softmax(dim=1)


def join_class_scores(task_scores: Tensor, of_classes: Sequence[Tensor]) -> Tensor:
    """Return the log probabilities (N, classes) of the classes of all tasks.

    The best class of a task is as probable as the task, and the others less by as much as they are within the task.
    """
    within = [scores - scores.amax(dim=1, keepdim=True) for scores in of_classes]
    joined = [task_scores[:, task, None] + scores for task, scores in enumerate(within)]
    return torch.cat(joined, dim=1).log_softmax(dim=1)
