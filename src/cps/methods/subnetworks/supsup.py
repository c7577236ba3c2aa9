"""SupSup: the weights are random and never trained; a task is a mask over them."""

import copy
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from cps.closed_form.spaces import Space
from cps.methods.blocks.scores import TopShare, uniform_scores
from cps.methods.subnetworks.one_shot import MixtureEntropy, mixture_gradients
from cps.methods.task_subnetworks import TaskSubnetworks
from cps.methods.task_training import TaskTraining
from cps.methods.trained_method import SCORES
from cps.network.freezing import freeze_weights
from cps.network.partition import partition
from cps.runtime.seeding import generator
from cps.selection.base import Selector
from cps.selection.entropy import Entropy
from cps.selection.max_output import MaxOutput
from cps.training.settings import Adam, Cosine, MakeOptimizer, Training


@dataclass(eq=False)
class SupSup(TaskSubnetworks):
    """Supermasks in superposition (Wortsman et al., NeurIPS 2020).

    The weights of a layer are plus or minus one constant, the deviation of Kaiming's initialisation, and stay so. A
    task learns scores, by gradients straight through its mask: in every layer, the share `density` of the weights with
    the largest absolute scores is on. Norm layers and heads are trained and private; the paper's norm layers have no
    parameters, and its head is a random one under a mask.

    The task of a group of images is the one whose outputs have the smallest entropy. `OneShot` needs one gradient of
    the entropy of a mixture of all masks instead, and norm layers that all tasks share (`shared_norms`).
    """

    _: KW_ONLY
    train: Training = Training(100, Adam(1e-3, weight_decay=0.0), Cosine(), batch_size=128)
    selectors: Sequence[Selector] = (Entropy(), MaxOutput())
    density: float = 0.3
    score_optimizer: MakeOptimizer = Adam(1e-3, weight_decay=0.0)

    name = "SupSup"
    copies_while_learning = 2  # the draft and its scores

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = TopShare(self.density)

    def new_backbone(self) -> nn.Module:
        """Return the backbone with random signed constants as its weights, which nothing trains."""
        backbone = copy.deepcopy(self.backbone)
        fill_signed_constants(backbone, generator(self.seed, SCORES))
        return backbone

    def train_task(self, task: TaskTraining) -> None:
        """Train new scores, the norm layers and the head of the task."""
        scores = uniform_scores(self.network.weights, task.generator(SCORES))
        objective = self.scored(scores, self.rule, self.score_optimizer)
        self.fit(task, self.train, objective=objective)
        self.draft.prune(objective.masks())

    def features(self, batches: Sequence[Tensor], space: Space | None) -> Tensor:
        """Return features in a space, among them how fast the entropy of a mixture falls with the weight of a mask."""
        if not isinstance(space, MixtureEntropy):
            return super().features(batches, space)
        if not self.shared_norms:
            raise ValueError("a mixture of masks has no norm layers unless all tasks share them; use shared_norms=True")
        return mixture_gradients(self.network, batches, space.tasks)


@torch.no_grad()
def fill_signed_constants(backbone: nn.Module, draws: torch.Generator) -> None:
    """Give each weight of convolutions and linear layers the size sqrt(2 / fan-in) and a random sign, and freeze it."""
    freeze_weights(backbone)
    weights = dict(backbone.named_parameters())
    for name in partition(backbone).shared:
        weight = weights[name]
        signs = torch.randint(2, weight.shape, generator=draws).to(weight) * 2 - 1
        weight.copy_(signs * (2 / weight[0].numel()) ** 0.5)
