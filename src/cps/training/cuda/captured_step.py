"""The captured training step: training at the speed of a GPU.

An accelerated copy of the classifier is trained. The whole step (forward, backward, optimizer, restoring the guarded
weights, and on a side stream the augmentation of the next batch) is captured as a CUDA graph. Custom kernels fuse what
follows a convolution, and the optimizer step, if the backbone allows it; otherwise torch.compile does if training is
long. The copy, the graph and the kernels are reused in the next phases and tasks, which only copy their tensors in.
Only deterministic kernels are used.
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
from cps.network.compact.channel_padding import PaddedBackbone, copy_into, resize_optimizer_state
from cps.network.freezing import Guard
from cps.network.partition import named_tensors, put_channels_last, trainable
from cps.runtime.cuda_graphs import CapturedFunction, compile_method, side_stream
from cps.runtime.devices import full_precision
from cps.runtime.process_state import RNG_LOCK
from cps.runtime.seeding import seeded
from cps.runtime.text import first_line
from cps.training.cuda.accelerated_copy import AcceleratedCopy, Bf16Weights, accelerated_copy, check_gradients
from cps.training.cuda.device_batches import DeviceBatches
from cps.training.cuda.flat_parameters import FlatParameters
from cps.training.cuda.kernel_warmup import compile_in_parallel
from cps.training.cuda.optimizer_step import OptimizerStep
from cps.training.objective import Trained
from cps.training.settings import Training
from cps.training.steps import EpochPlan

log = logging.getLogger(__name__)

MAX_CHECKED_PIXELS = 2**23  # of the images on which custom kernels are compared with PyTorch's


class CapturedStep:
    """A captured training step for all classifiers of one shape; `begin` starts with another one."""

    def __init__(
        self,
        model: Classifier,
        images: Tensor,
        training: Training,
        transform: BatchTransform,
        *,
        is_bf16: bool,
        has_custom_kernels: bool = True,
        can_compile: bool = False,
        scored: Collection[str] = (),
    ):
        """Build the step and try it on a batch of images.

        `has_custom_kernels` allows custom kernels: for convolutions, and in bf16 for norms and the optimizer if the
        backbone is one that can be traced. `can_compile` allows torch.compile, which is used if the norms are not
        fused. `scored` names the weights that may have mask scores.
        """
        self.transform, self.loss, self.is_bf16 = transform, training.loss, is_bf16
        self.model, self.device = model, next(model.parameters()).device
        self._side_stream = side_stream(self.device)
        self.bf16_weights: Bf16Weights | None = None
        pixels = transform.prepare(images[:2])
        accelerated = accelerated_copy(model.backbone, pixels, is_bf16=is_bf16, has_custom_kernels=has_custom_kernels)
        self.fast_model, self.fast_backbone = self._with_head(accelerated), accelerated.backbone
        with compile_in_parallel() if accelerated.has_fused_norms else nullcontext():
            gradients = self._gradients(self.fast_model, images, is_bf16=is_bf16)
        self.flat = FlatParameters(
            {name: value for name, value in trainable(self.fast_model).items() if name in gradients}
        )
        if accelerated.has_fused_norms:
            self.bf16_weights = Bf16Weights(self.fast_model, self.flat)
        self.optimizer_step = OptimizerStep(self.flat, training.optimizer, self._guarded_views, scored)
        is_compiled = can_compile and not accelerated.has_fused_norms
        if self.device.type == "cuda":
            self.optimizer_step.make_capturable(is_fused=not is_compiled)
        self.total_loss = torch.zeros((), dtype=torch.float32, device=self.device)
        self._compiled: tuple[Callable[..., Tensor], Callable[[], None]] | None = None  # loss and optimizer step
        if has_custom_kernels and is_bf16 and self.device.type == "cuda":
            plain = accelerated_copy(model.backbone, pixels, is_bf16=True, has_custom_kernels=False)
            self._check_gradients(self._with_head(plain), images)
        self._try_step(images, is_compiled=is_compiled)
        if accelerated.has_fused_norms:
            self.optimizer_step.use_custom_kernel()
        self._pool = self._new_pool()
        self._step_on_batch = self._capture(lambda *batch: self._step(*transform(*batch)))
        self._steps: dict[tuple[int, int], Callable[[], None]] = {}  # by the sizes of a batch and of the next one
        self._batches: DeviceBatches | None = None
        self._loaded: TensorExamples | None = None

    @property
    def is_compiled(self) -> bool:
        """True if torch.compile has compiled the step."""
        return self._compiled is not None

    def begin(self, model: Trained, guard: Guard, optimizer_state: dict[str, Any] | None) -> None:
        """Start from the present weights of a classifier, with a new optimizer or a saved optimizer state."""
        assert isinstance(model, Classifier)
        self.model = model
        for value in named_tensors(self.fast_backbone).values():  # also clears the padding
            value.detach().zero_()
        copy_into(model.backbone, self.fast_backbone)
        copy_into(model.head, self.fast_model.head)
        shapes = {name: value.shape for name, value in model.backbone.named_parameters()}
        state = {} if optimizer_state is None else resize_optimizer_state(optimizer_state, self.fast_model)["state"]
        saved = {name: state.get(index, {}) for index, name in self._names_by_index().items()}
        self.optimizer_step.begin(guard, shapes, saved if state else {})
        self.fast_model.train()

    def run(self, examples: Examples, plan: EpochPlan) -> Tensor:
        """Take one step per batch of an epoch; return the sum of the losses. Only one process trains."""
        self.total_loss.zero_()
        self.optimizer_step.start_epoch(plan.score_step)
        if isinstance(examples, TensorExamples) and examples.images.device == self.device:
            self._load(examples).start_epoch(torch.cat(list(plan.order)), plan.uniform)
            sizes = [len(batch) for batch in plan.order]
            self._step_on_next(0, sizes[0])
            for size, next_size, factor in zip(sizes, [*sizes[1:], 0], plan.factors, strict=True):
                self.optimizer_step.set_rate(factor)
                self._step_on_next(size, next_size)
        else:
            batches = zip(examples.batches(plan.order), plan.order, plan.factors, strict=True)
            for (images, labels), indices, factor in batches:
                self.optimizer_step.set_rate(factor)
                values = (images, labels, plan.uniform[indices])
                self._step_on_batch(*(value.to(self.device, non_blocking=True) for value in values))
        return self.total_loss

    def write_back(self) -> None:
        """Copy the trained values into the classifier and its guard."""
        copy_into(self.fast_backbone, self.model.backbone)
        copy_into(self.fast_model.head, self.model.head)
        self.optimizer_step.restore.write_back()

    def release(self) -> None:
        """Erase all images, even after an error."""
        self._loaded = None
        with RNG_LOCK:  # the side stream may be running the step of another thread
            self._side_stream.join()
        if self._batches is not None:
            self._batches.clear()
        if isinstance(self._step_on_batch, CapturedFunction):
            self._step_on_batch.clear_buffers()

    def optimizer_state(self) -> dict[str, Any]:
        """Write back, and return the optimizer's state as it would be for the classifier itself."""
        self.write_back()
        by_name = self.optimizer_step.state_by_name()
        groups = [{**self.optimizer_step.settings, "params": list(range(len(trainable(self.fast_model))))}]
        state = {index: by_name[name] for index, name in self._names_by_index().items()}
        return resize_optimizer_state({"state": state, "param_groups": groups}, self.model)

    def _load(self, examples: TensorExamples) -> DeviceBatches:
        """Load the examples of a phase. Steps captured with other examples of the same shape are reused."""
        if self._batches is None or not self._batches.fits(examples):
            self._batches = None  # releases its memory before the next one needs it
            self._steps.clear()
            self._pool = self._new_pool()  # the pool of deleted graphs cannot be used again
            self._batches = DeviceBatches(examples, self.transform)
        if self._loaded is not examples:
            self._batches.load(examples)
            self._loaded = examples
        return self._batches

    def _step_on_next(self, size: int, next_size: int) -> None:
        """Take a step on the stored batch, if `size` is not 0, and prepare the next one on the side stream."""
        if (size, next_size) not in self._steps:
            batches = self._batches
            assert batches is not None

            def step() -> None:
                following = self._side_stream.start(lambda: batches.read(next_size)) if next_size else None
                if size:
                    self._step(*batches.stored(size))
                if following is not None:
                    self._side_stream.join()
                    batches.store(next_size, following)

            self._steps[size, next_size] = self._capture(step)
        self._steps[size, next_size]()

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _capture(self, function: Callable[..., None]) -> Callable[..., None]:
        return CapturedFunction(function, self._pool) if self.device.type == "cuda" else function

    def _step(self, pixels: Tensor, labels: Tensor) -> None:
        compiled_loss, optimizer_step = self._compiled or (self._forward, self.optimizer_step)
        loss = (compiled_loss if len(pixels) == self._compiled_size else self._forward)(pixels, labels)
        self._backward(loss)
        optimizer_step()
        self.total_loss += loss.detach()

    def _backward(self, loss: Tensor) -> None:
        """Compute the gradients of all trained parameters."""
        self.flat.clear_gradients()  # the previous step may have failed half-way
        loss.backward()
        self._side_stream.join()
        self.flat.gather_gradients()

    def _forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        if self.bf16_weights is not None:
            self.bf16_weights.refresh()
        return self._loss_of(self.fast_model, self.is_bf16, pixels, labels)

    def _loss_of(self, model: Classifier, is_bf16: bool, pixels: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16):
            return model(pixels, labels, self.loss)

    def _try_step(self, images: Tensor, *, is_compiled: bool) -> None:
        """Take a step on some images, compiled if that works. Afterwards the optimizer has all of its state."""
        pixels, labels = self._trial_batch(images)
        self._compiled_size = len(pixels)
        if is_compiled:
            self._compiled = compile_method(self._forward), compile_method(self.optimizer_step.__call__)
        try:
            with seeded(self.device, 0):
                self.fast_model.train()
                self._step(pixels, labels)
        except Exception as error:  # torch.compile may raise anything
            if not is_compiled:
                raise
            log.warning("training continues without torch.compile: %s", first_line(error))
            self._compiled = None
            self.optimizer_step.make_capturable(is_fused=True)
            self._try_step(images, is_compiled=False)

    def _with_head(self, accelerated: AcceleratedCopy) -> Classifier:
        """Return an accelerated backbone with a copy of the classifier's head."""
        model = Classifier(accelerated.module, copy.deepcopy(self.model.head))
        return put_channels_last(model) if self.device.type == "cuda" else model

    def _check_gradients(self, plain: Classifier, images: Tensor) -> None:
        """Raise `RuntimeError` if the custom kernels' gradients on some images differ too much from PyTorch's."""
        some = images[: max(2, MAX_CHECKED_PIXELS // images[0].numel())]
        with seeded(self.device, 0):
            self.fast_model.train()
            self._backward(self._forward(*self._trial_batch(some)))
        in_bf16 = self._gradients(plain, some, is_bf16=True)
        with full_precision():
            check_gradients(self.flat.gradients(), in_bf16, self._gradients(plain, some, is_bf16=False))

    def _gradients(self, model: Classifier, images: Tensor, *, is_bf16: bool) -> dict[str, Tensor]:
        """Return the gradients of all parameters that a gradient reaches."""
        with seeded(self.device, 0):
            self._loss_of(model.train(), is_bf16, *self._trial_batch(images)).backward()
        gradients = {name: value.grad for name, value in trainable(model).items() if value.grad is not None}
        model.zero_grad()
        return gradients

    def _trial_batch(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels and labels for a trial step. Labels are of all classes, since one class gives no gradient."""
        classes = self.fast_model.head.out_features // self.transform.rotations.num_rotations
        labels = torch.arange(len(images), device=self.device) % classes
        uniform = torch.zeros(len(images), self.transform.draws, dtype=torch.float32, device=self.device)
        return self.transform(images, labels, uniform)

    def _names_by_index(self) -> dict[int, str]:
        """Return the names of the trained parameters by their index among the trainable ones, as optimizers count."""
        return {i: name for i, name in enumerate(trainable(self.fast_model)) if name in self.flat.parameters}

    def _guarded_views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the views of a vector by the parameter names of the original backbone."""
        prefix = "backbone.inner." if isinstance(self.fast_model.backbone, PaddedBackbone) else "backbone."
        return {name.removeprefix(prefix): view for name, view in self.flat.views(vector).items()}
