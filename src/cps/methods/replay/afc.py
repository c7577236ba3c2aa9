"""AFC: PODNet's training, with every channel of a map held by how much the loss depends on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cps.data.examples import Examples, iterate_batches
from cps.methods.cosine.feature_distillation import channel_distance
from cps.methods.cosine.stage_maps import features_and_maps
from cps.methods.replay.podnet import MapDistance, PODNet
from cps.methods.task_training import TaskTraining

IMPORTANCE = "importance/"  # prefix of the names of buffers


@dataclass(eq=False)
class AFC(PODNet):
    """Class-incremental learning by adaptive feature consolidation (Kang et al., CVPR 2022).

    As PODNet, but the distance of maps is that of each channel, weighed by its importance. After each task, the
    importance of a channel is the mean over its training images of the squared gradient of the classification loss with
    respect to its map, summed over pixels; the mean importance of a stage is 1.

    `as_released` has the NCA loss of the published code. Importances are computed in evaluation mode and
    without augmentation either way, unlike there.
    """

    map_weight: float = 4.0
    feature_weight: float = 0.0

    name = "AFC"

    def map_distance(self) -> MapDistance:
        """Return the distance of maps, weighed by the importances after the last task."""
        importances = [self.buffers[name] for name in sorted(self.buffers) if name.startswith(IMPORTANCE)]
        return partial(channel_distance, importances=importances)

    def train_task(self, task: TaskTraining) -> None:
        """Train, then compute the importances of all channels for the images of this training."""
        super().train_task(task)
        for stage, importance in enumerate(self._importances(self.with_exemplars(task.examples))):
            self.buffers[f"{IMPORTANCE}{stage:03}"] = importance

    def _importances(self, examples: Examples) -> list[Tensor]:
        """Return the importance of each channel of each stage for the images of examples, with mean 1."""
        self.model.eval()
        sums: list[Tensor] = []
        for images, labels in iterate_batches(examples):
            pixels, labels = self.prepare(images.to(self.device)), labels.to(self.device)
            features, maps = features_and_maps(self.model.backbone, pixels, self.stages)
            mean = self.classification(self.head, features, labels, self.train.loss)
            squares = squared_gradients(len(labels) * mean, maps)
            sums = [old + new for old, new in zip(sums, squares, strict=True)] if sums else squares
        return [normalize_importance(each) for each in sums]


def squared_gradients(total: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """Return the squared gradients (channels) of a sum of losses, summed over the images and pixels of each map."""
    return [gradient.float().square().sum(dim=(0, 2, 3)) for gradient in torch.autograd.grad(total, list(maps))]


def normalize_importance(importance: Tensor) -> Tensor:
    """Return importances (channels) divided by their mean; all are equal if the loss depends on none."""
    mean = importance.mean()
    return torch.where(mean > 0, importance / mean.clamp(min=torch.finfo(mean.dtype).tiny), torch.ones_like(importance))
