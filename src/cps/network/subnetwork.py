"""A sealed subnetwork, and the only map between its head's outputs and the classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cps.data.examples import ClassName
from cps.data.rotations import View, class_logits, mean_of, views_of
from cps.network.masks import Masks, masked
from cps.network.outputs import Outputs
from cps.storage.container import digest


class Fingerprint(NamedTuple):
    """Digests of a sealed subnetwork: of its tensors (everywhere the same) and of its outputs on fixed
    inputs (the same on the same hardware and software)."""  # noqa: D205, D209

    tensors: str
    outputs: str


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """What belongs to one task: masks over the shared weights, private parts, head and classes.

    `statistics` holds, by the name of a selector, the numbers that selector keeps about the task. `notes` are plain
    data about how it was learned, such as the day and the accuracy; they are yours to fill. `mirrors` says whether it
    looks at mirror images too. `digest` is that of all its tensors when it was sealed.
    """

    classes: tuple[ClassName, ...]
    masks: Masks = field(repr=False)
    private: dict[str, Tensor] = field(repr=False)
    head: dict[str, Tensor] = field(repr=False)
    statistics: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    notes: dict[str, Any] = field(default_factory=dict)
    flips: bool = False
    digest: str = ""

    @property
    def num_rotations(self) -> int:
        """How many turns of an image each class was learned in."""
        return len(self.head["bias"]) // len(self.classes)

    @property
    def views(self) -> list[View]:
        """All looks it takes at an image."""
        return views_of(self.num_rotations, self.flips)

    def look(self, pixels: Tensor, network: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the features (looks, N, d) that a network sees in pixels, at all looks in one pass."""
        turned = [view(pixels) for view in self.views]
        seen = network(turned[0] if len(turned) == 1 else torch.cat(turned))
        return seen.float().unflatten(0, (len(turned), len(pixels)))

    def say(self, seen: Tensor) -> Outputs:
        """Return features and logits, averaged over all looks, from features (looks, N, d)."""
        return Outputs(mean_of(seen), class_logits(seen, self.views, **self.head))

    def tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that turn a backbone into this task's: shared weights where masked on, private parts."""
        shared = {name: masked(weight, self.masks[name]) for name, weight in weights.items()}
        # Copies, since a module may change its buffers even in eval mode.
        return {**shared, **{name: value.clone() for name, value in self.private.items()}}

    def digest_in(self, weights: Mapping[str, Tensor]) -> str:
        """Return the digest of everything that belongs to it, its part of the shared weights included."""
        masks = {f"mask {name}": mask for name, mask in self.masks.items()}
        head = {f"head {name}": value for name, value in self.head.items()}
        flips = " and mirror images" if self.flips else ""
        return digest({**self.tensors(weights), **masks, **head}, repr(self.classes) + flips)

    def check_sealed(self, weights: Mapping[str, Tensor]) -> None:
        """Refuse to go on if anything of it is not as it was sealed."""
        if self.digest_in(weights) != self.digest:
            raise RuntimeError(f"the task of {shortened(self.classes)} is not the subnetwork that was sealed")

    def local(self, labels: Sequence[ClassName]) -> Tensor:
        """Return the head's output index of each label."""
        return local_labels(self.classes, labels)

    def names(self, outputs: Tensor) -> list[ClassName]:
        """Return the class of each index of the head's outputs."""
        return [self.classes[index] for index in outputs.tolist()]


def local_labels(classes: Sequence[ClassName], labels: Sequence[ClassName]) -> Tensor:
    """Return the position in `classes` of each label.

    Positions are accepted for classes named by strings, unless another class is called by that number.
    """
    place = {name: index for index, name in enumerate(classes)}
    if not any(isinstance(name, int) for name in classes):
        place |= {index: index for index, name in enumerate(classes) if place.get(str(index), index) == index}
    try:
        return torch.tensor([place[label] for label in labels], dtype=torch.long)
    except (KeyError, TypeError) as error:
        why = "; classes are called by numbers here, so a label is a name" if str(error) in place else ""
        raise ValueError(f"label {error} is not one of the task's classes {shortened(classes)}{why}") from None


def shortened(classes: Sequence[ClassName]) -> str:
    """Return the names of classes as they print, of many the first."""
    names = ", ".join(repr(name) for name in classes[:6])
    return f"({names}{', ...' if len(classes) > 6 else ''})"
