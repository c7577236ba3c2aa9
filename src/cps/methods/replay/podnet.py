"""PODNet: pooled maps and features held near the old ones, and several vectors of each class."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cps.methods.blocks.teacher import Teacher
from cps.methods.cosine.cosine_head import CosineHead
from cps.methods.cosine.cosine_method import Classify, CosineMethod, CosineObjective
from cps.methods.cosine.feature_distillation import Maps, angular_distance, pooled_distance
from cps.methods.cosine.similarity_losses import nca_loss, released_nca_loss
from cps.methods.cosine.stage_maps import check_stages, features_and_maps
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Trained
from cps.training.settings import SGD, Constant, Training

MapDistance = Callable[[Maps, Maps], Tensor]


@dataclass(eq=False)
class PODNet(CosineMethod):
    """Pooled outputs distillation (Douillard et al., ECCV 2020), classified by the head: PODNet-CNN.

    The loss is `NCA + s map_weight POD(Z, Z') + s feature_weight (1 - cos(h, h'))`: an NCA loss of the similarities
    with a margin, the distance between the pooled maps of model and teacher, and that of their features.
    `s = sqrt((old + new) / new)` for the numbers of old and new classes. `stages` names the modules whose
    maps are compared, None for those of a known backbone. Gradients are clipped to `max_gradient`.

    With `as_released`, the NCA loss is that of the published code, which has no margin, and similarities are minus the
    squared distances of unit vectors; published numbers were made with it.
    """

    balanced: Training | None = Training(20, SGD(0.05, weight_decay=5e-4), Constant())
    proxies: int = 10
    map_weight: float = 3.0
    feature_weight: float = 1.0
    margin: float = 0.6
    max_gradient: float = 5.0
    stages: tuple[str, ...] | None = None
    as_released: bool = False

    positive = ("proxies", "scale", "max_gradient")
    name = "PODNet-CNN"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stages(self.model.backbone, self.stages)

    def head_settings(self) -> dict[str, Any]:
        """Return the settings of the head.

        The squared distance of unit vectors is 2 - 2 cos. The published code multiplies the vectors by a fixed scale
        first, and softens the weights of the proxies by it, too.
        """
        settings = super().head_settings()
        if not self.as_released:
            return settings
        if self.learns_scale:
            return {**settings, "sharpness": 2.0}
        return {**settings, "sharpness": 2 * self.scale**2, "scale": 1.0}

    def classification(self, head: CosineHead, features: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the NCA loss; that of the training settings is not used."""
        similarities = head.similarities(features)
        if self.as_released:
            return released_nca_loss(similarities, labels, head.scale)
        return nca_loss(similarities, labels, head.scale, self.margin)

    def map_distance(self) -> MapDistance:
        """Return the distance of maps."""
        return pooled_distance

    def objective(self, task: TaskTraining) -> Trained:
        """Return the three terms; for the first task, the NCA loss."""
        if not task.old:
            return PODNetObjective(self.model, self.classification, self.max_gradient)
        factor = math.sqrt((task.old + task.new) / task.new)
        distillation = MapDistillation(
            Teacher(self.model.backbone),
            self.stages,
            self.map_distance(),
            factor * self.map_weight,
            factor * self.feature_weight,
        )
        return PODNetObjective(self.model, self.classification, self.max_gradient, distillation)


@dataclass(eq=False)
class PODNetNME(PODNet):
    """PODNet that is classified by the nearest mean of exemplars, and trained with other weights and a fixed scale."""

    nearest_mean: bool = True
    map_weight: float = 5.0
    scale: float = 3.0
    learns_scale: bool = False

    name = "PODNet-NME"


class MapDistillation(nn.Module):
    """The weighted distances between the maps and the features of a model and those of its teacher."""

    def __init__(
        self,
        teacher: Teacher,
        stages: Sequence[str] | None,
        distance: MapDistance,
        map_weight: float,
        feature_weight: float,
    ):
        super().__init__()
        self.teacher, self.stages, self.distance = teacher, stages, distance
        self.map_weight, self.feature_weight = map_weight, feature_weight

    def forward(self, pixels: Tensor, features: Tensor, maps: Maps) -> Tensor:
        """Return the sum for a batch, given the features and maps of the model."""
        with torch.no_grad():
            old_features, old_maps = features_and_maps(self.teacher.model, pixels, self.stages)
        distance = self.map_weight * self.distance(maps, old_maps)
        return distance + self.feature_weight * angular_distance(features, old_features)


class PODNetObjective(CosineObjective):
    """The classification loss, and the distillation of maps and features if there is a teacher."""

    def __init__(
        self, student: Classifier, classify: Classify, max_gradient: float, distillation: MapDistillation | None = None
    ):
        super().__init__(student, classify)
        self.max_gradient, self.distillation = max_gradient, distillation

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        if self.distillation is None:
            return super().forward(pixels, labels, loss)
        features, maps = features_and_maps(self.student.backbone, pixels, self.distillation.stages)
        classified = self.classify(self.head, features, labels, loss)
        return classified + self.distillation(pixels, features, maps)

    def before_step(self) -> None:
        """Clip each gradient."""
        nn.utils.clip_grad_value_(self.student.parameters(), self.max_gradient)
