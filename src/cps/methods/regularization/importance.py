"""How much the outputs for single images depend on each parameter of the backbone.

Gradients are those of single images: the square of a mean over images is not the mean of squares. All parameters are
one vector, in the order of `named_parameters`, without those that are not trained.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from cps.data.examples import Examples
from cps.network.classifier import Classifier
from cps.network.partition import trainable

MAX_VALUES = 2**25  # in the gradients of images that are taken together

OfLogits = Callable[[Tensor, Tensor], Tensor]  # the logits (classes,) of an image and its label -> a number


def flat_parameters(backbone: nn.Module) -> Tensor:
    """Return all parameters that are trained, as one vector with their graph."""
    return torch.cat([parameter.flatten() for parameter in trainable(backbone).values()])


@torch.no_grad()
def sample_gradients(model: Classifier, pixels: Tensor, labels: Tensor, function: OfLogits) -> Tensor:
    """Return the gradient (N, parameters) of a function of the logits for each image.

    The model must be in evaluation mode, since batch norm would mix the images otherwise.
    """
    values = {f"backbone.{name}": parameter.detach() for name, parameter in trainable(model.backbone).items()}

    def of_image(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return function(functional_call(model, values, (image[None],))[0], label)

    gradients = vmap(grad(of_image), in_dims=(None, 0, 0))(values, pixels, labels)
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def exact_fisher(
    model: Classifier, batches: Iterable[Tensor], first: int = 0, rotate: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the diagonal of the Fisher information: the mean over images of E_y (d log p(y|x) / d theta)^2.

    The expectation is exact, over the softmax of the logits from the class `first` on. `rotate` turns gradients (N,
    parameters) into other coordinates.
    """

    def of_batch(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            probabilities = model(pixels)[:, first:].softmax(dim=1)  # (N, classes)
        total = torch.zeros(())
        for label in range(first, first + probabilities.shape[1]):
            labels = torch.full((len(pixels),), label, device=pixels.device)
            squares = _squared_gradients(model, pixels, labels, first, rotate)
            total = total.to(squares) + probabilities[:, label - first] @ squares
        return total

    return _mean_over_images(of_batch, batches)


def empirical_fisher(model: Classifier, pixels: Tensor, labels: Tensor, first: int = 0) -> Tensor:
    """Return the mean over images of (d log p(y|x) / d theta)^2 for their labels y, which are `first` or more."""
    return _squared_gradients(model, pixels, labels, first).mean(dim=0)


def output_sensitivity(model: Classifier, batches: Iterable[Tensor]) -> Tensor:
    """Return the mean over images of |d |F(x)|^2 / d theta|, where F(x) are the logits. It needs no labels."""

    def squared_norm(logits: Tensor, label: Tensor) -> Tensor:
        return logits.square().sum()

    def of_batch(pixels: Tensor) -> Tensor:
        labels = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device)
        return sample_gradients(model, pixels, labels, squared_norm).abs().sum(dim=0)

    return _mean_over_images(of_batch, batches)


def image_batches(
    model: Classifier, examples: Examples, images: int, prepare: Callable[[Tensor], Tensor], draws: torch.Generator
) -> Iterator[Tensor]:
    """Yield the pixels of at most `images` random images, in batches whose gradients fit in bounded memory."""
    device = model.head.weight.device
    size = max(1, MAX_VALUES // max(1, flat_parameters(model.backbone).numel()))
    chosen = torch.randperm(len(examples), generator=draws)[:images]
    for batch, _ in examples.batches(chosen.split(size)):
        yield prepare(batch.to(device))


def _squared_gradients(
    model: Classifier,
    pixels: Tensor,
    labels: Tensor,
    first: int,
    rotate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return (d log p(y|x) / d theta)^2 for each image x and its label y, shape (N, parameters)."""

    def log_probability(logits: Tensor, label: Tensor) -> Tensor:
        return logits[first:].log_softmax(dim=0).gather(0, label[None] - first)[0]

    gradients = sample_gradients(model, pixels, labels, log_probability)
    return (gradients if rotate is None else rotate(gradients)).square()


def _mean_over_images(of_batch: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> Tensor:
    """Return the sum over batches, divided by the number of images."""
    total, images = torch.zeros(()), 0
    for pixels in batches:
        part = of_batch(pixels)
        total, images = total.to(part) + part, images + len(pixels)
    return total / images
