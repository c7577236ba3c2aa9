"""The objective of a subnetwork whose norm layers may be those of the first task."""

from torch import Tensor, nn

from cps.network.classifier import Classifier, Loss
from cps.training.objective import Objective


class SubnetworkObjective(Objective):
    """The loss of a classifier; with `freezes_norms`, its norm layers keep their statistics and normalise by them."""

    def __init__(self, student: Classifier, *, freezes_norms: bool = False):
        super().__init__(student)
        self.student: Classifier
        self.freezes_norms = freezes_norms

    def train(self, mode: bool = True) -> "SubnetworkObjective":
        """Set the mode of everything but frozen norm layers, which stay in evaluation mode."""
        super().train(mode)
        if self.freezes_norms:
            for module in self.student.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.eval()
        return self

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        return self.student(pixels, labels, loss)
