"""CPG: free weights and chosen old ones, pruned as far as a goal allows."""

from dataclasses import KW_ONLY, dataclass

import torch

from cps.data.examples import Examples
from cps.methods.blocks.held_out import check_share
from cps.methods.blocks.owners import smallest_weights
from cps.methods.blocks.scores import Above, constant_scores
from cps.methods.task_subnetworks import TaskSubnetworks
from cps.methods.task_training import TaskTraining, phase_shares, with_prefix
from cps.training.settings import SGD, Adam, Cosine, MakeOptimizer, Training

BEST, GOAL, IS_PRUNING = "best/", "goal", "is pruning"  # buffers while a task is learned


@dataclass(eq=False)
class CPG(TaskSubnetworks):
    """Compacting, picking and growing for unforgetting continual learning (Hung et al., NeurIPS 2019), without growing.

    A task trains the free weights, and scores that choose among those of earlier tasks as in Piggyback. Then its own
    weights are pruned in `steps` equal steps up to the share `sparsity`, the smallest first, each step followed by
    `retrain`. A step that misses the goal is undone, and the other steps only train. The goal is the accuracy before
    pruning less `margin`, on `task.val`, or on the share `validation` of the training images, which are held out.

    The network does not widen. The goal of the paper, the accuracy of a network that is trained on the task alone,
    could then stay out of reach, and nothing would be pruned.
    """

    _: KW_ONLY
    train: Training = Training(100, SGD(1e-2, weight_decay=4e-5), Cosine(), batch_size=32)
    retrain: Training = Training(20, SGD(1e-3, weight_decay=4e-5), Cosine(), batch_size=32)
    steps: int = 9
    sparsity: float = 0.9
    margin: float = 0.01
    validation: float = 0.1
    threshold: float = 5e-3
    score_optimizer: MakeOptimizer = Adam(5e-4, weight_decay=0.0)

    name = "CPG"
    copies_while_learning = 3  # the draft, its scores and the best one so far

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = Above(self.threshold)
        check_share(self, "sparsity", "validation")
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, got {self.steps}")

    def train_task(self, task: TaskTraining) -> None:
        """Train weights and choices, then prune step by step."""
        examples, held_out = self.hold_out(task, self.validation)
        first, *shares = phase_shares(
            (self.train, len(examples)), *[(self.retrain, len(examples)) for _ in range(self.steps)]
        )
        scores, taken = constant_scores(self.network.weights), self.network.taken
        objective = self.scored(scores, self.rule, self.score_optimizer, choosable=taken)
        if self.fit(task, self.train, objective=objective, examples=examples, share=first):
            self.draft.prune(objective.masks())
            self._keep(goal=self.accuracy(held_out) - self.margin)
            self._prune_to(1)
        for step, share in enumerate(shares, start=1):
            if self.fit(task, self.retrain, examples=examples, phase=f"pruning {step}", share=share):
                self._judge(step, held_out)
        self._return_to_best()
        self.buffers = {}

    def _judge(self, step: int, held_out: Examples) -> None:
        """Keep the draft if it meets the goal, and prune on; else return to the last one that did, and stop pruning."""
        goal, is_pruning = float(self.buffers[GOAL]), bool(self.buffers[IS_PRUNING])
        if self.accuracy(held_out) >= goal:
            self._keep(goal=goal, is_pruning=is_pruning)
        elif is_pruning:
            self._return_to_best()
            self.buffers[IS_PRUNING] = torch.tensor(False)
        if bool(self.buffers[IS_PRUNING]) and step < self.steps:
            self._prune_to(step + 1)

    def _prune_to(self, step: int) -> None:
        """Prune the weights that were free before the task to the sparsity of a step."""
        share, weights, taken = self.sparsity * step / self.steps, self.draft.weights(), self.network.taken
        pruned = {name: smallest_weights(weight, ~taken[name], share) for name, weight in weights.items()}
        self.draft.prune({name: mask & ~pruned[name] for name, mask in self.draft.masks.items()})

    def _keep(self, *, goal: float, is_pruning: bool = True) -> None:
        """Keep the draft as the best so far: the sparsest that meets the goal."""
        best = {f"{BEST}{name}": value.detach().clone() for name, value in self.draft.state().items()}
        self.buffers = {**best, GOAL: torch.tensor(goal, dtype=torch.float64), IS_PRUNING: torch.tensor(is_pruning)}

    def _return_to_best(self) -> None:
        self.draft.restore(with_prefix(BEST, self.buffers))
