"""The engine: the training step at a GPU's speed.

It trains a twin of the classifier, channels last. The whole step (forward, backward, optimizer, guard, and beside them
the augmentation of the next batch) is captured as a CUDA graph. What follows a convolution and the update are kernels
of our own where the backbone allows; else torch.compile joins them if training is long. The twin, the graph and the
kernels stay for the next phase and task, which only copy their tensors in. Only kernels that always give the same bits
are used.
"""

import copy
import logging
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from cps.data.batch_transform import BatchTransform
from cps.data.examples import Examples, TensorExamples
from cps.network.classifier import Classifier
from cps.network.compact.channel_padding import Padded, copy_into, resized_state
from cps.network.freezing import Guard
from cps.network.partition import named_tensors, put_channels_last, trainable
from cps.runtime.cuda_graphs import Captured, compiled_alone, first_line
from cps.runtime.devices import full_precision
from cps.runtime.seeding import RNG_LOCK, seeded
from cps.runtime.side_stream import side_stream_of
from cps.training.cuda.accelerated_copy import AcceleratedCopy, Bf16Weights, accelerated_copy, check_alike
from cps.training.cuda.device_batches import DeviceBatches, EpochPlan
from cps.training.cuda.flat_parameters import FlatParameters
from cps.training.cuda.kernel_warmup import compiled_together
from cps.training.cuda.optimizer_step import Update
from cps.training.settings import Training

log = logging.getLogger(__name__)

MOST_CHECKED = 2**23  # pixels, on which our own kernels are compared with PyTorch's


class CapturedStep:
    """A captured training step for classifiers of one shape; `begin` takes up another of them."""

    def __init__(
        self,
        model: Classifier,
        images: Tensor,
        training: Training,
        show: BatchTransform,
        *,
        is_bf16: bool,
        is_long: bool,
        is_quick: bool = True,
        choosing: Collection[str] = (),
    ):
        """Build the step; `images` are a batch to try it on.

        `is_bf16`: in bf16; `is_long`: worth compiling; `is_quick`: by kernels of our own. `choosing` are the names
        of weights whose guards may have scores.
        """
        self.show, self.loss, self.is_bf16 = show, training.loss, is_bf16
        self.model, self.device = model, next(model.parameters()).device
        self._aside = side_stream_of(self.device)
        self.bf16_weights: Bf16Weights | None = None
        pixels = show.prepare(images[:2])
        twin = accelerated_copy(model.backbone, pixels, is_bf16=is_bf16, is_quick=is_quick)
        self.live, self.inner = self._classifier(twin), twin.inner
        with compiled_together() if twin.is_joined else nullcontext():
            reached = self._gradients(self.live, images, is_bf16=is_bf16)
        self.flat = FlatParameters({name: value for name, value in trainable(self.live).items() if name in reached})
        if twin.is_joined:
            self.bf16_weights = Bf16Weights(self.live, self.flat)
        self.update = Update(self.flat, training.optimizer, self._guarded, choosing)
        compiled = is_long and not twin.is_joined
        if self.device.type == "cuda":
            self.update.make_capturable(is_fused=not compiled)
        self.total = torch.zeros((), dtype=torch.float32, device=self.device)
        self._fast: tuple[Callable[..., Tensor], Callable[[], None]] | None = None
        if is_quick and is_bf16 and self.device.type == "cuda":
            self._check(
                self._classifier(accelerated_copy(model.backbone, pixels, is_bf16=True, is_quick=False)), images
            )
        self._try(images, compiled=compiled)
        if twin.is_joined:
            self.update.work_in_one()
        self._pool = self._new_pool()
        self._step_on_batch = self._captured(lambda *batch: self._step(*show(*batch)))
        self._steps: dict[tuple[int, int], Callable[[], None]] = {}  # by the sizes of a batch and the following one
        self._feed: DeviceBatches | None = None
        self._loaded: TensorExamples | None = None

    def begin(self, model: Classifier, guard: Guard, optimizer_state: dict[str, Any] | None) -> None:
        """Take up a classifier as it is now, with a fresh optimizer or a saved one."""
        self.model = model
        for value in named_tensors(self.inner).values():  # what was padded among them
            value.detach().zero_()
        copy_into(model.backbone, self.inner)
        copy_into(model.head, self.live.head)
        shapes = {name: value.shape for name, value in model.backbone.named_parameters()}
        state = {} if optimizer_state is None else resized_state(optimizer_state, self.live)["state"]
        saved = {name: state.get(index, {}) for index, name in self._places().items()}
        self.update.begin(guard, shapes, saved if state else {})
        self.live.train()

    def run(self, examples: Examples, plan: EpochPlan) -> Tensor:
        """Take a step on each batch of an epoch; return the sum of the losses. One process has all of each batch."""
        self.total.zero_()
        self.update.start(plan.pace)
        if isinstance(examples, TensorExamples) and examples.images.device == self.device:
            self._load(examples).start(torch.cat(list(plan.order)), plan.uniform)
            sizes = [len(batch) for batch in plan.order]
            self._step_on_next(0, sizes[0])
            for size, following, factor in zip(sizes, [*sizes[1:], 0], plan.factors, strict=True):
                self.update.set_rate(factor)
                self._step_on_next(size, following)
        else:
            batches = zip(examples.batches(plan.order), plan.order, plan.factors, strict=True)
            for (images, labels), batch, factor in batches:
                self.update.set_rate(factor)
                values = (images, labels, plan.uniform[batch])
                self._step_on_batch(*(value.to(self.device, non_blocking=True) for value in values))
        return self.total

    def settle(self) -> None:
        """Copy what was learned into the classifier."""
        copy_into(self.inner, self.model.backbone)
        copy_into(self.live.head, self.model.head)
        self.update.restore.settle()

    def forget(self) -> None:
        """Keep no image, whatever happened."""
        self._loaded = None
        with RNG_LOCK:  # another thread's step may be aside
            self._aside.join()
        if self._feed is not None:
            self._feed.forget()
        if isinstance(self._step_on_batch, Captured):
            self._step_on_batch.forget()

    def optimizer_state(self) -> dict[str, Any]:
        """Settle, and return the optimizer's state as it is for the classifier itself."""
        self.settle()
        each = self.update.state_of_each()
        groups = [{**self.update.settings, "params": list(range(len(trainable(self.live))))}]
        state = {index: each[name] for index, name in self._places().items()}
        return resized_state({"state": state, "param_groups": groups}, self.model)

    def _load(self, examples: TensorExamples) -> DeviceBatches:
        """Take up the examples of another phase; steps that were captured with others of their shape serve again."""
        if self._feed is None or not self._feed.fits(examples):
            self._feed = None  # its memory, before that of the next
            self._steps.clear()
            self._pool = self._new_pool()  # that of graphs which are gone cannot be used again
            self._feed = DeviceBatches(examples, self.show, self.show.draws)
        if self._loaded is not examples:
            self._feed.load(examples)
            self._loaded = examples
        return self._feed

    def _step_on_next(self, size: int, following: int) -> None:
        """Take a step on the examples that are ready, if there are any, and get the following ones ready beside it."""
        if (size, following) not in self._steps:
            feed = self._feed
            assert feed is not None

            def step() -> None:
                coming = self._aside.start(lambda: feed.read(following)) if following else None
                if size:
                    self._step(*feed.ready(size))
                if coming is not None:
                    self._aside.join()
                    feed.keep(following, coming)

            self._steps[size, following] = self._captured(step)
        self._steps[size, following]()

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _captured(self, work: Callable[..., None]) -> Callable[..., None]:
        return Captured(work, self._pool) if self.device.type == "cuda" else work

    def _step(self, pixels: Tensor, labels: Tensor) -> None:
        loss_of, update = self._fast or (self._loss, self.update)
        loss = (loss_of if len(pixels) == self._usual else self._loss)(pixels, labels)
        self._go_back(loss)
        update()
        self.total += loss.detach()

    def _go_back(self, loss: Tensor) -> None:
        """Find the gradients of all that moves."""
        self.flat.clear()  # a step before may have failed half-way
        loss.backward()
        self._aside.join()
        self.flat.gather()

    def _loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        if self.bf16_weights is not None:
            self.bf16_weights.refresh()
        return self._loss_by(self.live, self.is_bf16, pixels, labels)

    def _loss_by(self, live: Classifier, is_bf16: bool, pixels: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16):
            return live(pixels, labels, self.loss)

    def _try(self, images: Tensor, *, compiled: bool) -> None:
        """Do a step on some images, compiled if that works, so that the optimizer has all of its state."""
        pixels, labels = self._trial(images)
        self._usual = len(pixels)  # what is compiled is for so many
        if compiled:
            self._fast = compiled_alone(self._loss), compiled_alone(self.update.__call__)
        try:
            with seeded(self.device, 0):
                self.live.train()
                self._step(pixels, labels)
        except Exception as error:  # whatever compiling a module may end in
            if not compiled:
                raise
            log.warning("training goes on without torch.compile: %s", first_line(error))
            self._fast = None
            self.update.make_capturable(is_fused=True)
            self._try(images, compiled=False)

    def _classifier(self, twin: AcceleratedCopy) -> Classifier:
        """Return a twin with a head like that of the classifier."""
        live = Classifier(twin.whole, copy.deepcopy(self.model.head))
        return put_channels_last(live) if self.device.type == "cuda" else live

    def _check(self, plain: Classifier, images: Tensor) -> None:
        """Compare what our own kernels do with some images with what PyTorch's do; refuse them if they are wrong."""
        some = images[: max(2, MOST_CHECKED // images[0].numel())]
        with seeded(self.device, 0):
            self.live.train()
            self._go_back(self._loss(*self._trial(some)))
        in_bf16 = self._gradients(plain, some, is_bf16=True)
        with full_precision():
            check_alike(self.flat.gradients(), in_bf16, self._gradients(plain, some, is_bf16=False))

    def _gradients(self, live: Classifier, images: Tensor, *, is_bf16: bool) -> dict[str, Tensor]:
        """Return the gradients that reach parameters, by name."""
        with seeded(self.device, 0):
            self._loss_by(live.train(), is_bf16, *self._trial(images)).backward()
        found = {name: value.grad for name, value in trainable(live).items() if value.grad is not None}
        live.zero_grad()
        return found

    def _trial(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels and labels to try a step on, of all classes: one alone teaches nothing."""
        classes = self.live.head.out_features // self.show.rotations.num_rotations
        labels = torch.arange(len(images), device=self.device) % classes
        uniform = torch.zeros(len(images), self.show.draws, dtype=torch.float32, device=self.device)
        return self.show(images, labels, uniform)

    def _places(self) -> dict[int, str]:
        """Return the name of each moving parameter by its place among the trainable ones, as optimizers count."""
        return {i: name for i, name in enumerate(trainable(self.live)) if name in self.flat.parameters}

    def _guarded(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the views of a vector by the names that parameters have in the backbone."""
        prefix = "backbone.inner." if isinstance(self.live.backbone, Padded) else "backbone."
        return {name.removeprefix(prefix): view for name, view in self.flat.views(vector).items()}
