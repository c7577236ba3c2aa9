"""Training: one loop for one CPU and for many GPUs, driven by lightning-fabric.

The order of the examples, the augmentation and dropout of an epoch depend only on the seed and the epoch,
so a run that resumes at an epoch's end goes on as if it had never stopped.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cps.augmentation import Augmentation
from cps.data import Examples
from cps.seeds import generator, seeded
from cps.settings import Training

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Seed = tuple[int, ...]


@dataclass(frozen=True)
class Epoch:
    """A finished epoch: how many are done, the mean loss, and the optimizer as it stands."""

    done: int
    loss: float
    optimizer: torch.optim.Optimizer


def make_fabric(
    *,
    accelerator: str = "auto",
    devices: int = 1,
    precision: Any = "32-true",
    nodes: int = 1,
) -> "Fabric":
    """Return a launched Fabric: one process, or one for each of several devices."""
    fabric_class = _fabric_class()
    several = devices * nodes > 1
    fabric = fabric_class(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        precision=precision,
        strategy="ddp" if several else "auto",
    )
    fabric.launch()
    return fabric


def fit(
    model: nn.Module,
    examples: Examples,
    training: Training,
    *,
    fabric: "Fabric",
    seed: Seed,
    prepare: Callable[[Tensor], Tensor],
    augment: Augmentation | None = None,
    after_step: Callable[[], None] | None = None,
    after_epoch: Callable[[Epoch], None] | None = None,
    start: int = 0,
    optimizer_state: dict[str, Any] | None = None,
) -> None:
    """Train a classifier in place with a fresh optimizer, or from epoch `start` with a saved one.

    `prepare` turns raw images into pixels, after augmentation. `after_step` runs after each optimizer step.
    """
    if start >= training.epochs:
        return
    optimizer = training.optimizer([p for p in model.parameters() if p.requires_grad])
    rates = [group["lr"] for group in optimizer.param_groups]
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    live, stepper = fabric.setup(model, optimizer)
    examples = examples.to(fabric.device)

    def step(images: Tensor, labels: Tensor, weight: float) -> Tensor:
        loss = F.cross_entropy(live(prepare(images)).float(), labels) * weight
        fabric.backward(loss)
        stepper.step()
        stepper.zero_grad()
        if after_step is not None:
            after_step()
        return loss.detach()

    for epoch in range(start, training.epochs):
        live.train()
        total = torch.zeros((), device=fabric.device)
        order = list(epoch_order(len(examples), training.batch_size, generator(*seed, epoch), fabric.world_size))
        with seeded(fabric.device, *seed, epoch, fabric.global_rank):
            batches = _batches(examples, order, augment, fabric, generator(*seed, epoch, fabric.global_rank))
            for number, (images, labels) in enumerate(batches):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * training.schedule(epoch + number / len(order), training.epochs)
                # Ranks may hold unequal shares of a batch; weighted, their mean is the batch's mean.
                total += step(images, labels, len(images) * fabric.world_size / len(order[number]))
        _agree_on_buffers(model, fabric)
        mean = float(fabric.all_reduce(total, reduce_op="mean")) / len(order)  # pyright: ignore
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"the loss became {mean} in epoch {epoch + 1}; lower the learning rate or check the images"
            )
        if after_epoch is not None:
            after_epoch(Epoch(epoch + 1, mean, optimizer))


def epoch_order(examples: int, batch_size: int, draws: torch.Generator, processes: int = 1) -> Iterator[Tensor]:
    """Yield the indices of each batch of one epoch, for all processes together.

    A last batch too small to normalise (fewer than two images for each process) is left out, unless it is
    the only one.
    """
    batches = torch.randperm(examples, generator=draws).split(batch_size)
    for batch in batches:
        if len(batch) >= 2 * processes or (len(batches) == 1 and len(batch) >= processes):
            yield batch
        elif len(batches) == 1:
            raise ValueError(f"{examples} images are too few for {processes} processes")


def _batches(
    examples: Examples,
    order: list[Tensor],
    augment: Augmentation | None,
    fabric: "Fabric",
    draws: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this process's share of each batch, on its device and augmented."""
    mine = (batch[fabric.global_rank :: fabric.world_size] for batch in order)
    for images, labels in examples.batches(mine):
        images = images.to(fabric.device)
        yield images if augment is None else augment(images, draws), labels.to(fabric.device)


def _agree_on_buffers(model: nn.Module, fabric: "Fabric") -> None:
    """Make running statistics equal on all ranks: each has seen other images since the last step."""
    if fabric.world_size == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.as_tensor(fabric.all_reduce(buffer.clone(), reduce_op="mean")))
        else:
            buffer.copy_(fabric.broadcast(buffer.clone(), src=0))


def _fabric_class() -> type["Fabric"]:
    try:
        from lightning_fabric import Fabric
    except ModuleNotFoundError:  # the `lightning` distribution has the same class in another place
        from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]
    return Fabric  # pyright: ignore[reportReturnType]
