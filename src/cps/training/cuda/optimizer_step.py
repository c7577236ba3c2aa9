"""The update: an optimizer moves a vector of parameters, and a guard puts back what is kept."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from cps.network.freezing import FlatRestorer, Guard
from cps.training.cuda.flat_parameters import FlatParameters
from cps.training.settings import MakeOptimizer


class Update:
    """What happens to flat parameters once their gradients are known, at a rate that each step may change.

    `views` are the guarded weights in a vector like theirs, `choosing` the names of those that may have scores.
    """

    def __init__(
        self,
        flat: FlatParameters,
        optimizer: MakeOptimizer,
        views: Callable[[Tensor], Mapping[str, Tensor]],
        choosing: Collection[str],
    ):
        self.flat, self.optimizer = flat, optimizer([flat.vector])
        (self._group,) = self.optimizer.param_groups
        self.settings = {key: value for key, value in self._group.items() if key != "params"}
        self.rate, self.factor, self.full_pace = float(self._group["lr"]), 1.0, 0.0
        self.restore = FlatRestorer(flat.vector, views, choosing)
        self.pace = torch.zeros((), dtype=torch.float32, device=flat.vector.device)  # of scores
        self._in_one: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Take a step."""
        if self._in_one is not None:
            self.restore.move(self.pace)
            self._in_one()
        else:
            self.optimizer.step()
            self.restore(self.pace)

    def make_capturable(self, *, is_fused: bool) -> None:
        """Let the optimizer work in few kernels on a GPU, with a rate that it reads there."""
        self._group["lr"] = torch.tensor(self.rate, dtype=torch.float32, device=self.pace.device)
        self._group |= {"fused": is_fused, "foreach": not is_fused}
        self._group |= {"capturable": True} if "capturable" in self._group else {}

    def work_in_one(self) -> None:
        """Do it all in one kernel from now on, if the optimizer, which has done a step, is one of those known.

        It is tried first, and must do what the optimizer does. What is there now does not matter: `begin` follows.
        """
        from cps.training.cuda.optimizer_kernels import own_update  # Triton is there only where GPUs are

        own = own_update(self.optimizer, self.flat.vector, self.restore.free, self.restore.value)
        if own is None:
            return
        state = self.optimizer.state[self.flat.vector].values()
        moved = [self.flat.vector.detach(), *(value for value in state if isinstance(value, Tensor))]
        before = [value.clone() for value in moved]
        self()
        expected = [value.clone() for value in moved]
        for value, old in zip(moved, before, strict=True):
            value.copy_(old)
        self._in_one = own
        self()
        if not all(torch.allclose(*pair, rtol=1e-3, atol=1e-6) for pair in zip(moved, expected, strict=True)):
            raise RuntimeError("our own kernels do not agree with PyTorch's (in the update)")

    def begin(self, guard: Guard, shapes: Mapping[str, torch.Size], saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what a guard says, and start with a fresh optimizer, or the state of each parameter that is saved."""
        self.restore.keep(guard, shapes)
        state = self.optimizer.state[self.flat.vector]
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
        if saved:
            self.flat.set_state(state, saved)

    def state_of_each(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of each parameter."""
        return self.flat.state_of_each(self.optimizer.state[self.flat.vector])

    def start(self, pace: float) -> None:
        """Start an epoch, in which scores move at this pace at the full rate."""
        self.full_pace, self.factor = pace, math.nan  # whatever the next factor is, it is another

    def set_rate(self, factor: float) -> None:
        """Go on at a factor of the full rate, and of the full pace of scores."""
        if factor == self.factor:
            return
        self.factor = factor
        self.pace.fill_(self.full_pace * factor)
        if isinstance(self._group["lr"], Tensor):
            self._group["lr"].fill_(self.rate * factor)
        else:
            self._group["lr"] = self.rate * factor
