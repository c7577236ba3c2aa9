"""BiC: distil, then learn two numbers for each task that undo the preference for new classes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.data.batch_transform import BatchTransform
from cps.data.examples import Examples, choose_examples, join_examples, read_labels
from cps.method import Assumptions
from cps.methods.blocks.bias_correction import BiasCorrection
from cps.methods.blocks.heads import guard_rows
from cps.methods.blocks.memory import Exemplars, FirstImages, Memory
from cps.methods.blocks.teacher import Frozen, Teacher, frozen
from cps.methods.replay.weight_aligning import DistilledLoss
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining, phase_shares, with_prefix
from cps.methods.trained_method import CHOOSE
from cps.network.classifier import Classifier, Loss
from cps.training.objective import Objective
from cps.training.settings import SGD, Constant, Steps, Training

HELD_OUT = 1040  # purpose of a seed


@dataclass(eq=False)
class BiC(SingleHead):
    """Large scale incremental learning (Wu et al., CVPR 2019), known as bias correction.

    The logits z of task t are corrected to alpha_t z + beta_t. The network is trained by `(1 - share)` times the
    cross-entropy plus `share` times the distillation of old classes, all with corrected logits, where `share` is that
    of the old classes among all. Then alpha and beta of the new task alone are trained on images that are held out: a
    tenth of those in memory, and as many of each new class. They are neither augmented nor used for anything else.
    """

    train: Training = Training(250, SGD(0.1, weight_decay=2e-4), Steps((100, 150, 200), 0.1))
    correct: Training = Training(200, SGD(0.1, weight_decay=0.0), Constant())
    memory: Memory | None = Memory(2000)
    temperature: float = 2.0

    has_teacher = True
    positive = ("temperature",)
    name = "BiC"
    assumes = Assumptions(replay=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held_out = Exemplars()

    @property
    def correction(self) -> BiasCorrection:
        """The correction of the logits of all tasks; that of a task that is being learned changes nothing."""
        correction = BiasCorrection([len(classes) for classes in self.classes]).to(self.device)
        for name, value in correction.named_parameters():
            known = self.buffers.get(name, value[:0])
            value.data[: len(known)] = known
        return correction

    def train_task(self, task: TaskTraining) -> None:
        """Train the network without the images that are held out, then the correction on them."""
        training, held = self._split(task)
        examples, correction = self.with_exemplars(training), self.correction
        balanced = join_examples(held, self.held_out.examples()) if task.old else None
        shares = phase_shares((self.train, len(examples)), (self.correct, len(balanced) if balanced else 0))
        task.fit(self._distilled(task, correction), examples, self.train, share=shares[0])
        if balanced is not None:
            with frozen(self.model) as model:
                task.fit(
                    CorrectionLoss(correction, model),
                    balanced,
                    self.correct,
                    phase="bias correction",
                    share=shares[1],
                    guard=guard_rows(correction, task.index, prefix=""),
                    transform=BatchTransform(self.prepare),
                )
        self.buffers |= {name: value.detach().clone() for name, value in correction.named_parameters()}

    def _distilled(self, task: TaskTraining, correction: BiasCorrection) -> Classifier | DistilledLoss:
        """Return the loss of the network; for the first task, the cross-entropy."""
        if task.old == 0:
            return self.model
        model = CorrectedClassifier(self.model, correction)
        share = task.old / (task.old + task.new)
        return DistilledLoss(model, Teacher(model), task.old, share, self.temperature)

    def _split(self, task: TaskTraining) -> tuple[Examples, Examples]:
        """Return the images of a task for training, and those that are held out, as many as of each old class."""
        number = max(self.held_out_quota, *map(len, self.held_out.images), 0)
        labels, parts = read_labels(task.examples).cpu(), []
        draws = task.generator(HELD_OUT)
        for label in task.labels:
            own = (labels == label).nonzero()[:, 0]
            drawn = own[torch.randperm(len(own), generator=draws)]
            parts.append(drawn.tensor_split([min(number, len(own) - 1)]))
        held, training = (torch.cat(part).sort().values for part in zip(*parts, strict=True))
        return choose_examples(task.examples, training), choose_examples(task.examples, held)

    @property
    def held_out_quota(self) -> int:
        """The number of images of each class in memory that are held out, which is a tenth of them."""
        return max(1, round(super().quota / 10))

    @property
    def quota(self) -> int:
        """The number of images of each class in memory that are trained on."""
        return super().quota - self.held_out_quota

    def _check_memory(self) -> None:
        """Raise `ValueError` before the training for a memory that is too small."""
        if self.quota < 1:
            raise ValueError(
                f"BiC trains with images of each class in memory and corrects with others, so it needs two of each of "
                f"{self.num_classes} classes; use a larger memory"
            )
        super()._check_memory()

    def choose_exemplars(self, task: TaskTraining, examples: Examples | None = None) -> Exemplars:
        """Return images of every class for training, without those that are held out."""
        return super().choose_exemplars(task, self._split(task)[0] if examples is None else examples)

    def end_task(self, task: TaskTraining) -> None:
        """Keep images that are held out."""
        held, labels, draws = self._split(task)[1], task.labels.tolist(), task.generator(CHOOSE)
        self.held_out.shrink(self.held_out_quota)
        self.held_out.add_classes(held, labels, self.held_out_quota, FirstImages(), Tensor, draws)

    def logits(self, features: Tensor) -> Tensor:
        """Return corrected logits (N, classes)."""
        return self.correction(super().logits(features))

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept between tasks, or while a task is learned, by what they are."""
        sizes = super().kept(learning=learning)
        return {**sizes, "exemplars": sizes.get("exemplars", 0) + self.held_out.nbytes}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that are kept between tasks, by name."""
        return super().tensors() | {f"held out/{name}": images for name, images in self.held_out.state().items()}

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        super().set_tensors(tensors)
        self.held_out.restore(with_prefix("held out/", tensors))


class CorrectedClassifier(Classifier):
    """A classifier with corrected logits; the correction is not trained."""

    def __init__(self, model: Classifier, correction: BiasCorrection):
        super().__init__(model.backbone, model.head)
        self.correction = correction.requires_grad_(False)

    def outputs(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (N, d) and the corrected logits (N, classes)."""
        features, logits = super().outputs(pixels)
        return features, self.correction(logits)


class CorrectionLoss(Objective):
    """The cross-entropy of the corrected logits of a model that is not trained."""

    def __init__(self, correction: BiasCorrection, model: Frozen):
        super().__init__(correction.requires_grad_(True))
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch; that of the training settings is not used."""
        return F.cross_entropy(self.student(self.model(pixels).float()), labels)
