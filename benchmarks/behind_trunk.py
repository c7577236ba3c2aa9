"""`python -m benchmarks.behind_trunk`: predictions of photos by ten tasks behind one frozen trunk.

The baseline is one forward pass of the same backbone, in float32 in the default layout of PyTorch, and as fast as
it gets in bfloat16 with channels last. Images are noise, decoded already. Each ratio is the median of pairs of
neighbouring measurements.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cps
from benchmarks import RESULTS
from benchmarks.timing import compare
from cps.app.autoconfig import trunk_settings
from cps.network.pretrained import load_pretrained
from cps.runtime.devices import has_fast_bfloat16
from cps.runtime.environment import describe_device, versions
from cps.storage.atomic import write_json

TASKS, CLASSES, IMAGES = 10, 10, 8  # of each class, to learn from
BATCH = 50  # photos that the plain backbone gets at a time


def main() -> None:
    """Learn the tasks with and without training, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--photos", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "behind-trunk-cpu.json")
    options = parser.parse_args()
    fabric = cps.make_fabric(accelerator="cpu", precision="bf16-mixed" if has_fast_bfloat16() else "32-true")
    found = {
        "rows": [
            row
            for trains in (False, True)
            for row in measure(learn(options.backbone, fabric, trains=trains), options, trains=trains)
        ],
        "backbone": options.backbone,
        "device": describe_device(fabric),
        "versions": versions(),
    }
    write_json(options.out, found)


def learn(backbone: str, fabric: Any, *, trains: bool) -> cps.Learner:
    """Return a learner of ten tasks of noise, with subnetworks behind a trunk or without training."""
    pretrained = load_pretrained(cps.Architecture(backbone))
    size = pretrained.preprocessing.size
    learner = cps.Learner(
        pretrained.module,
        architecture=pretrained.architecture,
        normalize=pretrained.preprocessing.normalize,
        trunk=cps.suggest_trunk(pretrained.module, torch.zeros(2, 3, size, size)),
        selectors=(cps.Fusion(cps.SharedSpace(cps.Pretrained()), cascade_tasks=0),),
        fabric=fabric,
        map_copies=1,
        **trunk_settings(1),
    )
    for task in range(TASKS):
        names = list(range(CLASSES * task, CLASSES * (task + 1)))
        images = torch.randint(0, 256, (CLASSES * IMAGES, 3, size, size), dtype=torch.uint8)
        data = cps.Task(names, train=(images, names * IMAGES))
        _ = learner.learn(data) if trains else learner.learn_frozen(data)
    return learner


def measure(learner: cps.Learner, options: argparse.Namespace, *, trains: bool) -> list[dict[str, Any]]:
    """Return the times of predicting one photo and many, beside those of plain forward passes."""
    size = (learner.network.input_shape or (0,))[-1]
    plain = load_pretrained(cps.Architecture(options.backbone)).module.eval()
    rows = []
    for photos in (1, options.photos):
        images = torch.randint(0, 256, (photos, 3, size, size), dtype=torch.uint8)
        for baseline, forward in (("float32", _forward(plain, images)), ("fastest", _fast_forward(plain, images))):
            ours, theirs, ratio = compare(
                lambda images=images: learner.predict(images),
                forward,
                torch.device("cpu"),
                pairs=options.pairs if photos > 1 else 10 * options.pairs,
            )
            rows.append(
                {
                    "trained": trains,
                    "photos": photos,
                    "baseline": baseline,
                    "ours": ours,
                    "plain": theirs,
                    "ratio": ratio,
                }
            )
            print(rows[-1], flush=True)
    return rows


def _forward(module: nn.Module, images: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> object:
        return [module(part.float() / 255) for part in images.split(BATCH)]

    return run


def _fast_forward(module: nn.Module, images: Tensor) -> Callable[[], object]:
    """Return a forward pass in bfloat16 with channels last, if this CPU is fast in it."""

    @torch.no_grad()
    def run() -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bfloat16()):
            parts = ((part.float() / 255).contiguous(memory_format=torch.channels_last) for part in images.split(BATCH))
            return [module(part) for part in parts]

    return run


if __name__ == "__main__":
    main()
