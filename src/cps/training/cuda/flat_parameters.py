"""Flat parameters: all trained parameters in one vector, so that an optimizer step is one kernel instead of hundreds.

Each parameter becomes a view of the vector, at an aligned address. An optimizer that treats every number alike (SGD,
Adam, AdamW) does the same to the vector as to each parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 8  # numbers; 16 bytes in bf16


class FlatParameters:
    """Parameters of one dtype in one vector.

    `vector` has the values, and `vector.grad` the gradients after `gather_gradients`. `direct` has the names of the
    parameters whose layers write their gradients into `vector.grad` themselves.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = dict(parameters)
        self.direct: set[str] = set()
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
        """Return a view for each parameter of a vector with the same layout."""
        views, start = {}, 0
        for (name, parameter), gap in zip(self.parameters.items(), self._gaps, strict=True):
            part = vector[start : start + parameter.numel()]
            views[name] = _view_like(part, parameter)
            start += parameter.numel() + gap
        return views

    def gradients(self) -> dict[str, Tensor]:
        """Return views of the gathered gradients."""
        assert self.vector.grad is not None
        return self.views(self.vector.grad)

    def clear_gradients(self) -> None:
        """Remove the gradients of the parameters, but not that of the vector."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def gather_gradients(self) -> None:
        """Move the gradients of the parameters into that of the vector; those in `direct` may be there already."""
        targets, gradients = [], []
        for name, target in self.gradients().items():
            gradient = self.parameters[name].grad
            if gradient is not None:
                targets.append(target)
                gradients.append(gradient)
            else:
                assert name in self.direct, f"no gradient reached {name}"
        torch._foreach_copy_(targets, gradients)  # pyright: ignore[reportPrivateImportUsage]
        self.clear_gradients()

    def state_by_name(self, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return an optimizer's state of the vector as the state of each parameter."""
        by_name: dict[str, dict[str, Any]] = {name: {} for name in self.parameters}
        for key, value in state.items():
            is_vector = isinstance(value, Tensor) and value.shape == self.vector.shape
            views = self.views(value) if is_vector else {}
            for name, entries in by_name.items():
                entries[key] = views.get(name, value)
        return by_name

    @torch.no_grad()
    def load_state(self, state: dict[str, Any], by_name: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy the state of each parameter into the state of the vector, in place."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.vector.shape:
                for name, view in self.views(value).items():
                    if key in by_name[name]:
                        view.copy_(by_name[name][key])
            elif isinstance(value, Tensor):
                value.copy_(torch.as_tensor(next(iter(by_name.values())).get(key, 0)))


def _view_like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a slice of a vector with the shape and memory format of a parameter."""
    if _is_channels_last(parameter):
        outputs, channels, height, width = parameter.shape
        return part.view(outputs, height, width, channels).permute(0, 3, 1, 2)
    return part.view(parameter.shape)


def _is_channels_last(value: Tensor) -> bool:
    return value.ndim == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
