"""WSN: learn weights and the subnetwork of a task together, by scores that choose among all weights."""

from dataclasses import KW_ONLY, dataclass

from cps.methods.blocks.scores import TopShare, uniform_scores
from cps.methods.task_subnetworks import TaskSubnetworks
from cps.methods.task_training import TaskTraining
from cps.methods.trained_method import SCORES
from cps.training.settings import Adam, Cosine, MakeOptimizer, Training


@dataclass(eq=False)
class WSN(TaskSubnetworks):
    """Forget-free continual learning with winning subnetworks (Kang et al., ICML 2022).

    In every layer a task uses the share `density` of the weights with the largest absolute scores, free ones and those
    of earlier tasks. Weights and scores are trained together, the scores by gradients straight through the mask. When
    the task ends, the weights in its mask are frozen; the others and all scores carry over to the next task. Scores
    have an optimizer for them alone, with the schedule of `train`.
    """

    _: KW_ONLY
    train: Training = Training(200, Adam(1e-3, weight_decay=0.0), Cosine(), batch_size=64)
    density: float = 0.5
    score_optimizer: MakeOptimizer = Adam(1e-3, weight_decay=0.0)

    name = "WSN"
    copies_while_learning = 2  # the draft and its scores

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = TopShare(self.density)

    def train_task(self, task: TaskTraining) -> None:
        """Train weights and scores, and keep the scores."""
        scores = self.buffers or uniform_scores(self.network.weights, task.generator(SCORES))
        objective = self.scored(scores, self.rule, self.score_optimizer)
        self.fit(task, self.train, objective=objective)
        self.draft.end_dense_training()
        self.draft.prune(objective.masks())
        self.buffers = {name: value.clone() for name, value in objective.scores.items()}
