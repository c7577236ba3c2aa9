"""The training loop, the same for one CPU and many GPUs.

The order of the examples, the augmentation and dropout of an epoch depend only on the seed and the epoch. So a run
that resumes after an epoch continues exactly as an uninterrupted run would.
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
from cps.data.examples import Examples
from cps.network.freezing import Guard
from cps.runtime.devices import average_buffers, cuda_device, deterministic_cudnn, precision_of, required_precision
from cps.runtime.environment import busy_warning
from cps.runtime.seeding import generator, seeded
from cps.training.objective import Objective, Trained
from cps.training.settings import Training
from cps.training.steps import EpochPlan, Fit, MakeSteps, PlainSteps, StepCache, TrainingSteps

if TYPE_CHECKING:
    from lightning_fabric import Fabric

log = logging.getLogger(__name__)

Seed = tuple[int, ...]
ORDER, DRAWS, NOISE = range(3)  # purposes of a seed: order of the examples, augmentation, dropout
MANY_BATCHES = 20  # an epoch with more batches skips a small last one


@dataclass(frozen=True)
class Epoch:
    """A finished epoch: the number of epochs done so far, and the mean loss.

    `optimizer_state` copies the trained values into the classifier and returns the state of the optimizer.
    """

    done: int
    loss: float
    optimizer_state: Callable[[], dict[str, Any]]


class Trainer:
    """Trains models one after the other. On a GPU it keeps the captured step of the last fit for the next one.

    `image_passes` counts the images of all training steps so far, in all processes together.
    """

    def __init__(self, fabric: "Fabric"):
        self.fabric = fabric
        self.image_passes = 0
        self._step_cache = StepCache()
        self._logged: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_step_cache": StepCache()}  # a CUDA graph cannot be copied

    def release(self) -> None:
        """Release the GPU memory of the captured step, which holds the weights trained last."""
        self._step_cache.clear()
        gc.collect()  # it is part of reference cycles

    def fit(
        self,
        model: Trained,
        examples: Examples,
        training: Training,
        *,
        seed: Seed,
        transform: BatchTransform,
        guard: Guard | None = None,
        score_range: float = 0.0,
        after_epoch: Callable[[Epoch], None] | None = None,
        start: int = 0,
        optimizer_state: dict[str, Any] | None = None,
        total_epochs: int = 0,
        images: int | None = None,
        make_steps: MakeSteps | None = None,
        passes_per_batch: int = 1,
    ) -> None:
        """Train a classifier or an objective in place with a new optimizer, or from epoch `start` with a saved state.

        `transform` turns raw images and labels into the input and the target outputs of the classifier. `guard` has the
        entries that must not change, by the names of the parameters of the backbone, or of the objective's student.
        `score_range` is how far mask scores can move in the whole training. `total_epochs` are the epochs of all
        phases, which share one captured step. With `images`, training ends with the batch that reaches this number of
        images, whatever the number of epochs, and so does the schedule. `make_steps` replaces the training steps, and
        `passes_per_batch` says how often they use each image of a batch.

        Raise `FloatingPointError` if the loss is not finite.
        """
        per_epoch = passes_per_batch * self._images_per_epoch(examples, training)
        length = training.epochs if images is None else images / per_epoch  # in epochs
        self.image_passes += math.ceil(per_epoch * min(start, length))
        if start >= length:
            return
        _check_dtype(model, self.fabric)
        self._warn_if_busy()
        with cuda_device(self.fabric.device):
            examples = examples.to(self.fabric.device)
            fit = Fit(model, examples, training, transform, guard or {}, max(total_epochs, math.ceil(length)))
            steps = self._steps_for(fit) if make_steps is None else make_steps(fit, self.fabric)
            try:
                steps.begin(model, fit.guard, optimizer_state)
                plans = self._plans(len(examples), training, seed, start, length, transform.draws, score_range)
                plan = next(plans)
                for epoch in range(start, math.ceil(length)):
                    model.train()
                    if isinstance(model, Objective):
                        model.before_epoch(epoch)
                    with (
                        seeded(self.fabric.device, *seed, epoch, NOISE, self.fabric.global_rank),
                        deterministic_cudnn(),
                    ):
                        total, batches = steps.run(examples, plan), len(plan.order)
                    self.image_passes += passes_per_batch * plan.images
                    plan = next(plans, plan)  # on the CPU, while the GPU is busy
                    average_buffers(model, self.fabric)
                    loss = self._mean_loss(total, batches, epoch)
                    if after_epoch is not None:
                        after_epoch(Epoch(epoch + 1, loss, steps.optimizer_state))
                steps.write_back()
            finally:
                steps.release()

    def count_finished(self, examples: Examples, training: Training) -> None:
        """Count the image passes of a whole fit that an earlier process has taken."""
        self.image_passes += training.epochs * self._images_per_epoch(examples, training)

    def _images_per_epoch(self, examples: Examples, training: Training) -> int:
        """Return the number of images in the batches of an epoch."""
        order = epoch_order(len(examples), training.batch_size, generator(0), self.fabric.world_size)
        return sum(map(len, order))

    def _steps_for(self, fit: Fit) -> TrainingSteps:
        """Return captured steps on a GPU where that is possible, and plain steps otherwise."""
        if self.fabric.device.type == "cuda":
            from cps.training.cuda import faster_steps  # only here: nothing of it is needed on a CPU

            steps, warnings = faster_steps(fit, self.fabric, self._step_cache)
            for warning in warnings:
                self._warn_once(warning)
            if steps is not None:
                return steps
        return PlainSteps(fit.model, fit.training, self.fabric, fit.transform)

    def _warn_if_busy(self) -> None:
        """Before the first training on a CPU, warn if other programs use it."""
        if self.fabric.device.type == "cpu" and self.image_passes == 0 and (message := busy_warning()):
            self._warn_once(message)

    def _warn_once(self, message: str) -> None:
        if message not in self._logged:
            log.warning(message)
            self._logged.add(message)

    def _mean_loss(self, total: Tensor, batches: int, epoch: int) -> float:
        """Return the mean loss over the batches of all processes; raise `FloatingPointError` if it is not finite."""
        loss = float(self.fabric.all_reduce(total, reduce_op="mean")) / batches  # pyright: ignore
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} in epoch {epoch + 1}; lower the learning rate or check the images"
            )
        return loss

    def _plans(
        self,
        examples: int,
        training: Training,
        seed: Seed,
        start: int,
        length: float,
        draws: int,
        score_range: float,
    ) -> Iterator[EpochPlan]:
        """Yield the plan of this process for each epoch; of the last one, only a part if `length` is not whole."""
        rank, processes = self.fabric.global_rank, self.fabric.world_size
        for epoch in range(start, math.ceil(length)):
            order = list(epoch_order(examples, training.batch_size, generator(*seed, epoch, ORDER), processes))
            steps = len(order)
            order = order[: math.ceil((length - epoch) * steps)]
            local = [batch[rank::processes] for batch in order]
            uniform = torch.rand(examples, draws, generator=generator(*seed, epoch, DRAWS))
            factors = [training.schedule(epoch + step / steps, length) for step in range(len(order))]
            # Processes may have unequal parts of a batch; weighted by them, the mean over processes is the batch mean.
            loss_weights = [len(part) * processes / len(batch) for part, batch in zip(local, order, strict=True)]
            images = sum(map(len, order))
            yield EpochPlan(local, uniform, factors, loss_weights, score_range / (length * steps), images)


def _check_dtype(model: Trained, fabric: "Fabric") -> None:
    if required_precision(model) not in (None, precision_of(fabric)):
        raise ValueError(
            f"a backbone in float64 cannot be trained in {precision_of(fabric)}; pass "
            "fabric=cps.make_fabric(precision='32-true'), or the backbone in float32"
        )


def epoch_order(examples: int, batch_size: int, generator: torch.Generator, processes: int = 1) -> Iterator[Tensor]:
    """Yield the shuffled indices of each batch of one epoch, for all processes together.

    A last, smaller batch is skipped if it is too small for batch norm (fewer than two images per process), or if it
    has less than half a batch and the epoch has more than 20: a step on it would be mostly noise.
    """
    if min(examples, batch_size) < processes:
        raise ValueError(f"batches of {min(examples, batch_size)} images are too small for {processes} processes")
    batches = torch.randperm(examples, generator=generator).split(batch_size)
    min_size = max(2 * processes, batch_size // 2 if len(batches) > MANY_BATCHES else 0)
    for batch in batches:
        if len(batch) >= min(min_size, batch_size) or len(batches) == 1:
            yield batch
