"""Calibration images: the sample of training images that pruning measures activations on."""

import math

import torch
from torch import Tensor

from cps.data.examples import Examples
from cps.data.rotations import View
from cps.network.shared import SharedNetwork

GPU_BATCH_PIXELS = 2**20  # pixels per batch that keep a GPU busy


def calibration_batches(
    examples: Examples,
    number: int,
    generator: torch.Generator,
    network: SharedNetwork,
    *,
    batch_size: int,
    num_rotations: int,
) -> list[Tensor]:
    """Return the pixels of `number` random examples in batches, an equal part of each batch in every rotation."""
    chosen = torch.randperm(len(examples), generator=generator)[:number]
    pixels = math.prod((network.input_shape or ())[1:])
    size = max(batch_size, GPU_BATCH_PIXELS // max(1, pixels) if network.device.type == "cuda" else 0)
    batches = (network.pixels(images) for images, _ in examples.batches(chosen.split(size)))
    return [
        torch.cat([View(rotation, False)(part) for rotation, part in enumerate(batch.chunk(num_rotations))])
        for batch in batches
    ]
