"""Bias correction: two numbers for each task that scale and shift its logits."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class BiasCorrection(nn.Module):
    """alpha_t z + beta_t for the logits z of each task t; at first alpha is 1 and beta is 0.

    `sizes` are the numbers of classes of the tasks.
    """

    tasks: Tensor

    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(len(sizes)))
        self.beta = nn.Parameter(torch.zeros(len(sizes)))
        tasks = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        self.register_buffer("tasks", tasks, persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Return corrected logits (N, classes) of the first tasks, as many as `logits` has."""
        tasks = self.tasks[: logits.shape[1]]
        return logits * self.alpha[tasks] + self.beta[tasks]
