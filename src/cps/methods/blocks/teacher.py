"""A teacher: a frozen copy of the model after the last task."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Frozen(nn.Module):
    """A model that is not trained: it gets no gradients, and stays in evaluation mode."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "Frozen":
        """Stay in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, *args: Any, **options: Any) -> Any:
        """Return the outputs of the model."""
        return self.model(*args, **options)

    @property
    def nbytes(self) -> int:
        """The bytes of its parameters and buffers."""
        return sum(value.nbytes for value in (*self.parameters(), *self.buffers()))


class Teacher(Frozen):
    """A frozen copy of a model."""

    def __init__(self, model: nn.Module):
        super().__init__(copy.deepcopy(model))


@contextmanager
def frozen(model: nn.Module) -> Iterator[Frozen]:
    """Freeze a model, not a copy of it, while a phase trains something else."""
    are_trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield Frozen(model)
    finally:
        for parameter, is_trained in are_trained.items():
            parameter.requires_grad_(is_trained)
