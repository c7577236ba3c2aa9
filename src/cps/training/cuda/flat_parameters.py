"""Flat parameters: all that an optimizer moves as one vector, so that it takes one kernel and not hundreds.

Each parameter becomes a view of the vector, at a place that GPUs can read fast from. Optimizers that treat every number
alike (SGD, Adam, AdamW) do with the vector what they would do with each parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 8  # numbers; 16 bytes in bf16


class FlatParameters:
    """Parameters of one type that lie in one vector.

    `vector` has them, `vector.grad` their gradients once `gather` has taken them. `written` are the names of those
    whose layers write their gradients there themselves.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = dict(parameters)
        self.written: set[str] = set()
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        self._gaps = [-size % ALIGNMENT for size in sizes]
        first = next(iter(self.parameters.values()))
        self.vector = nn.Parameter(first.detach().new_zeros(sum(sizes) + sum(self._gaps)))
        self.vector.grad = torch.zeros_like(self.vector)
        with torch.no_grad():
            for name, view in self.views(self.vector.detach()).items():
                view.copy_(self.parameters[name])
                self.parameters[name].data = view

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return, for a vector like this one, what lies at the place of each parameter."""
        views, place = {}, 0
        for (name, parameter), gap in zip(self.parameters.items(), self._gaps, strict=True):
            part = vector[place : place + parameter.numel()]
            views[name] = _shaped(part, parameter)
            place += parameter.numel() + gap
        return views

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each parameter, once gathered, as a view."""
        assert self.vector.grad is not None
        return self.views(self.vector.grad)

    def clear(self) -> None:
        """Forget the gradients of the parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def gather(self) -> None:
        """Move the gradients of the parameters into that of the vector; some layers may have written theirs there."""
        places, found = [], []
        for name, place in self.gradients().items():
            gradient = self.parameters[name].grad
            if gradient is not None:
                places.append(place)
                found.append(gradient)
            else:
                assert name in self.written, f"no gradient reached {name}"
        torch._foreach_copy_(places, found)  # pyright: ignore[reportPrivateImportUsage]
        self.clear()

    def state_of_each(self, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return an optimizer's state of the vector as that of each parameter, by its name."""
        each: dict[str, dict[str, Any]] = {name: {} for name in self.parameters}
        for key, value in state.items():
            whole = isinstance(value, Tensor) and value.shape == self.vector.shape
            views = self.views(value) if whole else {}
            for name, entries in each.items():
                entries[key] = views.get(name, value)
        return each

    @torch.no_grad()
    def set_state(self, state: dict[str, Any], each: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the state of each parameter into that of the vector, in place."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.vector.shape:
                for name, view in self.views(value).items():
                    if key in each[name]:
                        view.copy_(each[name][key])
            elif isinstance(value, Tensor):
                value.copy_(torch.as_tensor(next(iter(each.values())).get(key, 0)))


def _shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a stretch of a vector in the shape of a parameter, its channels last where the parameter's are."""
    if _is_channels_last(parameter):
        outputs, channels, height, width = parameter.shape
        return part.view(outputs, height, width, channels).permute(0, 3, 1, 2)
    return part.view(parameter.shape)


def _is_channels_last(value: Tensor) -> bool:
    return value.ndim == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
