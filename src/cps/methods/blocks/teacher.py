"""A teacher: a frozen copy of the model after the last task."""

import copy
from typing import Any

import torch
from torch import nn


class Teacher(nn.Module):
    """A copy of a model that is never trained: no gradients, and always in evaluation mode."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "Teacher":
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
