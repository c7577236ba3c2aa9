"""IL2M: replay whose scores of old classes are rescaled by how sure the network once was of them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cps.data.examples import Examples, read_labels
from cps.method import Assumptions
from cps.methods.blocks.memory import Memory
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining


@dataclass(eq=False)
class IL2M(SingleHead):
    """Class incremental learning with dual memory (Belouadah & Popescu, ICCV 2019).

    Training is experience replay. If the class with the largest probability is one of the last task, the probability of
    every old class c is multiplied by (first_c / now_c) * (confidence_now / confidence_t): its mean probability for its
    own images when it was new and now, and the mean largest probability for new images after the last task and after
    the task t of c. Images in memory stand for those of old classes. Scores are the logarithms.
    """

    memory: Memory | None = Memory(2000)

    least_quota = 1
    name = "IL2M"
    assumes = Assumptions(replay=True)

    def end_task(self, task: TaskTraining) -> None:
        """Measure how sure the network is of the new images, and of the old ones in memory."""
        probabilities, labels = self._probabilities(task.examples), read_labels(task.examples).cpu()
        first, confidence = class_means(probabilities, labels, self.num_classes), probabilities.amax(dim=1).mean()
        self.buffers |= {
            "first": torch.cat([self.buffers.get("first", first[:0]), first[task.old :]]),
            "confidence": torch.cat([self.buffers.get("confidence", first[:0]), confidence[None]]),
        }
        old = self.exemplars.examples()
        assert old is not None
        self.buffers["now"] = class_means(self._probabilities(old), old.targets, self.num_classes)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logarithms of rescaled probabilities."""
        tasks = torch.arange(len(self.classes)).repeat_interleave(torch.tensor([len(names) for names in self.classes]))
        confidence, old = self.buffers["confidence"], self.num_classes - len(self.classes[-1])
        factors = self.buffers["first"] / self.buffers["now"] * (confidence[-1] / confidence[tasks])
        probabilities = super().logits(features).float().softmax(dim=1)
        tiny = torch.finfo(torch.float32).tiny
        return rescaled(probabilities, factors[:old]).clamp(min=tiny).log()

    def _probabilities(self, examples: Examples) -> Tensor:
        return super().logits(self.features_of(examples)).detach().softmax(dim=1)


def class_means(probabilities: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean probability of each class for its own images; 1 for a class without images."""
    own = probabilities.gather(1, labels.to(probabilities.device)[:, None])[:, 0]
    return torch.stack([own[mask].mean() if mask.any() else own.new_ones(()) for mask in _masks(labels, classes)])


def rescaled(probabilities: Tensor, factors: Tensor) -> Tensor:
    """Multiply the probabilities of the old classes by factors if the most probable class is a new one."""
    old = len(factors)
    changed = torch.cat([probabilities[:, :old] * factors, probabilities[:, old:]], dim=1)
    is_new = probabilities.argmax(dim=1) >= old
    return torch.where(is_new[:, None], changed, probabilities)


def _masks(labels: Tensor, classes: int) -> Iterable[Tensor]:
    return (labels == label for label in range(classes))
