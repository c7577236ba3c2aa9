"""SpaceNet: every task gets sparse connections among free neurons, and reserves the most important of these."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.methods.blocks.owners import owner_bytes
from cps.methods.blocks.subnetwork_objective import SubnetworkObjective
from cps.methods.single_head import SingleHead
from cps.methods.task_training import TaskTraining, with_prefix
from cps.methods.trained_method import SCORES
from cps.network.classifier import Classifier, Loss
from cps.network.compact.channel_map import ChannelMap, map_channels
from cps.network.freezing import Guard, Protected
from cps.network.masks import mask_shape, per_connection
from cps.network.partition import named_tensors
from cps.selection.base import Selector
from cps.selection.max_output import MaxOutput

OWNER, RESERVED, KNOWN = "owner/", "reserved/", "known/"  # prefixes of buffers


@dataclass(eq=False)
class SpaceNet(SingleHead):
    """SpaceNet: make free space for continual learning (Sokar et al., Neurocomputing 2021).

    A connection is a weight of a linear layer or a kernel of a convolution, and a neuron a channel. A task selects the
    share `selected` of the neurons of each layer among those that are not reserved, and draws connections between them:
    the share `density` of all pairs, and at least one for each neuron. Between two epochs, the share `dropped` of them
    with the smallest importance is removed, and as many are added where the product of the importances of both neurons
    is largest. The importance of a connection is the sum of |change times gradient| over all steps; that of a neuron is
    the sum over its incoming connections, and that of an input over the outgoing ones. After the task, its connections
    are frozen, and the share `reserved` of the neurons, the most important ones, is closed to later tasks. If the
    number of `tasks` T is given, the share is 1 / (2 T), which is the published one for five tasks. All connections
    are active for all images.

    In the loss of a task, the logits of all other classes are zero: those of old classes, and those of classes to come
    if the number of classes in all tasks is given (`total_classes`), which the paper knows from the start.

    The released network has two linear layers of 400 neurons, of which a task selects the share 0.2 with a density of
    0.25, and no norm layers. These shares are too small for narrow convolutional networks, so the defaults are larger.
    Here the bias and the norm layer of a neuron are trained by the first task that selects it, and norm layers keep the
    statistics that they came with, which for a new network means that they do not normalise: those of one task would
    amplify what later ones add to it. The head reads all selected features.
    """

    _: KW_ONLY
    selected: float = 0.5
    reserved: float = 0.1
    density: float = 0.5
    dropped: float = 0.2
    tasks: int | None = None
    total_classes: int | None = None

    name = "SpaceNet"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("selected", "reserved", "density"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share in (0, 1], got {getattr(self, name)}")
        if not 0 <= self.dropped < 1:
            raise ValueError(f"dropped must be a share of connections in [0, 1), got {self.dropped}")
        if self.memory is not None:
            raise ValueError(f"{self.name} trains each task on its own images; leave the memory out")

    @property
    def group_selector(self) -> Selector:
        """The selector for groups of images: outputs that were trained apart have no common softmax."""
        return MaxOutput()

    @cached_property
    def channels(self) -> ChannelMap:
        """The neurons of the backbone, and which layers connect them."""
        assert self.input_shape is not None
        return map_channels(self.model.backbone, self.prepare(torch.zeros(2, *self.input_shape, device=self.device)))

    @property
    def owners(self) -> dict[str, Tensor]:
        """The owner of each connection: 0 if it is free, else one more than the task."""
        return with_prefix(OWNER, self.buffers)

    def train_task(self, task: TaskTraining) -> None:
        """Give the task connections, train and move them, and reserve neurons."""
        if not self.buffers:
            self._start()
        draws = task.generator(SCORES)
        chosen = {group: self._select(group, draws) for group in self.channels.sizes}
        objective = SparseConnections(
            self.model,
            self.channels.layers,
            self.owners,
            chosen,
            old=task.old,
            total_classes=self.total_classes or 0,
            dropped=self.dropped,
        )
        objective.allocate(self.density, draws)
        task.fit(objective, task.examples, self.train, guard=self._guard_of(objective, task.old))
        importance = objective.neuron_importance()
        share = self.reserved_share
        for name, connections in objective.connections.items():
            self.buffers[f"{OWNER}{name}"] = self.owners[name].masked_fill(connections, task.index + 1)
        for group, neurons in chosen.items():
            number = min(_number(share, neurons), int(neurons.sum()))
            best = importance[group].masked_fill(~neurons, -1.0).topk(number).indices
            self.buffers[f"{RESERVED}{group}"] = self.buffers[f"{RESERVED}{group}"].index_fill(0, best, True)
            self.buffers[f"{KNOWN}{group}"] = self.buffers[f"{KNOWN}{group}"] | neurons

    @property
    def reserved_share(self) -> float:
        """The share of the neurons that a task reserves."""
        return self.reserved if self.tasks is None else 1 / (2 * self.tasks)

    def _start(self) -> None:
        """Free all connections and neurons; raise `ValueError` if there are fewer neurons than tasks."""
        fewest = min(self.channels.sizes.values())
        if self.tasks is not None and fewest < self.tasks:
            raise ValueError(
                f"{self.name} reserves neurons for {self.tasks} tasks, but a layer has only {fewest}; use a wider "
                "backbone"
            )
        live = named_tensors(self.model.backbone)
        for name in self.channels.layers:
            shape = mask_shape(live[name].shape)
            self.buffers[f"{OWNER}{name}"] = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        for group, size in self.channels.sizes.items():
            for kind in (RESERVED, KNOWN):
                self.buffers[f"{kind}{group}"] = torch.zeros(size, dtype=torch.bool, device=self.device)

    def _select(self, group: str, draws: torch.Generator) -> Tensor:
        """Return the neurons of a group that a task may use, drawn from those that are not reserved."""
        reserved = self.buffers[f"{RESERVED}{group}"]
        free = (~reserved).nonzero()[:, 0].cpu()
        if len(free) < _number(self.reserved_share, reserved):
            raise ValueError(
                f"{self.name} has no neurons left for another task; use a wider backbone, or reserve a smaller share"
            )
        drawn = free[torch.randperm(len(free), generator=draws)[: _number(self.selected, reserved)]]
        return torch.zeros_like(reserved).index_fill(0, drawn.to(self.device), True)

    def _guard_of(self, objective: "SparseConnections", old: int) -> Guard:
        """Return what training must not move: connections of other tasks, known neurons, and old rows of the head."""
        guard, chosen = {}, objective.chosen
        for name, value in self.model.named_parameters():
            inner = name.removeprefix("backbone.")
            group = self.channels.private.get(inner, "")
            taken = torch.full_like(value, old > 0, dtype=torch.bool)
            off = torch.zeros_like(taken)
            if inner in objective.owners:
                taken, off = objective.owners[inner] > 0, objective.off[inner]
            elif group in chosen:
                taken = ~chosen[group] | self.buffers[f"{KNOWN}{group}"]
            elif name.startswith("head."):
                taken[old:] = False
                features = chosen.get(self.channels.features)
                if name == "head.weight" and features is not None and len(features) == value.shape[1]:
                    off[old:] = ~features
            guard[name] = Protected(taken, value.detach().clone(), off)
        return guard

    def kept(self, *, learning: bool = False) -> dict[str, int]:
        """Return the bytes kept: the masks are the owners of connections, and two bits for each neuron."""
        sizes = super().kept(learning=learning)
        sizes.pop("statistics", None)
        marks = sum((2 * size + 7) // 8 for size in self.channels.sizes.values()) if self.buffers else 0
        return {**sizes, "masks": owner_bytes(self.owners, len(self.classes)) + marks}


def _number(share: float, neurons: Tensor) -> int:
    return max(1, round(share * len(neurons)))


class SparseConnections(SubnetworkObjective):
    """The loss of a task whose connections move; the logits of all other classes are zero.

    `connections` are those of the task, and `off` all that belong to no task, each by the name of a layer. Both change
    between epochs. `layers` names the groups of channels that each layer reads and writes, `owners` has the connections
    of earlier tasks, and `chosen` the neurons of each group that the task may use.
    """

    def __init__(
        self,
        student: Classifier,
        layers: Mapping[str, tuple[str, str]],
        owners: Mapping[str, Tensor],
        chosen: Mapping[str, Tensor],
        *,
        old: int = 0,
        total_classes: int = 0,
        dropped: float = 0.2,
    ):
        super().__init__(student, freezes_norms=True)
        self.layers, self.owners, self.chosen = layers, owners, chosen
        self.old, self.total_classes, self.dropped = old, total_classes, dropped
        for index, owner in enumerate(owners.values()):
            self.register_buffer(f"connections {index}", torch.zeros_like(owner, dtype=torch.bool))
            self.register_buffer(f"off {index}", owner == 0)
            self.register_buffer(f"importance {index}", torch.zeros_like(owner, dtype=torch.float32))
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def _state(self, kind: str) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"{kind} {index}") for index, name in enumerate(self.owners)}

    @property
    def connections(self) -> dict[str, Tensor]:
        """The connections of the task."""
        return self._state("connections")

    @property
    def off(self) -> dict[str, Tensor]:
        """The connections of no task."""
        return self._state("off")

    @property
    def importance(self) -> dict[str, Tensor]:
        """The importance of each connection of the task so far."""
        return self._state("importance")

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights of all layers."""
        live = dict(self.student.backbone.named_parameters())
        return {name: live[name] for name in self.owners}

    def forward(self, pixels: Tensor, labels: Tensor, loss: Loss) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.student.outputs(pixels)
        to_come = max(0, self.total_classes - logits.shape[1])
        return loss(features, F.pad(logits[:, self.old :], (self.old, to_come)), labels)

    @torch.no_grad()
    def allocate(self, density: float, draws: torch.Generator) -> None:
        """Draw the connections of the task and their weights; all weights of no task become zero."""
        for name, weight in self.weights.items():
            connections, owner = self.connections[name], self.owners[name]
            source, target = self._neurons(name)
            places = self._places(name).flatten().nonzero()[:, 0].cpu()
            pairs, targets = int(source.sum()) * int(target.sum()), int(target.sum())
            number = min(len(places), max(targets, round(density * pairs)))
            drawn = places[torch.randperm(len(places), generator=draws)[:number]]
            connections.view(-1)[drawn.to(connections.device)] = True
            self.off[name].copy_((owner == 0) & ~connections)
            fan_in = max(1.0, number / targets) * weight[0, 0].numel()
            values = torch.randn(weight.shape, generator=draws).to(weight) * (2 / fan_in) ** 0.5
            weight.copy_(torch.where(connections, values, weight.masked_fill(owner == 0, 0.0)))

    def before_epoch(self, epoch: int) -> None:
        """Move connections before every epoch but the first."""
        if epoch > 0:
            self.rewire()

    @torch.no_grad()
    def rewire(self) -> None:
        """Drop the least important connections, and grow as many between the most important neurons."""
        neurons = self.neuron_importance()
        for name, weight in self.weights.items():
            connections, importance = self.connections[name], self.importance[name]
            source, target = self.layers[name]
            of_source = neurons[source] if source in neurons else importance.flatten(1).sum(dim=0)
            promise = (neurons[target][:, None] * of_source).reshape(connections.shape)
            places = self._places(name) & ~connections
            number = min(round(self.dropped * int(connections.sum())), int(places.sum()))
            drop = importance.masked_fill(~connections, torch.inf).flatten().topk(number, largest=False).indices
            grow = promise.masked_fill(~places, -1.0).flatten().topk(number).indices
            connections.view(-1)[drop] = False
            connections.view(-1)[grow] = True
            importance.mul_(connections)
            importance.view(-1)[grow] = 0.0
            self.off[name].copy_((self.owners[name] == 0) & ~connections)
            weight.masked_fill_(self.off[name], 0.0)

    def before_step(self) -> None:
        """Keep weights and gradients; new connections start without momentum, since others have no gradient."""
        for name, weight in self.weights.items():
            if weight.grad is not None:
                weight.grad.mul_(self.connections[name])
                self._before[name] = weight.detach().clone(), weight.grad.clone()

    @torch.no_grad()
    def after_step(self) -> None:
        """Add the size of change times gradient to the importance of the connections."""
        for name, (before, gradient) in self._before.items():
            self.importance[name].add_(per_connection(((self.weights[name] - before) * gradient).abs()))
        self._before.clear()

    def neuron_importance(self) -> dict[str, Tensor]:
        """Return the importance of the neurons of each group: the sum over their incoming connections."""
        found = {group: torch.zeros(len(neurons), device=neurons.device) for group, neurons in self.chosen.items()}
        for name, importance in self.importance.items():
            target = self.layers[name][1]
            found[target] = found[target] + importance.flatten(1).sum(dim=1)
        return found

    def _neurons(self, name: str) -> tuple[Tensor, Tensor]:
        """Return which channels the task may use as inputs and as outputs of a layer; images have all."""
        owner = self.owners[name]
        every = torch.ones(owner.shape[1], dtype=torch.bool, device=owner.device)
        source, target = self.layers[name]
        return self.chosen.get(source, every), self.chosen[target]

    def _places(self, name: str) -> Tensor:
        """Return the free places between the neurons of the task."""
        source, target = self._neurons(name)
        owner = self.owners[name]
        return (target[:, None] & source).reshape(owner.shape) & (owner == 0)
