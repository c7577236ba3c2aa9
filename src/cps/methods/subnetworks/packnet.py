"""PackNet: train the free weights, prune the smallest, retrain the others, and freeze them."""

from dataclasses import KW_ONLY, dataclass

from cps.methods.blocks.owners import find_owners, owner_bytes, smallest_weights
from cps.methods.task_subnetworks import TaskSubnetworks
from cps.methods.task_training import TaskTraining, phase_shares
from cps.training.settings import SGD, Cosine, Training


@dataclass(eq=False)
class PackNet(TaskSubnetworks):
    """Packing multiple tasks into a single network by iterative pruning (Mallya and Lazebnik, CVPR 2018).

    A task trains the free weights. Then in every layer the share `prune` of them with the smallest absolute values
    becomes free again, with the value 0, and the others are trained on (`retrain`). A task uses its own weights and
    those of all earlier tasks. If the number of `tasks` is given, task t of T prunes the share (T - t) / (T - t + 1),
    which leaves equally many weights to each. Norm layers and biases are private; `shared_norms` keeps those of the
    first task, as published.
    """

    _: KW_ONLY
    retrain: Training = Training(35, SGD(0.01, weight_decay=5e-4), Cosine())
    prune: float = 0.5
    tasks: int | None = None

    name = "PackNet"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.prune < 1:
            raise ValueError(f"prune must be a share of weights in [0, 1), got {self.prune}")

    def train_task(self, task: TaskTraining) -> None:
        """Train, prune and retrain."""
        draft, share = self.draft, self.pruned_share(task.index)
        first, second = phase_shares((self.train, len(task.examples)), (self.retrain, len(task.examples)))
        if self.fit(task, self.train, share=first):
            weights, taken = draft.weights(), self.network.taken
            draft.prune({name: ~smallest_weights(weights[name], ~own, share) for name, own in taken.items()})
        self.fit(task, self.retrain, phase="retraining", share=second)

    def pruned_share(self, task: int) -> float:
        """Return the share of its weights that a task prunes."""
        if self.tasks is None:
            return self.prune
        if task >= self.tasks:
            raise ValueError(f"{self.name} shares its weights among {self.tasks} tasks; make it with tasks={task + 1}")
        return (self.tasks - task - 1) / (self.tasks - task)

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept: the masks follow from one owner for each weight."""
        tasks = len(self.network.subnetworks)
        owners = find_owners([each.masks for each in self.network.subnetworks])
        return {**super().kept(learning=learning), "masks": owner_bytes(owners, tasks)}
