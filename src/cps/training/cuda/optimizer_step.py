"""The optimizer step on a flat vector of parameters, which ends by restoring the guarded entries."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from cps.network.freezing import FlatRestorer, Guard
from cps.training.cuda.flat_parameters import FlatParameters
from cps.training.settings import MakeOptimizer


class OptimizerStep:
    """Moves flat parameters by their gradients, at a learning rate that may change in each step.

    `views` maps a vector with the layout of the parameters to the guarded weights in it. `scored` names the weights
    that may have mask scores.
    """

    def __init__(
        self,
        flat: FlatParameters,
        make_optimizer: MakeOptimizer,
        views: Callable[[Tensor], Mapping[str, Tensor]],
        scored: Collection[str],
    ):
        self.flat, self.optimizer = flat, make_optimizer([flat.vector])
        (self._group,) = self.optimizer.param_groups
        self.settings = {key: value for key, value in self._group.items() if key != "params"}
        self.rate, self.factor, self.full_score_step = float(self._group["lr"]), 1.0, 0.0
        self.restore = FlatRestorer(flat.vector, views, scored)
        self.score_step = torch.zeros((), dtype=torch.float32, device=flat.vector.device)
        self._kernel_step: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Take a step."""
        if self._kernel_step is not None:
            self.restore.update_scores(self.score_step)
            self._kernel_step()
        else:
            self.optimizer.step()
            self.restore(self.score_step)

    @property
    def has_custom_kernel(self) -> bool:
        """True if one custom kernel takes the step and restores the guarded entries."""
        return self._kernel_step is not None

    def make_capturable(self, *, is_fused: bool) -> None:
        """Let the optimizer read its learning rate from GPU memory, and use few kernels."""
        self._group["lr"] = torch.tensor(self.rate, dtype=torch.float32, device=self.score_step.device)
        self._group |= {"fused": is_fused, "foreach": not is_fused}
        self._group |= {"capturable": True} if "capturable" in self._group else {}

    def use_custom_kernel(self) -> None:
        """Replace the optimizer's step by one custom kernel, if there is one for this optimizer.

        The optimizer must have taken a step. The kernel is tried, and `RuntimeError` is raised if it does not do what
        the optimizer does. The present values do not matter, since `begin` sets new ones.
        """
        from cps.training.cuda.optimizer_kernels import make_kernel_step  # Triton comes only with GPU builds of torch

        kernel_step = make_kernel_step(self.optimizer, self.flat.vector, self.restore.free, self.restore.value)
        if kernel_step is None:
            return
        state = self.optimizer.state[self.flat.vector].values()
        tensors = [self.flat.vector.detach(), *(value for value in state if isinstance(value, Tensor))]
        before = [value.clone() for value in tensors]
        self()
        expected = [value.clone() for value in tensors]
        for value, old in zip(tensors, before, strict=True):
            value.copy_(old)
        self._kernel_step = kernel_step
        self()
        if not all(torch.allclose(*pair, rtol=1e-3, atol=1e-6) for pair in zip(tensors, expected, strict=True)):
            raise RuntimeError("custom kernels do not agree with PyTorch's (in the optimizer step)")

    def begin(self, guard: Guard, shapes: Mapping[str, torch.Size], saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Start with a guard, and with a new optimizer state or the saved state of each parameter."""
        self.restore.set_guard(guard, shapes)
        state = self.optimizer.state[self.flat.vector]
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
        if saved:
            self.flat.load_state(state, saved)

    def state_by_name(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of each parameter."""
        return self.flat.state_by_name(self.optimizer.state[self.flat.vector])

    def start_epoch(self, score_step: float) -> None:
        """Set the step size of the mask scores at the full learning rate."""
        self.full_score_step, self.factor = score_step, math.nan  # NaN, so that the next factor counts as changed

    def set_rate(self, factor: float) -> None:
        """Multiply the full learning rate, and the full step size of the mask scores, by a factor."""
        if factor == self.factor:
            return
        self.factor = factor
        self.score_step.fill_(self.full_score_step * factor)
        if isinstance(self._group["lr"], Tensor):
            self._group["lr"].fill_(self.rate * factor)
        else:
            self._group["lr"] = self.rate * factor
