"""LwM: LwF that also holds where in an image the best old class is seen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cps.methods.blocks.teacher import Teacher
from cps.methods.regularization.attention import attention_distance, attention_maps, last_maps, recorded_maps
from cps.methods.regularization.lwf import DistilledOldClasses, LwF
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Trained


@dataclass(eq=False)
class LwM(LwF):
    """Learning without memorizing (Dhar et al., CVPR 2019).

    The loss is that of LwF plus `attention` times the distance between the attention maps of the model and of its
    teacher, for the old class that scores best with the teacher. The paper gives no weights; both are 1, as in FACIL.
    The maps are those that the backbone pools, so the gradients of an image do not depend on the rest of its batch.
    """

    attention: float = 1.0

    name = "LwM"

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss with distillation of outputs and attention; for the first task, the loss alone."""
        objective = super().objective(task)
        if not isinstance(objective, DistilledOldClasses):
            return objective
        assert self.input_shape is not None
        blank = self.prepare(torch.zeros(1, *self.input_shape, device=self.device))
        maps = last_maps(self.model.backbone.eval(), blank)
        return DistilledAttention(objective, maps, self.attention)


class DistilledAttention(DistilledOldClasses):
    """The loss of LwF plus `attention` times the mean distance of attention maps."""

    def __init__(self, lwf: DistilledOldClasses, maps: str, attention: float):
        super().__init__(lwf.student, lwf.teacher, lwf.first, lwf.old, lwf.strength, lwf.temperature)
        self.maps, self.attention = maps, attention

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        best, targets, seen_before = teacher_attention(self.teacher, pixels, self.maps, self.old)
        with recorded_maps(self.student.backbone, self.maps) as maps:
            features, logits = self.student.outputs(pixels)
        seen = attention_maps(logits.gather(1, best[:, None])[:, 0], maps[0], create_graph=True)
        distance = attention_distance(seen, seen_before)
        return self.with_distillation(features, logits, targets, labels, loss) + self.attention * distance


@torch.enable_grad()
def teacher_attention(teacher: Teacher, pixels: Tensor, maps: str, old: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best old class (N,) of each image for a teacher, its logits, and attention maps of that class."""
    model = teacher.model
    assert isinstance(model, Classifier)
    with recorded_maps(model.backbone, maps, detached=True) as recorded:
        logits = model(pixels)
    best = logits[:, :old].argmax(dim=1)
    seen = attention_maps(logits.gather(1, best[:, None])[:, 0], recorded[0])
    return best, logits.detach(), seen.detach()
