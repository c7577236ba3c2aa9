"""Plain training of one classifier over all classes, which finetuning and joint training share."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import ClassName, Data, Examples, as_examples, iterate_batches
from cps.data.normalize import Normalize, Prepare
from cps.data.tasks import Task
from cps.evaluation.metrics import Matrix
from cps.network.classifier import Classifier
from cps.network.partition import named_tensors, set_tensors
from cps.network.subnetwork import local_labels
from cps.runtime.seeding import seeded
from cps.storage.settings_codec import encode
from cps.training.checkpoint import Checkpoint, Position
from cps.training.settings import Training
from cps.training.trainer import Epoch, Trainer

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Phase(NamedTuple):
    """One call of the trainer: the training data, and how many of the first tasks to test on afterwards."""

    train: Data
    num_tested: int


class SingleHeadTrainer:
    """Trains one classifier over the classes of all tasks; nothing protects what it learned before.

    `on_epoch` is called after each epoch with the index of the phase and the epoch.
    """

    def __init__(
        self,
        backbone: nn.Module,
        tasks: Sequence[Task],
        training: Training,
        *,
        fabric: "Fabric",
        augment: Augmentation | None = None,
        normalize: Normalize | None = None,
        seed: int = 0,
        workers: int = 0,
        on_epoch: Callable[[int, Epoch], None] | None = None,
    ):
        self.tasks = tasks
        self.training = training
        self.fabric = fabric
        self.trainer = Trainer(fabric)
        self.augment = augment
        self.prepare = Prepare(normalize)
        self.seed = seed
        self.workers = workers
        self.on_epoch = on_epoch
        self.classes: list[ClassName] = [name for task in tasks for name in task.classes]
        backbone = copy.deepcopy(backbone).to(fabric.device)
        images, _ = next(self._examples(tasks[0].train).batches([torch.arange(2)]))
        with torch.no_grad(), seeded(torch.device("cpu"), seed):
            features = backbone.eval()(self.prepare(images.to(fabric.device))).shape[1]
            self.model = Classifier(backbone, nn.Linear(features, len(self.classes)).to(fabric.device))

    def train(self, method: str, phases: Sequence[Phase], checkpoint: Path | None = None) -> Matrix:
        """Train on each phase in turn; return the accuracy (phase, task) in percent, NaN for tasks not tested.

        With `checkpoint`, the state is saved to that file after each epoch, and a call that finds the file resumes from
        it. `method` is stored in the file, so that another method does not resume from it.
        """
        examples = [self._examples(phase.train) for phase in phases]
        identity = {"baseline": method, "seed": self.seed, "training": encode(self.training)}
        saver = None if checkpoint is None else Checkpoint(checkpoint, identity)
        accuracy = np.full((len(phases), len(self.tasks)), np.nan)
        saved = saver.load() if saver else None
        if saved:
            set_tensors(self.model, saved.tensors)
            accuracy = saved.tensors["rows"].numpy().copy()

        def state() -> dict[str, Tensor]:
            return {**named_tensors(self.model), "rows": torch.from_numpy(accuracy)}

        for index in range(saved.position.phase if saved else 0, len(phases)):

            def after_epoch(epoch: Epoch, index: int = index) -> None:
                if saver is not None and self.fabric.is_global_zero:
                    saver.save(state, epoch.optimizer_state, Position(index, epoch.done))
                if self.on_epoch is not None:
                    self.on_epoch(index, epoch)

            self.trainer.fit(
                self.model,
                examples[index],
                self.training,
                seed=(self.seed, index),
                transform=BatchTransform(self.prepare, self.augment),
                after_epoch=after_epoch,
                start=saved.position.epoch if saved else 0,
                optimizer_state=saved.optimizer if saved else None,
            )
            saved = None
            for task in range(phases[index].num_tested):
                accuracy[index, task] = self._accuracy(self.tasks[task])
        return accuracy

    @torch.no_grad()
    def _accuracy(self, task: Task) -> float:
        """Return the percentage of test images of a task that get the right class among all classes."""
        self.model.eval()
        examples = self._examples(task.test)
        correct = 0
        for images, labels in iterate_batches(examples):
            logits = self.model(self.prepare(images.to(self.fabric.device)))
            correct += int((logits.argmax(dim=1).cpu() == labels.cpu()).sum())
        return 100 * correct / len(examples)

    def _examples(self, data: Data) -> Examples:
        return as_examples(data, partial(local_labels, self.classes), workers=self.workers)
