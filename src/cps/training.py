"""Training: one loop for one CPU and for many GPUs, driven by lightning-fabric.

The order of the examples, the augmentation and dropout of an epoch depend only on the seed and the epoch,
so a run that resumes at an epoch's end goes on as if it had never stopped.

On one GPU the whole step (reading the batch, augmentation, forward, backward, optimizer, guard) is captured as
a CUDA graph, and widths are padded to multiples of eight; see capture.py and padding.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cps.augmentation import Augmentation
from cps.capture import Captured
from cps.data import Examples, TensorExamples
from cps.draft import Classifier
from cps.guard import Guard, bind
from cps.padding import Padded, copy_into, padded, resized_state
from cps.seeds import generator, seeded
from cps.settings import Training

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Seed = tuple[int, ...]
ORDER, DRAWS, NOISE = range(3)  # what a seed is for
CAPTURABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass(frozen=True)
class Epoch:
    """A finished epoch: how many are done, the mean loss, and the optimizer's state."""

    done: int
    loss: float
    optimizer_state: Callable[[], dict[str, Any]]


def fit(
    model: Classifier,
    examples: Examples,
    training: Training,
    *,
    fabric: "Fabric",
    seed: Seed,
    prepare: Callable[[Tensor], Tensor],
    augment: Augmentation | None = None,
    guard: Guard | None = None,
    after_epoch: Callable[[Epoch], None] | None = None,
    start: int = 0,
    optimizer_state: dict[str, Any] | None = None,
) -> None:
    """Train a classifier in place with a fresh optimizer, or from epoch `start` with a saved one.

    `prepare` turns raw images into pixels, after augmentation. `guard` is what must not move, by the names of
    the backbone's parameters.
    """
    if start >= training.epochs:
        return
    loop = _Loop(model, examples.to(fabric.device), training, fabric, prepare, augment, guard or {}, optimizer_state)
    for epoch in range(start, training.epochs):
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            loss = loop.run(epoch, seed)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} in epoch {epoch + 1}; lower the learning rate or check the images"
            )
        if after_epoch is not None:
            after_epoch(Epoch(epoch + 1, loss, loop.optimizer_state))


class _Loop:
    """One phase of training: all that stays the same from step to step."""

    def __init__(
        self,
        model: Classifier,
        examples: Examples,
        training: Training,
        fabric: "Fabric",
        prepare: Callable[[Tensor], Tensor],
        augment: Augmentation | None,
        guard: Guard,
        optimizer_state: dict[str, Any] | None,
    ):
        self.model, self.examples, self.training, self.fabric = model, examples, training, fabric
        self.prepare, self.augment = prepare, augment
        self.twin = self._padded_twin()
        self.live = Classifier(self.twin, model.head) if self.twin else model
        self.optimizer = training.optimizer([p for p in self.live.parameters() if p.requires_grad])
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if optimizer_state is not None:
            self.optimizer.load_state_dict(resized_state(optimizer_state, self.live))
        is_fused = self._fuse_optimizer()
        inner = self.twin.inner if self.twin else model.backbone
        self.protect = bind(guard, dict(inner.named_parameters()))
        self.total = torch.zeros((), device=fabric.device)
        self.uniform = torch.zeros(len(examples), augment.draws if augment else 0, device=fabric.device)
        self.wrapped, self.stepper = fabric.setup(self.live, self.optimizer)
        self.captured = Captured(self._step_on) if is_fused and self._can_be_captured() else None

    def run(self, epoch: int, seed: Seed) -> float:
        """Train for an epoch; return the mean loss."""
        rank, processes = self.fabric.global_rank, self.fabric.world_size
        self.live.train()
        self.total.zero_()
        number, size = len(self.examples), self.training.batch_size
        order = list(epoch_order(number, size, generator(*seed, epoch, ORDER), processes))
        self.uniform.copy_(torch.rand(self.uniform.shape, generator=generator(*seed, epoch, DRAWS)))
        mine = [batch[rank::processes].to(self.fabric.device) for batch in order]
        with seeded(self.fabric.device, *seed, epoch, NOISE, rank):
            if self.captured is not None:
                for step, indices in enumerate(mine):
                    self._set_rate(epoch + step / len(order))
                    self.captured(indices)
            else:
                for step, (images, labels) in enumerate(self.examples.batches(mine)):
                    self._set_rate(epoch + step / len(order))
                    # Ranks may hold unequal shares of a batch; weighted, their mean is the batch's mean.
                    weight = len(images) * processes / len(order[step])
                    self._step(images, labels, self.uniform[mine[step]], weight)
        if self.twin is not None:
            copy_into(self.twin.inner, self.model.backbone)
        _agree_on_buffers(self.model, self.fabric)
        return float(self.fabric.all_reduce(self.total, reduce_op="mean")) / len(order)  # pyright: ignore

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state, as it is for the unpadded classifier."""
        return resized_state(self.optimizer.state_dict(), self.model)

    def _step(self, images: Tensor, labels: Tensor, uniform: Tensor, weight: float = 1.0) -> None:
        images, labels = images.to(self.fabric.device), labels.to(self.fabric.device)
        if self.augment is not None:
            images = self.augment(images, uniform)
        loss = F.cross_entropy(self.wrapped(self.prepare(images)).float(), labels) * weight
        self.fabric.backward(loss)
        self.stepper.step()
        self.stepper.zero_grad()
        self.protect()
        self.total += loss.detach()

    def _step_on(self, indices: Tensor) -> None:
        """Do a step on examples that are in memory, all of it on the device."""
        assert isinstance(self.examples, TensorExamples)
        self._step(self.examples.images[indices], self.examples.targets[indices], self.uniform[indices])

    def _set_rate(self, epoch: float) -> None:
        factor = self.training.schedule(epoch, self.training.epochs)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def _padded_twin(self) -> Padded | None:
        """Return a twin of the backbone with widths that a GPU likes, if there is a GPU and such a twin."""
        if self.fabric.device.type != "cuda":
            return None
        with seeded(self.fabric.device, 0):  # a data set may draw from torch's generator
            images, _ = next(self.examples.batches([torch.arange(2)]))
        return padded(self.model.backbone, self.prepare(images.to(self.fabric.device)))

    def _fuse_optimizer(self) -> bool:
        """Let an optimizer on a GPU work in few kernels, with a rate it reads from the GPU; say whether it does."""
        if self.fabric.device.type != "cuda" or type(self.optimizer) not in CAPTURABLE:
            return False
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=self.fabric.device)
            group |= {"fused": True, "foreach": False} | ({"capturable": True} if "capturable" in group else {})
        return True

    def _can_be_captured(self) -> bool:
        """Say whether the whole step may become one CUDA graph."""
        scales = precision_of(self.fabric) == "16-mixed"  # the loss scaler decides on the CPU
        return isinstance(self.examples, TensorExamples) and self.fabric.world_size == 1 and not scales


def make_fabric(
    *,
    accelerator: str = "auto",
    devices: int = 1,
    precision: Any = None,
    nodes: int = 1,
) -> "Fabric":
    """Return a launched Fabric: one process, or one for each of several devices.

    `precision` is bf16-mixed on a GPU and 32-true elsewhere, unless given.
    """
    fabric_class = _fabric_class()
    several = devices * nodes > 1
    gpu = accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available())
    fabric = fabric_class(
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        precision=precision or ("bf16-mixed" if gpu else "32-true"),
        strategy="ddp" if several else "auto",
    )
    return ready(fabric)


def ready(fabric: "Fabric") -> "Fabric":
    """Return the fabric launched; refuse a precision that would store weights in fewer bits than they have."""
    if precision_of(fabric) in ("bf16-true", "16-true"):
        raise ValueError(f"precision {precision_of(fabric)} cannot hold sealed weights; use bf16-mixed or 32-true")
    if not fabric._launched:
        fabric.launch()
    return fabric


def precision_of(fabric: "Fabric") -> str:
    """Return the name of the precision that training uses."""
    return str(fabric.strategy.precision.precision)


def epoch_order(examples: int, batch_size: int, draws: torch.Generator, processes: int = 1) -> Iterator[Tensor]:
    """Yield the indices of each batch of one epoch, for all processes together.

    A last, smaller batch that is too small to normalise (fewer than two images for each process) is left out,
    unless it is the only one.
    """
    if min(examples, batch_size) < processes:
        raise ValueError(f"batches of {min(examples, batch_size)} images are too small for {processes} processes")
    batches = torch.randperm(examples, generator=draws).split(batch_size)
    for batch in batches:
        if len(batch) == batch_size or len(batch) >= 2 * processes or len(batches) == 1:
            yield batch


def _agree_on_buffers(model: Classifier, fabric: "Fabric") -> None:
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
