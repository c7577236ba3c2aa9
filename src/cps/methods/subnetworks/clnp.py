"""CLNP: neurons that are hardly active are free for later tasks, and cannot disturb those in use."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from cps.methods.blocks.held_out import check_share
from cps.methods.blocks.subnetwork_objective import SubnetworkObjective
from cps.methods.task_subnetworks import TaskSubnetworks
from cps.methods.task_training import TaskTraining
from cps.methods.trained_method import CALIBRATION, FRESH
from cps.network.classifier import Classifier, Loss
from cps.network.masks import Masks, masked, per_output
from cps.pruning.activations import record_activations
from cps.pruning.calibration import calibration_batches
from cps.pruning.dead_channels import find_dead_channels
from cps.runtime.layer_calls import LayerCall
from cps.training.settings import Adam, Cosine, Training
from cps.unlearning import fresh_weights

THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0)  # of the layer's mean
IMAGES = 1000  # on which activity is measured


@dataclass(eq=False)
class CLNP(TaskSubnetworks):
    """Continual learning via neural pruning (Golkar et al., 2019).

    The incoming weights of the neurons in use are frozen. A task trains those of free neurons, from all neurons, with
    an L1 penalty (`sparsity_weight` times the sum of their sizes). Then the neurons whose mean absolute activation is
    up to a threshold stay free: the largest threshold for which the accuracy falls by no more than `margin`. It is
    measured on `task.val`, or on the share `validation` of the training images, which are held out. Weights from a free
    neuron to one in use are cut, so no later task can change what those compute, and free neurons are drawn again.

    A neuron is a channel of a convolution, or an output of a linear layer. With private norm layers and biases every
    task needs a pass; with `shared_norms` one pass would serve all heads.
    """

    _: KW_ONLY
    train: Training = Training(70, Adam(1e-3, weight_decay=0.0), Cosine())
    sparsity_weight: float = 1e-5
    margin: float = 0.01
    validation: float = 0.1

    name = "CLNP"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "validation")

    def train_task(self, task: TaskTraining) -> None:
        """Train with the penalty, and free the neurons that are hardly active."""
        draft, taken = self.draft, self.network.taken
        used = {name: mask.flatten(1).any(dim=1) for name, mask in taken.items()}
        draft.prune({name: mask | ~per_output(used[name], mask.ndim) for name, mask in taken.items()})
        examples, held_out = self.hold_out(task, self.validation)
        objective = Sparse(draft.model, list(taken), self.sparsity_weight, freezes_norms=self.has_frozen_norms)
        self.fit(task, self.train, objective=objective, examples=examples)
        draws = task.generator(CALIBRATION)
        batches = calibration_batches(
            examples, IMAGES, draws, self.network, batch_size=self.train.batch_size, num_rotations=1
        )
        activity = Activity(draft.model.backbone, list(taken), batches)
        goal, chosen = self.accuracy(held_out) - self.margin, activity.active(-1.0)
        for threshold in THRESHOLDS:
            candidate = activity.active(threshold)
            if self.accuracy(held_out, self._tensors(candidate, used)) < goal:
                break
            chosen = candidate
        self._keep(chosen, used, batches, fresh_weights(self.network, None, self.seed, task.index, FRESH))

    def _masks(self, active: "Active", used: Mapping[str, Tensor]) -> Masks:
        """Return the masks in which new neurons read active ones, and those in use read what they always did."""
        return {
            name: torch.where(per_output(used[name], mask.ndim), mask, active.inputs[name])
            for name, mask in self.network.taken.items()
        }

    def _tensors(self, active: "Active", used: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the draft without what is not active."""
        weights, masks = self.draft.weights(), self._masks(active, used)
        tensors = {f"backbone.{name}": masked(weight, masks[name]) for name, weight in weights.items()}
        return {**tensors, "head.weight": self.draft.model.head.weight * active.features}

    @torch.no_grad()
    def _keep(
        self, active: "Active", used: Mapping[str, Tensor], batches: list[Tensor], fresh: Mapping[str, Tensor]
    ) -> None:
        """Prune the draft to the neurons that something active reads; all other new neurons get fresh weights."""
        draft, masks = self.draft, self._masks(active, used)
        draft.model.head.weight.mul_(active.features)
        reader = FeatureMask(draft.model.backbone, active.features)
        weights = {f"backbone.{name}": masked(weight, masks[name]) for name, weight in draft.weights().items()}
        dead = find_dead_channels(reader, weights, batches)
        free = {name: dead[f"backbone.{name}"] & ~used[name] for name in masks}
        draft.prune({name: mask & ~per_output(free[name], mask.ndim) for name, mask in masks.items()})
        draft.dense_weights = {
            name: torch.where(per_output(free[name], weight.ndim), fresh[name].to(weight), weight)
            for name, weight in draft.weights().items()
        }


class Sparse(SubnetworkObjective):
    """The loss plus `weight` times the sum of the absolute values of the shared weights."""

    def __init__(self, student: Classifier, names: list[str], weight: float, *, freezes_norms: bool):
        super().__init__(student, freezes_norms=freezes_norms)
        self.names, self.weight = names, weight

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        weights = dict(self.student.backbone.named_parameters())
        size = torch.stack([weights[name].abs().sum() for name in self.names]).sum()
        return super().forward(pixels, labels, loss) + self.weight * size


@dataclass(frozen=True)
class Active:
    """Which inputs of each layer are active, in the shape of its weight, and which features."""

    inputs: Masks
    features: Tensor


class Activity:
    """The mean absolute activation of the inputs of each layer, and of the features, relative to the mean of all.

    The channels of images are no neurons, so they are always active.
    """

    def __init__(self, backbone: nn.Module, names: list[str], batches: list[Tensor]):
        self.calls = record_activations(backbone, names, batches).calls
        self.images = torch.cat(batches).abs().mean(dim=0).flatten()
        with torch.no_grad():
            sums = [backbone(pixels.clone()).abs().sum(dim=0) for pixels in batches]
        self.features = _relative(torch.stack(sums).sum(dim=0))

    def active(self, threshold: float) -> Active:
        """Return what is more active than a threshold."""
        inputs = {name: _over_weight(calls[0], self._inputs(calls) > threshold) for name, calls in self.calls.items()}
        return Active(inputs, self.features > threshold)

    def _inputs(self, calls: list[LayerCall]) -> Tensor:
        """Return the relative activity of each input channel of a layer."""
        maps = [call.input.reshape(len(call.input), -1) for call in calls]
        activity = _relative(torch.stack([each.mean(dim=1) for each in maps]).mean(dim=0))
        reads_images = any(
            each.numel() == len(self.images) and torch.allclose(each.flatten(), self.images.float()) for each in maps
        )
        return torch.full_like(activity, torch.inf) if reads_images else activity


def _relative(activity: Tensor) -> Tensor:
    return activity / activity.mean().clamp(min=1e-12)


def _over_weight(call: LayerCall, channels: Tensor) -> Tensor:
    """Return a mask over the weight of a layer from one over its input channels."""
    groups = 1 if call.convolution is None else call.convolution.groups
    rows = channels.reshape(groups, -1).repeat_interleave(len(call.weight) // groups, dim=0)
    return rows.reshape(*rows.shape, *(1 for _ in call.weight.shape[2:])).expand(call.weight.shape)


class FeatureMask(nn.Module):
    """A backbone whose inactive features are zero."""

    def __init__(self, backbone: nn.Module, active: Tensor):
        super().__init__()
        self.backbone, self.active = backbone, active

    def forward(self, images: Tensor) -> Tensor:
        """Return the features."""
        return self.backbone(images) * self.active
