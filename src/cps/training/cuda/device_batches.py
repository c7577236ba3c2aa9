"""Batches on the device: the images of a task, their order in an epoch, and the batch that is ready for the next step.

Reading a batch needs no data from the CPU, so that a captured step can prepare the next batch while it trains on the
present one.
"""

import torch
from torch import Tensor

from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples


class DeviceBatches:
    """Examples at fixed memory addresses, which captured graphs refer to. Others of the same shape can replace them."""

    def __init__(self, examples: TensorExamples, transform: BatchTransform):
        device = examples.images.device
        self._images, self._targets = torch.empty_like(examples.images), torch.empty_like(examples.targets)
        self._order = torch.zeros(len(examples), dtype=torch.long, device=device)
        self._uniform = torch.zeros(len(examples), transform.draws, dtype=torch.float32, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)  # in the order
        self._range = torch.arange(len(examples), device=device)
        self._transform = transform
        self._prepared: dict[int, tuple[Tensor, Tensor]] = {}  # pixels and labels by batch size

    def fits(self, examples: TensorExamples) -> bool:
        """Return True if these examples can replace the present ones."""
        is_same_kind = self._images.shape == examples.images.shape and self._images.dtype == examples.images.dtype
        return is_same_kind and self._images.device == examples.images.device

    def load(self, examples: TensorExamples) -> None:
        """Replace the examples."""
        self._images.copy_(examples.images)
        self._targets.copy_(examples.targets)

    def start_epoch(self, order: Tensor, uniform: Tensor) -> None:
        """Start an epoch with the indices of its examples and the random numbers of all examples."""
        self._order[: len(order)].copy_(order)
        self._uniform.copy_(uniform)
        self._position.zero_()

    def read(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the pixels and labels of the next `size` examples."""
        indices = self._order[self._position + self._range[:size]]
        self._position += size
        return self._transform(self._images[indices], self._targets[indices], self._uniform[indices])

    def store(self, size: int, batch: tuple[Tensor, Tensor]) -> None:
        """Copy the pixels and labels of `size` examples to a fixed address, for the next step."""
        if size not in self._prepared:
            self._prepared[size] = torch.empty_like(batch[0]), torch.empty_like(batch[1])
        for target, value in zip(self._prepared[size], batch, strict=True):
            target.copy_(value)

    def stored(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the stored pixels and labels of `size` examples."""
        return self._prepared[size]

    def clear(self) -> None:
        """Overwrite all images and labels with zeros."""
        self._images.zero_()
        self._targets.zero_()
        for pixels, labels in self._prepared.values():
            pixels.zero_()
            labels.zero_()
