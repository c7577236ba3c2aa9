"""ProgressiveNet: a new column for every task, which reads the maps of the frozen ones of earlier tasks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.method import Assumptions
from cps.methods.expansion.lateral_columns import LateralColumns
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.network.outputs import Outputs


@dataclass(eq=False)
class ProgressiveNet(SeparateHeads):
    """Progressive neural networks (Rusu et al., 2016).

    Every task has a column, which starts as the given backbone, and a head on its features. A column adds to its map at
    the end of each stage `U relu(V (s_1 h_1, ..., s_k h_k))` for the maps h of k earlier columns; the paper has these
    connections at every layer. Columns of earlier tasks are frozen, so their outputs never change. The loss is over the
    classes of the task alone. `stages` names the modules that end stages, None for those of a known backbone.
    """

    stages: tuple[str, ...] | None = None

    is_sealed = True
    name = "ProgressiveNet"
    assumes = Assumptions(grows=True, task_given=True)

    def __post_init__(self) -> None:
        if self.memory is not None:
            raise ValueError("ProgressiveNet keeps no images, since columns of earlier tasks stay; use memory=None")
        super().__post_init__()

    @property
    def columns(self) -> LateralColumns:
        """The columns of the model."""
        assert isinstance(self.model.backbone, LateralColumns)
        return self.model.backbone

    def new_backbone(self) -> nn.Module:
        """Return the first column, a copy of the given backbone."""
        return LateralColumns(super().new_backbone(), self.stages)

    def grow_model(self, outputs: int, draws: torch.Generator) -> None:
        """Add a column, from the second task on, and outputs."""
        if len(self.classes) > 1:
            assert self.input_shape is not None
            blank = self.prepare(torch.zeros(1, *self.input_shape, device=self.device))
            self.columns.add(super().new_backbone(), blank, draws)
        super().grow_model(outputs, draws)

    @torch.no_grad()
    def outputs_by_task(self, batches: Sequence[Tensor]) -> list[Outputs]:
        """Return the features of each column for batches of raw images, and the scores of the classes of its task."""
        columns, head = self.columns.eval(), self.model.head
        by_batch = [columns.by_column(self.prepare(images.to(self.device))) for images in batches]
        sizes = [len(classes) for classes in self.classes]
        heads = zip(head.weight.split(sizes), head.bias.split(sizes), strict=True)  # whose bits do not depend on others
        outputs = []
        for parts, (weight, bias) in zip(zip(*by_batch, strict=True), heads, strict=True):
            features = torch.cat(parts)
            outputs.append(Outputs(features, F.linear(features.to(weight.dtype), weight, bias).float()))
        return outputs
