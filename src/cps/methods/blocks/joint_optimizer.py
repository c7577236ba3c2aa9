"""Several optimizers, each with other parameters, that take their steps together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class JointOptimizer(torch.optim.Optimizer):
    """Optimizers as one: their parameter groups in order, and one state for all of them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = list(optimizers)
        self._sizes = [len(each.param_groups) for each in optimizers]
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self._share_state()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of each optimizer."""
        loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share_state()

    def _share_state(self) -> None:
        """Give each optimizer the common state, and its part of the parameter groups."""
        first = 0
        for each, size in zip(self.optimizers, self._sizes, strict=True):
            each.state, each.param_groups = self.state, self.param_groups[first : first + size]
            first += size
