"""Coordinates of layers in which the Fisher information is closer to a diagonal.

For a layer y = W x, with x over images and pixels, and g the gradient at y, the eigenvectors U1 of E[x x^T] and U2 of
E[g g^T] give coordinates x' = U1^T x and g' = U2^T g without correlations. There the weight is W' = U2^T W U1, since
y = U2 W' x'. Kernels of convolutions have such a weight at each position.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cps.network.classifier import Classifier
from cps.network.partition import trainable


class Basis(NamedTuple):
    """Eigenvectors, as columns, of the second moments at the inputs (in, in) and the outputs (out, out) of a layer."""

    inputs: Tensor
    outputs: Tensor


def rotated(vectors: Tensor, backbone: nn.Module, bases: Mapping[str, Basis]) -> Tensor:
    """Return vectors (..., parameters), as those of `flat_parameters`, in the coordinates of bases by name of weight.

    Parameters without a basis stay.
    """
    parameters = trainable(backbone)
    parts = vectors.split([parameter.numel() for parameter in parameters.values()], dim=-1)
    turned = []
    for part, (name, parameter) in zip(parts, parameters.items(), strict=True):
        if name in bases:
            weight = part.reshape(-1, *parameter.shape[:2], parameter[0, 0].numel())  # (N, out, in, positions)
            weight = torch.einsum("noik,op,iq->npqk", weight, bases[name].outputs, bases[name].inputs)
            part = weight.reshape(part.shape)
        turned.append(part)
    return torch.cat(turned, dim=-1)


def layer_bases(model: Classifier, batches: Iterable[Tensor], first: int = 0) -> dict[str, Basis]:
    """Return the bases of all layers that are trained, by the name of their weight.

    Gradients are those of log p(y|x) in expectation over the softmax of the logits from the class `first` on. The model
    must be in evaluation mode.
    """
    trained = trainable(model.backbone)
    layers = {f"{name}.weight".lstrip("."): module for name, module in model.backbone.named_modules() if _mixes(module)}
    layers = {name: module for name, module in layers.items() if name in trained}
    moments = {name: _Moments() for name in layers}
    with ExitStack() as stack, torch.enable_grad():
        for name, module in layers.items():
            stack.enter_context(module.register_forward_hook(moments[name].record))
        for pixels in batches:
            log_probabilities = model(pixels)[:, first:].log_softmax(dim=1)
            outputs = [each.output for each in moments.values()]
            for column in log_probabilities.unbind(dim=1):
                gradients = torch.autograd.grad(column.sum(), outputs, retain_graph=True)
                weights = column.detach().exp()
                for each, gradient in zip(moments.values(), gradients, strict=True):
                    each.add_gradients(gradient, weights)
    return {name: each.basis() for name, each in moments.items()}


class _Moments:
    """The second moments at the inputs and the outputs of a layer, and its last output."""

    def __init__(self) -> None:
        self.both: list[Tensor] = [torch.zeros(()), torch.zeros(())]
        self.output = torch.zeros(())

    def record(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Add the inputs of a layer; return a copy of its output, which a later layer may overwrite."""
        self._add(0, _vectors(inputs[0].detach()), None)
        self.output = output
        return output.clone()

    def add_gradients(self, gradients: Tensor, weights: Tensor) -> None:
        """Add gradients at the outputs, with a weight (N,) for each image."""
        vectors = _vectors(gradients)
        self._add(1, vectors, weights.repeat_interleave(len(vectors) // len(weights)))

    def basis(self) -> Basis:
        """Return the eigenvectors of both moments."""
        # Contiguous, as they are in files: another layout would give other bits.
        inputs, outputs = (torch.linalg.eigh(moment).eigenvectors.contiguous() for moment in self.both)
        return Basis(inputs, outputs)

    def _add(self, side: int, vectors: Tensor, weights: Tensor | None) -> None:
        moment = vectors.T @ (vectors if weights is None else weights[:, None] * vectors)
        self.both[side] = self.both[side].to(moment) + moment


def _mixes(module: nn.Module) -> bool:
    """Return True for a layer whose every output depends on every input channel."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _vectors(values: Tensor) -> Tensor:
    """Return the channels of all images and pixels, in the order of images, as rows."""
    return values.flatten(2).transpose(1, 2).flatten(0, 1) if values.ndim > 2 else values
