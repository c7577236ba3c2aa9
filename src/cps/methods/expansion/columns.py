"""Columns: backbones side by side, of which only the last is trained."""

import copy

import torch
from torch import Tensor, nn


class Columns(nn.Module):
    """Backbones whose features are joined: images -> (N, columns x d). All but the last are frozen.

    Frozen columns get no gradients and stay in evaluation mode, so the statistics of their norm layers stay, too.
    """

    def __init__(self, first: nn.Module):
        super().__init__()
        self.columns = nn.ModuleList([first])

    @property
    def last(self) -> nn.Module:
        """The column that is trained."""
        return self.columns[-1]

    def add(self) -> None:
        """Freeze the last column, and add a copy of it to be trained."""
        added = copy.deepcopy(self.last)
        self.last.requires_grad_(False)
        self.columns.append(added)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Columns":
        """Set the mode of the last column."""
        super().train(mode)
        for column in self.columns[:-1]:
            column.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of all columns, in their order."""
        with torch.no_grad():
            frozen = [column(images) for column in self.columns[:-1]]
        return torch.cat([*frozen, self.last(images)], dim=1)
