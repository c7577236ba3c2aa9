"""RWalk: hold the weights that matter by the Fisher information, or that have lowered the loss on the way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cps.methods.regularization.importance import empirical_fisher, flat_parameters
from cps.methods.regularization.quadratic_penalty import PathIntegral
from cps.methods.regularization.separate_heads import SeparateHeads
from cps.methods.task_training import TaskTraining
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Trained

FISHER_IMAGES = 32  # of a batch


@dataclass(eq=False)
class RWalk(SeparateHeads):
    """Riemannian walk (Chaudhry et al., ECCV 2018).

    The loss is that of the classes of the task plus `strength` times the sum over the parameters k of the backbone of
    (F_k + s_k) (theta_k - theta*_k)^2, where theta* are those after the last task, and F and s are scaled to [0, 1].
    The Fisher information F <- rate F_batch + (1 - rate) F is a running mean over windows of `window` steps. A window
    adds max(0, dL_k / (F_k dtheta_k^2 / 2 + damping)) to the score of the task, where dL_k is by how much the parameter
    has lowered the loss in it, and dtheta_k how far it has moved. After a task, s is the mean of the scores before and
    of the task; after the first, that of the task.
    """

    strength: float = 1.0
    rate: float = 0.9
    window: int = 50
    damping: float = 1e-3

    positive = ("window", "damping")
    name = "RWalk"

    @property
    def copies_while_learning(self) -> int:
        """The copies of the parameters of the backbone: theta*, the score, and path and start of a window."""
        return 4

    def objective(self, task: TaskTraining) -> Trained:
        """Return the loss with the penalty."""
        fisher, score = self.buffers.get("fisher"), self.buffers.get("score")
        importance = None if fisher is None or score is None else scaled(fisher) + scaled(score)
        settings = (self.strength, self.rate, self.window, self.damping)
        return WindowedPath(self.model, self.first_class(task), *settings, importance, fisher)

    def train_task(self, task: TaskTraining) -> None:
        """Train, then keep the running Fisher information and the mean of scores."""
        objective = self.objective(task)
        assert isinstance(objective, WindowedPath)
        task.fit(objective, self.with_exemplars(task.examples), self.train, guard=self.guard(task))
        objective.end_window()
        earlier = self.buffers.get("score", objective.score)
        self.buffers = {"fisher": objective.fisher.clone(), "score": (earlier + objective.score) / 2}


class WindowedPath(PathIntegral):
    """A penalized loss with a running Fisher information, and a score that is summed over windows of steps."""

    fisher: Tensor
    score: Tensor
    start: Tensor  # of the window
    steps: Tensor

    def __init__(
        self,
        student: Classifier,
        first: int,
        strength: float,
        rate: float,
        window: int,
        damping: float,
        importance: Tensor | None = None,
        fisher: Tensor | None = None,
    ):
        super().__init__(student, first, strength, importance)
        self.rate, self.window, self.damping = rate, window, damping
        self.has_fisher = fisher is not None
        self.register_buffer("fisher", torch.zeros_like(self.anchor) if fisher is None else fisher.clone())
        self.register_buffer("score", torch.zeros_like(self.anchor))
        self.register_buffer("start", self.anchor.clone())
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch with the penalty."""
        self._batch = pixels[:FISHER_IMAGES].detach(), labels[:FISHER_IMAGES]
        return super().forward(pixels, labels, loss)

    def before_step(self) -> None:
        """Start from the Fisher information of the first batch of all."""
        super().before_step()
        if not self.has_fisher and self.steps == 0:
            self.fisher.copy_(self._fisher_of_batch())

    def after_step(self) -> None:
        """Add the step to the window, and end the window if it is complete."""
        super().after_step()
        self.steps += 1
        if self.steps % self.window == 0:
            self.end_window()
            self.fisher.lerp_(self._fisher_of_batch(), self.rate)

    @torch.no_grad()
    def end_window(self) -> None:
        """Add the score of the steps since the last window ended."""
        now = flat_parameters(self.student.backbone)
        distance = self.fisher * (now - self.start).square() / 2
        self.score += (self.path / (distance + self.damping)).clamp(min=0)
        self.path.zero_()
        self.start.copy_(now)

    def _fisher_of_batch(self) -> Tensor:
        """Return the Fisher information of the last batch, each image by itself."""
        pixels, labels = self._batch
        mode = self.student.training
        fisher = empirical_fisher(self.student.eval(), pixels, labels, self.first)
        self.student.train(mode)
        return fisher


def scaled(values: Tensor) -> Tensor:
    """Return values scaled to [0, 1]."""
    low, high = values.aminmax()
    return (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
