"""Images that are held out of the training of a task, to choose how far it may be pruned."""

from typing import Any

import torch
from torch import Tensor

from cps.data.examples import Examples, choose_examples, read_labels


def hold_out(examples: Examples, share: float, draws: torch.Generator) -> tuple[Examples, Examples]:
    """Return the examples in two parts, the second of which has a share of each class, drawn at random.

    Each class has at least one image in both parts; one with a single image is in both.
    """
    labels = read_labels(examples).cpu()
    first: list[Tensor] = []
    second: list[Tensor] = []
    for label in labels.unique():
        own = (labels == label).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=draws)]
        number = min(max(1, round(share * len(own))), max(1, len(own) - 1))
        second.append(own[:number])
        first.append(own[number:] if len(own) > 1 else own)
    return (choose_examples(examples, torch.cat(first)), choose_examples(examples, torch.cat(second)))


def check_share(settings: Any, *names: str) -> None:
    """Raise `ValueError` for a setting that is not a share between 0 and 1."""
    for name in names:
        if not 0 < getattr(settings, name) < 1:
            raise ValueError(f"{name} must be a share between 0 and 1, got {getattr(settings, name)}")
