"""The bounds every continual learner lies between: finetuning, which forgets, and joint training."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import ClassName, Data, Examples, as_examples, in_order
from cps.data.images import as_images
from cps.data.normalize import Normalize, Prepare
from cps.data.tasks import Task
from cps.evaluation.metrics import summary
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


class Baseline:
    """One classifier over all classes, trained without any care for what it learned before."""

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
        watch: Callable[[int, Epoch], None] | None = None,
    ):
        self.tasks = tasks
        self.training = training
        self.fabric = fabric
        self.trainer = Trainer(fabric)
        self.augment = augment
        self.prepare = Prepare(normalize)
        self.seed = seed
        self.workers = workers
        self.watch = watch
        self.classes: list[ClassName] = [name for task in tasks for name in task.classes]
        backbone = copy.deepcopy(backbone).to(fabric.device)
        images, _ = next(self._examples(tasks[0].train).batches([torch.arange(2)]))
        with torch.no_grad(), seeded(torch.device("cpu"), seed):
            features = backbone.eval()(self.prepare(images.to(fabric.device))).shape[1]
            self.model = Classifier(backbone, nn.Linear(features, len(self.classes)).to(fabric.device))

    def finetuning(self, checkpoint: Path | None = None) -> dict[str, Any]:
        """Train on one task after the other; return the class-IL metrics: how much is forgotten."""
        phases = [self._examples(task.train) for task in self.tasks]
        return summary(self._train(phases, "finetuning", checkpoint))

    def joint(self, checkpoint: Path | None = None) -> dict[str, Any]:
        """Train on all tasks at once, which no continual learner may; return the accuracy on each."""
        rows = self._train([self._examples(_joined(self.tasks))], "joint", checkpoint)
        return {"ACC": float(rows[0].mean()), "accuracy": [rows[0].tolist()]}

    def _train(self, phases: list[Examples], name: str, path: Path | None) -> np.ndarray:
        """Train on each phase in turn; return the accuracy (after phase, on task), NaN for unseen tasks."""
        identity = {"baseline": name, "seed": self.seed, "training": encode(self.training)}
        saver = None if path is None else Checkpoint(path, identity)
        rows = np.full((len(phases), len(self.tasks)), np.nan)
        saved = saver.load() if saver else None
        if saved:
            set_tensors(self.model, saved.tensors)
            rows = saved.tensors["rows"].numpy().copy()

        def state() -> dict[str, Tensor]:
            return {**named_tensors(self.model), "rows": torch.from_numpy(rows)}

        for phase in range(saved.at.phase if saved else 0, len(phases)):

            def after_epoch(epoch: Epoch, phase: int = phase) -> None:
                if saver is not None and self.fabric.is_global_zero:
                    saver.save(state, epoch.optimizer_state, Position(phase, epoch.done))
                if self.watch is not None:
                    self.watch(phase, epoch)

            self.trainer.fit(
                self.model,
                phases[phase],
                self.training,
                seed=(self.seed, phase),
                show=BatchTransform(self.prepare, self.augment),
                after_epoch=after_epoch,
                start=saved.at.epoch if saved else 0,
                optimizer_state=saved.optimizer if saved else None,
            )
            saved = None
            for on in range(len(self.tasks) if len(phases) == 1 else phase + 1):
                rows[phase, on] = self._accuracy(self.tasks[on])
        return rows

    @torch.no_grad()
    def _accuracy(self, task: Task) -> float:
        self.model.eval()
        examples = self._examples(task.test)
        right = 0
        for images, labels in in_order(examples):
            logits = self.model(self.prepare(images.to(self.fabric.device)))
            right += int((logits.argmax(dim=1).cpu() == labels.cpu()).sum())
        return 100 * right / len(examples)

    def _examples(self, data: Data) -> Examples:
        return as_examples(data, partial(local_labels, self.classes), workers=self.workers)


def _joined(tasks: Sequence[Task]) -> Data:
    """Return the training data of all tasks together."""
    parts = [task.train for task in tasks]
    if all(isinstance(part, Subset) and part.dataset is parts[0].dataset for part in parts):
        return Subset(parts[0].dataset, [index for part in parts for index in part.indices])
    if isinstance(tasks[0].train, Dataset):
        return ConcatDataset([task.train for task in tasks])
    labels = [label for task in tasks for label in task.train[1]]
    return torch.cat([as_images(task.train[0]) for task in tasks]), labels
