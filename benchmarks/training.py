"""The cost of learning: the training step that protects sealed weights, pruning, and memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import cps
from benchmarks.timing import compare, make_row, measure_start, time_row
from cps.data.augmentation import Augmentation
from cps.data.batch_transform import BatchTransform
from cps.data.examples import TensorExamples
from cps.data.normalize import Normalize, Prepare
from cps.network.backbones import large_resnet18
from cps.network.classifier import Classifier
from cps.network.draft import Draft
from cps.network.freezing import make_restore
from cps.network.masks import full_masks
from cps.network.shared import SharedNetwork
from cps.runtime.devices import deterministic_cudnn
from cps.training.cuda.captured_step import CapturedStep
from cps.training.steps import EpochPlan

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Rows = list[dict[str, Any]]
WIDTHS = (21, 42, 85, 170)  # of the paper's ResNet-18(1/3)
ROUND_WIDTHS = (24, 48, 88, 176)  # the same in multiples of eight
FULL_WIDTHS = (64, 128, 256, 512)  # of ResNet-18
BATCH, STEPS = 128, 8  # batch size, and steps per epoch on a GPU
CIFAR = cps.Chain((cps.PadCrop(4), cps.Flip()))
PREPARE = Prepare(Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)))


def benchmark_step(fabric: "Fabric") -> Rows:
    """Compare a training step that protects sealed weights with the same step of a plain module."""
    if fabric.device.type == "cuda":
        return _gpu_steps(fabric)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    dense = plain_step(Classifier(cps.resnet18(3, WIDTHS), nn.Linear(WIDTHS[-1], 10)), images, labels)
    masked = masked_step(half_taken_draft(cps.resnet18(3, WIDTHS), WIDTHS[-1], fabric.device), images, labels)
    label = "training step, ResNet-18(1/3), batch 128, half of the weights taken"
    return [time_row(label, *compare(masked, dense, fabric.device, pairs=8), 1.1)]


@dataclass(frozen=True)
class Case:
    """A backbone, the number of its features, and the images it is trained on."""

    backbone: Callable[[], nn.Module]
    features: int
    size: int = 32
    augment: Augmentation = CIFAR


def resnet_case(widths: tuple[int, ...]) -> Case:
    """Return a ResNet-18 of the given widths with images of the size of CIFAR."""
    return Case(partial(cps.resnet18, 3, widths), widths[-1])


def _gpu_steps(fabric: "Fabric") -> Rows:
    """Compare the captured step with plain PyTorch in bf16, torch.compile, no guard, and round widths."""
    device = fabric.device
    third, full = resnet_case(WIDTHS), resnet_case(FULL_WIDTHS)
    large = Case(large_resnet18, 512, 224, cps.Chain((cps.ResizedCrop(), cps.Flip())))
    plain = _plain_bf16_epoch(third, device)
    ours, start_of_ours = measure_start(partial(_captured_epoch, third, device), device)
    compiled, start_of_compiled = measure_start(partial(_compiled_epoch, third, device), device)

    def step_row(label: str, first: Callable[[], object], second: Callable[[], object], limit: float | None = None):
        ours, baseline, ratio = compare(first, second, device, pairs=25)
        return time_row(label, ours / STEPS, baseline / STEPS, ratio, limit)

    rows = [
        step_row("step, ResNet-18(1/3), against plain PyTorch in bf16", ours, plain),
        step_row("the same, with our kernels, against torch.compile", ours, compiled),
        make_row(
            "time until the first step, in a new process",
            f"{start_of_ours:.1f} s",
            f"{start_of_compiled:.1f} s",
            start_of_ours / start_of_compiled,
        ),
        step_row(
            "step, ResNet-18(1/3), against the same with PyTorch's optimizer and no guard",
            ours,
            _captured_epoch(third, device, is_guarded=False),
            1.05,
        ),
        step_row(
            "step, widths 21/42/85/170, against 24/48/88/176",
            ours,
            _captured_epoch(resnet_case(ROUND_WIDTHS), device),
            1.05,
        ),
    ]
    for name, case in (("ResNet-18", full), ("ResNet-18 at 224 x 224", large)):
        ours, plain = _captured_epoch(case, device), _plain_bf16_epoch(case, device)
        rows.append(step_row(f"step, {name}, against plain PyTorch in bf16", ours, plain))
    return rows


def benchmark_pruning(fabric: "Fabric") -> Rows:
    """Compare pruning a whole network with one epoch over the same images."""
    images = torch.randn(512, 3, 32, 32, device=fabric.device)
    backbone = cps.resnet18(3, WIDTHS).to(fabric.device)
    masks = full_masks({n: p for n, p in backbone.named_parameters() if p.ndim > 1}, on=True)
    labels = torch.randint(0, 10, (BATCH,), device=fabric.device)
    step = plain_step(Classifier(backbone, nn.Linear(WIDTHS[-1], 10)).to(fabric.device), images[:BATCH], labels)
    pruner, batches = cps.NNrelief(), list(images.split(BATCH if fabric.device.type == "cpu" else 512))

    def epoch() -> None:
        for _ in range(512 // BATCH):
            step()

    times = compare(lambda: pruner(backbone, masks, batches), epoch, fabric.device, pairs=2)
    return [time_row("NNrelief on 512 images, against one epoch over them", *times, None)]


def benchmark_memory(fabric: "Fabric") -> Rows:
    """Compare the peak memory of learning a second task with that of training a plain module."""
    mebibytes = {kind: _peak_memory(kind, fabric.device) for kind in ("masked", "dense")}
    masked, dense = mebibytes["masked"], mebibytes["dense"]
    label = "peak memory of training, ResNet-18, batch 128"
    return [make_row(label, f"{masked:.0f} MiB", f"{dense:.0f} MiB", masked / dense, 1.2)]


def plain_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a training step as it is usually written."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-4)
    model.train()

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def masked_step(draft: Draft, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return the same step for a draft, with its guard."""
    plain = plain_step(draft.model, images, labels)
    protect = make_restore(draft.guard(), dict(draft.model.backbone.named_parameters()))

    def step() -> None:
        plain()
        protect()

    return step


def half_taken_draft(backbone: nn.Module, features: int, device: torch.device, classes: int = 10) -> Draft:
    """Return the draft of a second task; half of all weights are taken, and half of the draft is pruned."""
    network = SharedNetwork(backbone)
    network.to(device)
    draws = torch.Generator().manual_seed(0)
    for name, mask in network.taken.items():
        network.taken[name] = (torch.rand(mask.shape, generator=draws) < 0.5).to(device)
    draft = network.new_draft(list(range(classes)), features, draws)
    draft.end_dense_training()
    draft.prune({n: (torch.rand(m.shape, generator=draws) < 0.5).to(device) for n, m in draft.masks.items()})
    return draft


def _plain_bf16_epoch(case: Case, device: torch.device) -> Callable[[], None]:
    """Return the steps of an epoch in plain PyTorch with bf16, channels last and a fused optimizer."""
    model = Classifier(case.backbone(), nn.Linear(case.features, 10)).to(device)
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-4, fused=True)
    examples, uniform = _make_examples(case, device)
    batches = list(
        zip(examples.images.split(BATCH), examples.targets.split(BATCH), uniform.to(device).split(BATCH), strict=True)
    )

    def epoch() -> None:
        for images, labels, draws in batches:
            pixels = PREPARE(case.augment(images, draws))
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(pixels), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def _captured_epoch(
    case: Case, device: torch.device, *, is_guarded: bool = True, can_compile: bool = False
) -> Callable[[], None]:
    draft = half_taken_draft(case.backbone(), case.features, device)
    examples, uniform = _make_examples(case, device)
    kind = CapturedStep if is_guarded else _Unguarded
    with deterministic_cudnn():
        training = cps.Training(1, cps.Adam())
        captured = kind(
            draft.model,
            examples.images[:BATCH],
            training,
            BatchTransform(PREPARE, case.augment),
            is_bf16=True,
            can_compile=can_compile,
        )
        captured.begin(draft.model, draft.guard() if is_guarded else {}, None)

    plan = EpochPlan(torch.arange(BATCH * STEPS).split(BATCH), uniform, [1.0] * STEPS, [1.0] * STEPS)

    def epoch() -> None:
        with deterministic_cudnn():
            captured.run(examples, plan)

    return epoch


def _compiled_epoch(case: Case, device: torch.device) -> Callable[[], None]:
    """Return the steps as they are for a backbone whose norm layers cannot be fused: compiled by torch."""
    with mock.patch("cps.training.cuda.accelerated_copy.fuse_norms", return_value=None):
        return _captured_epoch(case, device, can_compile=True)


class _Unguarded(CapturedStep):
    """A captured step that uses the optimizer of PyTorch and restores no sealed weights."""

    def _step(self, pixels: Tensor, labels: Tensor) -> None:
        loss = self._forward(pixels, labels)
        self._backward(loss)
        self.optimizer_step.optimizer.step()
        self.total_loss += loss.detach()


def _make_examples(case: Case, device: torch.device) -> tuple[TensorExamples, Tensor]:
    """Return the images of an epoch as bytes on the device, and the random numbers for their augmentation."""
    number = BATCH * STEPS
    images = torch.randint(0, 256, (number, 3, case.size, case.size), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (number,), device=device)
    return TensorExamples(images, labels), torch.rand(number, case.augment.draws)


def _peak_memory(kind: str, device: torch.device) -> float:
    """Return the peak memory of training in MiB, including the network."""

    def train() -> None:
        images = torch.randn(BATCH, 3, 32, 32, device=device)
        labels = torch.randint(0, 10, (BATCH,), device=device)
        if kind == "masked":
            step = masked_step(half_taken_draft(cps.resnet18(3, FULL_WIDTHS), 512, device), images, labels)
        else:
            step = plain_step(Classifier(cps.resnet18(3, FULL_WIDTHS), nn.Linear(512, 10)).to(device), images, labels)
        for _ in range(2):
            step()

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        train()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        train()
    events: Any = trace.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes)) / 2**20
