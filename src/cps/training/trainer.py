"""Training: one loop for one CPU and for many GPUs.

The order of the examples, the augmentation and dropout of an epoch depend only on the seed and the epoch,
so a run that resumes at an epoch's end goes on as if it had never stopped.
"""

import gc
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cps.data.batch_transform import BatchTransform
from cps.data.examples import Examples, TensorExamples
from cps.network.classifier import Classifier
from cps.network.freezing import Guard
from cps.runtime.cuda_graphs import first_line
from cps.runtime.devices import average_buffers, cuda_device, deterministic_cudnn, precision_of
from cps.runtime.seeding import generator, seeded
from cps.training.admission import is_capturable, shape_of
from cps.training.cuda.captured_step import CapturedStep
from cps.training.cuda.device_batches import EpochPlan
from cps.training.settings import Training
from cps.training.steps import PlainSteps, TrainingSteps

if TYPE_CHECKING:
    from lightning_fabric import Fabric

log = logging.getLogger(__name__)

Seed = tuple[int, ...]
ORDER, DRAWS, NOISE = range(3)  # what a seed is for
LONG = 1500  # steps from which compiling them pays
ENGINE_PRECISIONS = {"bf16-mixed": True, "32-true": False}  # those an engine knows, and whether that is bf16
MANY = 20  # batches in an epoch that make up for a small one left out


@dataclass(frozen=True)
class Epoch:
    """A finished epoch: how many are done, and the mean loss.

    `optimizer_state` brings the classifier up to date and returns the optimizer's state.
    """

    done: int
    loss: float
    optimizer_state: Callable[[], dict[str, Any]]


class Trainer:
    """Trains classifiers one after the other; on a GPU it keeps the engine of one for the next."""

    def __init__(self, fabric: "Fabric"):
        self.fabric = fabric
        self._engine: tuple[tuple[Any, ...], CapturedStep | None] | None = None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}  # a CUDA graph cannot be copied

    def forget(self) -> None:
        """Keep nothing of what was trained last, which an engine holds, on the GPU too."""
        self._engine = None
        gc.collect()  # it refers to itself

    def fit(
        self,
        model: Classifier,
        examples: Examples,
        training: Training,
        *,
        seed: Seed,
        show: BatchTransform,
        guard: Guard | None = None,
        reach: float = 0.0,
        after_epoch: Callable[[Epoch], None] | None = None,
        start: int = 0,
        optimizer_state: dict[str, Any] | None = None,
        epochs_in_all: int = 0,
    ) -> None:
        """Train a classifier in place with a fresh optimizer, or from epoch `start` with a saved one.

        `show` turns raw images into what the classifier sees and is to say. `guard` is what must not move, by the
        names of the backbone's parameters, and `reach` how far its scores may. `epochs_in_all` are those of all phases,
        which share one engine.
        """
        if start >= training.epochs:
            return
        guard = guard or {}
        _check_types(model, self.fabric)
        with cuda_device(self.fabric.device):
            examples = examples.to(self.fabric.device)
            is_long = max(epochs_in_all, training.epochs) * len(examples) >= LONG * training.batch_size
            engine = self._engine_for(model, examples, training, show, guard, is_long)
            steps: TrainingSteps = engine or PlainSteps(model, training, self.fabric, show)
            try:
                steps.begin(model, guard, optimizer_state)
                plans = self._plans(len(examples), training, seed, start, show.draws, reach)
                plan = next(plans)
                for epoch in range(start, training.epochs):
                    model.train()
                    with (
                        seeded(self.fabric.device, *seed, epoch, NOISE, self.fabric.global_rank),
                        deterministic_cudnn(),
                    ):
                        total, batches = steps.run(examples, plan), len(plan.order)
                    plan = next(plans, plan)  # while a GPU is at work
                    average_buffers(model, self.fabric)
                    loss = self._mean_loss(total, batches, epoch)
                    if after_epoch is not None:
                        after_epoch(Epoch(epoch + 1, loss, steps.optimizer_state))
                steps.settle()
            finally:
                steps.forget()

    def _mean_loss(self, total: Tensor, batches: int, epoch: int) -> float:
        """Return the mean over the batches of all processes; refuse one that is no number."""
        loss = float(self.fabric.all_reduce(total, reduce_op="mean")) / batches  # pyright: ignore
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} in epoch {epoch + 1}; lower the learning rate or check the images"
            )
        return loss

    def _plans(
        self, examples: int, training: Training, seed: Seed, start: int, draws: int, reach: float
    ) -> Iterator[EpochPlan]:
        """Yield what this process does in each epoch."""
        rank, processes = self.fabric.global_rank, self.fabric.world_size
        for epoch in range(start, training.epochs):
            order = list(epoch_order(examples, training.batch_size, generator(*seed, epoch, ORDER), processes))
            mine = [batch[rank::processes] for batch in order]
            uniform = torch.rand(examples, draws, generator=generator(*seed, epoch, DRAWS))
            factors = [training.schedule(epoch + step / len(order), training.epochs) for step in range(len(order))]
            # Ranks may hold unequal shares of a batch; weighted, their mean is the batch's mean.
            shares = [len(own) * processes / len(batch) for own, batch in zip(mine, order, strict=True)]
            yield EpochPlan(mine, uniform, factors, shares, reach / (training.epochs * len(order)))

    def _engine_for(
        self,
        model: Classifier,
        examples: Examples,
        training: Training,
        show: BatchTransform,
        guard: Guard,
        is_long: bool,
    ) -> CapturedStep | None:
        """Return the engine for this fit, the last one if it serves; None where there can be none."""
        precision = precision_of(self.fabric)
        if self.fabric.device.type != "cuda":
            return None
        reasons = {
            "several processes": self.fabric.world_size > 1,
            f"precision {precision}": precision not in ENGINE_PRECISIONS,
            "images that are read from a data set": not isinstance(examples, TensorExamples),
            "an optimizer other than SGD, Adam and AdamW with one group": not is_capturable(model, training),
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if found or not isinstance(examples, TensorExamples):
            self._warn_once(f"the training step is not captured as a CUDA graph: {', '.join(found)}")
            return None
        choosing = frozenset(name for name, kept in guard.items() if kept.scores is not None)
        key = (*shape_of(model, examples.images, training), show, is_long, choosing)
        if self._engine is None or self._engine[0] != key:
            self.forget()  # its memory, before that of the next
            some = torch.arange(training.batch_size) % len(examples)
            images, _ = next(examples.batches([some]))
            how = {"is_bf16": ENGINE_PRECISIONS[precision], "is_long": is_long, "choosing": choosing}
            self._engine = key, self._built(model, images.to(self.fabric.device), training, show, how)
        return self._engine[1]

    def _built(
        self, model: Classifier, images: Tensor, training: Training, show: BatchTransform, how: dict[str, Any]
    ) -> CapturedStep | None:
        """Return a new engine, if need be one without kernels of our own; None where neither can be built."""
        for is_quick, without in ((True, "kernels of its own"), (False, "a CUDA graph")):
            try:
                # In turn with epochs of other threads: while kernels are compiled together, none of the process starts.
                with deterministic_cudnn(), seeded(self.fabric.device, 0):
                    return CapturedStep(model, images, training, show, is_quick=is_quick, **how)
            except Exception as error:  # there may be no C compiler for Triton, or too little memory
                self._warn_once(f"training goes on without {without}: {first_line(error)}")
        return None

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            log.warning(what)
            self._warned.add(what)


def _check_types(model: Classifier, fabric: "Fabric") -> None:
    precision = precision_of(fabric)
    if precision != "32-true" and any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        raise ValueError(
            f"a backbone in float64 cannot be trained in {precision}; pass "
            "fabric=cps.make_fabric(precision='32-true'), or the backbone in float32"
        )


def epoch_order(examples: int, batch_size: int, draws: torch.Generator, processes: int = 1) -> Iterator[Tensor]:
    """Yield the indices of each batch of one epoch, for all processes together.

    What is left over at the end is a batch of its own, unless it is too small to normalise (fewer than two images for
    each process), or so small beside many whole ones (under half, of twenty) that a step on it would be mostly noise.
    """
    if min(examples, batch_size) < processes:
        raise ValueError(f"batches of {min(examples, batch_size)} images are too small for {processes} processes")
    batches = torch.randperm(examples, generator=draws).split(batch_size)
    least = max(2 * processes, batch_size // 2 if len(batches) > MANY else 0)
    for batch in batches:
        if len(batch) >= min(least, batch_size) or len(batches) == 1:
            yield batch
