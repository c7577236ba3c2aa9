"""A sealed subnetwork, and the map between its head's outputs and the classes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.closed_form.spaces import root_normalize
from cps.data.examples import ClassName
from cps.data.rotations import View, average_views, class_logits, make_views
from cps.network.masks import Masks, masked
from cps.network.outputs import Outputs
from cps.runtime.text import shorten_names
from cps.storage.container import digest

Statistics = dict[str, Tensor]


class Fingerprint(NamedTuple):
    """Digests of a sealed subnetwork.

    `tensors` is the same everywhere; `outputs`, on fixed inputs, is the same on the same hardware and software.
    """

    tensors: str
    outputs: str


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """What belongs to one task: masks over the shared weights, private parameters, head and classes.

    `statistics` holds, by selector name, what that selector keeps about the task. `notes` is JSON data about how it
    was learned, such as the date and the accuracy (see `Learner.annotate`). `flips` tells whether predictions average
    over mirror images too. `digest` is the digest of all its tensors when it was sealed. `is_frozen` tells that it is
    the backbone as it came: it uses no shared weight, so its masks are all off, and only its head is its own.

    A subnetwork behind a trunk has a `pretrained_head`, too: the weights of the features of the backbone as it came,
    whose scores are added to those of the head. Its own features are then scaled like them, by `root_normalize`.
    """

    classes: tuple[ClassName, ...]
    masks: Masks = field(repr=False)
    private: dict[str, Tensor] = field(repr=False)
    head: dict[str, Tensor] = field(repr=False)
    statistics: dict[str, Statistics] = field(default_factory=dict, repr=False)
    notes: Mapping[str, Any] = field(default_factory=dict)
    flips: bool = False
    digest: str = ""
    is_frozen: bool = False
    pretrained_head: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_rotations(self) -> int:
        """The number of rotations that each class was learned in."""
        return len(self.head["bias"]) // len(self.classes)

    @property
    def uses_pretrained(self) -> bool:
        """Whether its scores depend on the features of the backbone as it came."""
        return self.is_frozen or bool(self.pretrained_head)

    @cached_property
    def views(self) -> tuple[View, ...]:
        """The views of an image that predictions average over."""
        return tuple(make_views(self.num_rotations, self.flips))

    def view_features(self, pixels: Tensor, network: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the network's features (views, N, d) for every view of the pixels, computed in one pass."""
        views = [view(pixels) for view in self.views]
        features = network(views[0] if len(views) == 1 else torch.cat(views))
        return features.float().unflatten(0, (len(views), len(pixels)))

    def outputs(self, features: Tensor, head: Mapping[str, Tensor] | None = None) -> Outputs:
        """Return features and logits, averaged over all views, from features (views, N, d).

        The logits lack those of the pretrained head, which `with_pretrained` adds. `head` replaces the own one.
        """
        features = root_normalize(features) if self.pretrained_head else features
        return Outputs(average_views(features), class_logits(features, self.views, **(head or self.head)))

    def with_pretrained(self, outputs: Outputs, features: Callable[[], Tensor]) -> Outputs:
        """Return outputs whose logits include those of the pretrained head, if there is one.

        `features` returns the features of the backbone as it came.
        """
        if not self.pretrained_head:
            return outputs
        return Outputs(outputs.features, outputs.logits + F.linear(features(), self.pretrained_head["weight"]))

    def tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that turn a backbone into this subnetwork: masked shared weights and private parts.

        A frozen subnetwork has no such tensors: it is the backbone as it came.
        """
        assert not self.is_frozen
        shared = {name: masked(weight, self.masks[name]) for name, weight in weights.items()}
        # Copies, since a module may change its buffers even in eval mode.
        return {**shared, **{name: value.clone() for name, value in self.private.items()}}

    def digest_in(self, weights: Mapping[str, Tensor], pretrained: Mapping[str, Tensor]) -> str:
        """Return the digest of everything that belongs to it, including its part of the shared weights.

        `pretrained` is the `stand_in` for the backbone as it came, which counts only if it is used.
        """
        masks = {f"mask {name}": mask for name, mask in self.masks.items()}
        head = {f"head {name}": value for name, value in self.head.items()}
        head |= {f"pretrained head {name}": value for name, value in self.pretrained_head.items()}
        flips = " and mirror images" if self.flips else ""  # this text is part of the digests in model files
        own = {} if self.is_frozen else {**self.tensors(weights), **masks}
        tensors = {**pretrained, **own} if self.uses_pretrained else own
        return digest({**tensors, **head}, repr(self.classes) + flips)

    def local(self, labels: Sequence[ClassName]) -> Tensor:
        """Return the head's output index of each label."""
        return local_labels(self.classes, labels)

    def names(self, outputs: Tensor) -> list[ClassName]:
        """Return the class of each output index of the head."""
        return [self.classes[index] for index in outputs.tolist()]


def check_sealed(
    subnetworks: Iterable[Subnetwork], weights: Mapping[str, Tensor], pretrained: Mapping[str, Tensor]
) -> None:
    """Raise `RuntimeError` if anything of a subnetwork has changed since it was sealed.

    `weights` are the shared weights, `pretrained` all tensors of the backbone as it came, with the trunk.
    """
    came = stand_in(pretrained)
    for subnetwork in subnetworks:
        if subnetwork.digest_in(weights, came) != subnetwork.digest:
            raise RuntimeError(f"the subnetwork of {shorten_names(subnetwork.classes)} has changed since it was sealed")


def stand_in(pretrained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the digest of a backbone as a tensor, so that the subnetworks that use it need not each hash all of it."""
    return {"backbone": torch.frombuffer(bytearray.fromhex(digest(pretrained)), dtype=torch.uint8)}


def local_labels(classes: Sequence[ClassName], labels: Sequence[ClassName]) -> Tensor:
    """Return the index in `classes` of each label.

    For classes with string names, indices are accepted as labels too, unless a class has that number as its name.
    """
    index_of = {name: index for index, name in enumerate(classes)}
    if not any(isinstance(name, int) for name in classes):
        index_of |= {index: index for index, name in enumerate(classes) if index_of.get(str(index), index) == index}
    try:
        return torch.tensor([index_of[label] for label in labels], dtype=torch.long)
    except (KeyError, TypeError) as error:
        why = "; the classes have numbers as names, so a label must be a name" if str(error) in index_of else ""
        raise ValueError(f"label {error} is not one of the task's classes {shorten_names(classes)}{why}") from None
