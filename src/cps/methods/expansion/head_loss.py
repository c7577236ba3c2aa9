"""Training of a head on features that stay."""

from torch import Tensor, nn

from cps.methods.blocks.teacher import Frozen
from cps.network.classifier import Loss
from cps.training.objective import Objective


class HeadLoss(Objective):
    """The loss of a head on a backbone that is not trained; the logits are divided by `temperature`."""

    def __init__(self, head: nn.Linear, backbone: Frozen, temperature: float = 1.0):
        super().__init__(head)
        self.student: nn.Linear
        self.backbone, self.temperature = backbone, temperature

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features = self.backbone(pixels).to(self.student.weight.dtype)
        return loss(features, self.student(features) / self.temperature, labels)
