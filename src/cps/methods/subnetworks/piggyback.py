"""Piggyback: the weights of one network never change; every task learns which of them to use."""

from dataclasses import KW_ONLY, dataclass

from cps.methods.blocks.scores import Above, constant_scores
from cps.methods.task_subnetworks import TaskSubnetworks
from cps.methods.task_training import TaskTraining
from cps.training.settings import Adam, MakeOptimizer, Steps, Training


@dataclass(eq=False)
class Piggyback(TaskSubnetworks):
    """Adapting a single network to multiple tasks by learning to mask weights (Mallya et al., ECCV 2018).

    If the backbone has frozen weights (`requires_grad` is False, as for pretrained ones), they are the network. Else
    the first task trains it whole (`train`) and freezes it. Every further task has a score for each weight, which
    starts at 0.01, and uses the weights whose scores are above `threshold`. The scores are trained by gradients
    straight through the mask, by an optimizer for them alone, together with norm layers and head (`mask_train`).
    """

    _: KW_ONLY
    mask_train: Training = Training(30, Adam(1e-4, weight_decay=0.0), Steps((15,), 0.1), batch_size=32)
    threshold: float = 5e-3
    score_optimizer: MakeOptimizer = Adam(1e-4, weight_decay=0.0)

    name = "Piggyback"
    copies_while_learning = 2  # the draft and its scores

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = Above(self.threshold)

    def train_task(self, task: TaskTraining) -> None:
        """Train the scores of a task, or the whole network if no weight is frozen yet."""
        if not any(taken.any() for taken in self.network.taken.values()):
            self.fit(task, self.train)
            return
        scores = constant_scores(self.network.weights)
        objective = self.scored(scores, self.rule, self.score_optimizer)
        self.fit(task, self.mask_train, objective=objective, phase="masks")
        self.draft.prune(objective.masks())
