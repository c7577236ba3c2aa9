"""The costs that the design promises: the masked step, scoring, memory, and the twentieth task."""

import statistics
import time
import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import cps
from cps.cost import seconds_of
from cps.draft import Classifier, Draft
from cps.guard import bind
from cps.masks import full_masks
from cps.network import SharedNetwork

if TYPE_CHECKING:
    from lightning_fabric import Fabric

WIDTHS = (21, 42, 85, 170)  # the paper's ResNet-18(1/3)


def masked_step(fabric: "Fabric") -> dict[str, Any]:
    """Compare a training step that protects taken weights with the same step of a plain module."""
    device, batch = fabric.device, 128
    images = torch.randn(batch, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch,), device=device)
    dense = _plain_step(Classifier(cps.resnet18(3, WIDTHS), nn.Linear(WIDTHS[-1], 10)).to(device), images, labels)
    draft = _half_taken_draft(device)
    plain = _plain_step(draft.model, images, labels)
    protect = bind(draft.guard(), dict(draft.model.backbone.named_parameters()))

    def masked() -> None:
        plain()
        protect()

    ours, baseline, ratio = _compare(masked, dense, device, pairs=8 if device.type == "cpu" else 100)
    return _row("training step, ResNet-18(1/3), batch 128, half of the weights taken", ours, baseline, ratio, 1.1)


def scoring(fabric: "Fabric") -> dict[str, Any]:
    """Compare scoring and pruning a whole network with one epoch over the same images."""
    images = torch.randn(1024, 3, 32, 32, device=fabric.device)
    backbone = cps.resnet18(3, WIDTHS).to(fabric.device)
    masks = full_masks({n: p for n, p in backbone.named_parameters() if p.ndim > 1}, on=True)
    step = _plain_step(
        Classifier(backbone, nn.Linear(WIDTHS[-1], 10)).to(fabric.device),
        images[:128],
        torch.randint(0, 10, (128,), device=fabric.device),
    )
    pruner, batches = cps.NNrelief(), list(images.split(128))

    def epoch() -> None:
        for _ in batches:
            step()

    ours, baseline, ratio = _compare(lambda: pruner(backbone, masks, batches), epoch, fabric.device, pairs=2)
    return _row("NNrelief on 1,024 images, against one epoch over them", ours, baseline, ratio, None)


def memory(fabric: "Fabric") -> dict[str, Any]:
    """Compare the peak memory of learning a second task with that of training a plain module."""
    megabytes = {kind: _peak_memory(kind, fabric.device) for kind in ("masked", "dense")}
    ratio = megabytes["masked"] / megabytes["dense"]
    return {
        "what": "peak memory of training, ResNet-18, batch 128",
        "ours": f"{megabytes['masked']:.0f} MiB",
        "baseline": f"{megabytes['dense']:.0f} MiB",
        "ratio": ratio,
        "limit": 1.2,
    }


def growth(fabric: "Fabric") -> dict[str, Any]:
    """Compare the time to learn the late tasks of twenty with that of the early ones."""
    torch.manual_seed(0)
    training = cps.Training(4, batch_size=64)
    learner = cps.Learner(
        cps.SmallConvNet(3, (64, 128, 128)), rounds=1, train=training, retrain=training, fabric=fabric,
        pruner=cps.NNrelief(0.6),
    )  # fmt: skip
    seconds = []
    warnings.simplefilter("ignore", cps.CapacityWarning)
    for index in range(20):
        images = torch.rand(512, 3, 16, 16) + 0.1 * index
        labels = [2 * index + number % 2 for number in range(512)]
        began = time.perf_counter()
        learner.learn(cps.Task([2 * index, 2 * index + 1], train=(images, labels)))
        seconds.append(time.perf_counter() - began)
    late, early = statistics.median(seconds[13:]), statistics.median(seconds[1:8])
    return _row("learning tasks 14-20, against tasks 2-8", late, early, late / early, None)


def _plain_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-4)
    model.train()

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _half_taken_draft(device: torch.device, widths: tuple[int, ...] = WIDTHS) -> Draft:
    """Return the draft of a second task where the first has taken half, and half is pruned already."""
    network = SharedNetwork(cps.resnet18(3, widths))
    network.to(device)
    draws = torch.Generator().manual_seed(0)
    for name, mask in network.taken.items():
        network.taken[name] = (torch.rand(mask.shape, generator=draws) < 0.5).to(device)
    draft = network.grow(list(range(10)), widths[-1], draws)
    draft.keep_warm()
    draft.narrow({n: (torch.rand(m.shape, generator=draws) < 0.5).to(device) for n, m in draft.masks.items()})
    return draft


def _compare(
    ours: Callable[[], object], baseline: Callable[[], object], device: torch.device, *, pairs: int
) -> tuple[float, float, float]:
    """Return the median seconds of each and the median ratio of neighbours, taken in turns after a warm-up."""
    ours()
    baseline()
    times = [(seconds_of(ours, device), seconds_of(baseline, device)) for _ in range(pairs)]
    first, second = zip(*times, strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(a / b for a, b in times)


def _row(what: str, ours: float, baseline: float, ratio: float, limit: float | None) -> dict[str, Any]:
    texts = {"ours": f"{1000 * ours:.2f} ms", "baseline": f"{1000 * baseline:.2f} ms"}
    return {"what": what, **texts, "ratio": ratio, "limit": limit}


def _peak_memory(kind: str, device: torch.device) -> float:
    """Return the MiB that training allocates at its peak, the network included."""

    def train() -> None:
        images = torch.randn(128, 3, 32, 32, device=device)
        labels = torch.randint(0, 10, (128,), device=device)
        widths = (64, 128, 256, 512)
        if kind == "masked":
            draft = _half_taken_draft(device, widths)
            model = draft.model
            after = bind(draft.guard(), dict(model.backbone.named_parameters()))
        else:
            model, after = Classifier(cps.resnet18(3, widths), nn.Linear(512, 10)).to(device), lambda: None
        step = _plain_step(model, images, labels)
        for _ in range(2):
            step()
            after()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        train()
        return torch.cuda.max_memory_allocated(device) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        train()
    events: Any = trace.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes)) / 2**20
