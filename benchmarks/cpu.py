"""`python -m benchmarks.cpu`: ratios of process CPU time on one thread of a CPU, each measured within one run.

Process CPU time does not count what other programs on the machine do, so the ratios hold on a busy machine, too.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

import cps
from benchmarks.prediction import fastest_dense, paper_network, run_all
from benchmarks.timing import make_row, time_row
from benchmarks.training import BATCH, WIDTHS, half_taken_draft, plain_step
from cps.data.batch_transform import BatchTransform
from cps.data.decode import decode_image
from cps.data.examples import TensorExamples
from cps.network.backbones import SmallConvNet
from cps.network.classifier import Classifier
from cps.network.draft import Draft
from cps.network.freezing import Guard
from cps.network.masks import full_masks
from cps.network.partition import put_channels_last
from cps.runtime.environment import describe_device, versions
from cps.storage.atomic import write_json
from cps.training.steps import EpochPlan, PlainSteps

Rows = list[dict[str, Any]]
PAIRS = 5
PHOTOS, PHOTO_SIZE = 48, (1600, 1200)


def main() -> None:
    """Measure everything, print a line for each ratio, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks-one-thread.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start, rows = time.monotonic(), []
    for benchmark in (benchmark_steps, benchmark_pruning, benchmark_prediction, benchmark_decoding, benchmark_start):
        for row in benchmark():
            print(f"{row['what']}: {row['ours']}, {row['baseline']}, {row['ratio']:.2f}", flush=True)
            rows.append(row)
    results = {
        "device": describe_device(cps.make_fabric(accelerator="cpu")),
        "versions": versions(),
        "seconds": time.monotonic() - start,
        "results": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, results)


def benchmark_steps() -> Rows:
    """Compare a training step that protects sealed weights with the same step of a plain module in float32."""
    cases = {
        "ResNet-18(1/3), batch 128": (partial(cps.resnet18, 3, WIDTHS), WIDTHS[-1], BATCH, 32, 0.5),
        "ResNet-32, batch 128": (cps.resnet32, 64, BATCH, 32, 0.8),
        "SmallConvNet, batch 32": (partial(SmallConvNet, 3, widths=(64, 128, 128)), 128, 32, 32, 0.8),
        "small vision transformer, batch 32": (_vision_transformer, 192, 32, 32, 0.8),
    }
    rows = []
    for name, (make, features, batch, side, limit) in cases.items():
        images, labels = torch.randn(batch, 3, side, side), torch.arange(batch) % 10
        dense = plain_step(Classifier(make(), nn.Linear(features, 10)), images, labels)
        for precision in ("bf16-mixed", "32-true"):
            draft = half_taken_draft(make(), features, torch.device("cpu"))
            ours = _our_step(draft, images, labels, precision)
            label = f"training step in {precision}, {name}, against plain PyTorch in float32"
            rows.append(_compare(label, ours, dense, limit if precision == "bf16-mixed" else 1.02))
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10
    draft = half_taken_draft(cps.resnet18(3, WIDTHS), WIDTHS[-1], torch.device("cpu"))
    with_guard, without = (_our_step(draft, images, labels, "bf16-mixed", guard) for guard in (draft.guard(), {}))
    label = "training step in bf16-mixed, ResNet-18(1/3), batch 128, with the guard, against without"
    return [*rows, _compare(label, with_guard, without, 1.03, pairs=2 * PAIRS)]


def _vision_transformer() -> nn.Module:
    """Return torchvision's vision transformer with 4 blocks of 192 channels and patches of 4 x 4 pixels."""
    module = torchvision.models.VisionTransformer(32, 4, 4, 3, 192, 384)
    module.heads = nn.Sequential()
    return module


def _our_step(
    draft: Draft, images: Tensor, labels: Tensor, precision: str, guard: Guard | None = None
) -> Callable[[], object]:
    """Return a training step as the trainer takes it, by default with the guard of the draft."""
    fabric = cps.make_fabric(accelerator="cpu", precision=precision)
    steps = PlainSteps(draft.model, cps.Training(1, cps.Adam(1e-3)), fabric, BatchTransform())
    steps.begin(draft.model.train(), draft.guard() if guard is None else guard, None)
    number = len(images)
    plan = EpochPlan([torch.arange(number)], torch.zeros(number, 0), [1.0], [1.0])
    return partial(steps.run, TensorExamples(images, labels), plan)


def benchmark_pruning() -> Rows:
    """Compare pruning a trained network with one epoch over the same images in plain PyTorch."""
    images, labels = torch.randn(512, 3, 32, 32), torch.arange(BATCH) % 10
    backbone = cps.resnet18(3, WIDTHS)
    train = plain_step(Classifier(backbone, nn.Linear(WIDTHS[-1], 10)), images[:BATCH], labels)
    for _ in range(8):
        train()
    pruned = put_channels_last(backbone)
    step = plain_step(Classifier(cps.resnet18(3, WIDTHS), nn.Linear(WIDTHS[-1], 10)), images[:BATCH], labels)
    masks = full_masks({name: value for name, value in pruned.named_parameters() if value.ndim > 1}, on=True)

    def epoch() -> None:
        for _ in range(512 // BATCH):
            step()

    prune = partial(cps.NNrelief(), pruned, masks, list(images.split(BATCH)))
    return [_compare("NNrelief on 512 images, against one epoch over them in float32", prune, epoch, 1.2, pairs=3)]


def benchmark_prediction() -> Rows:
    """Compare the evidence of ten subnetworks with the fastest dense pass."""
    network, rows = paper_network(10, torch.device("cpu")), []
    for number, limit in ((1, 1.8), (20, 2.2), (128, 2.8)):
        images = torch.rand(number, 3, 32, 32)
        label = f"evidence of 10 subnetworks, {number} image{'s'[: number > 1]}, against the fastest dense pass"
        rows.append(_compare(label, partial(run_all, network, images), fastest_dense(network, images), limit))
    return rows


def benchmark_decoding() -> Rows:
    """Compare decoding of JPEG photos with torchvision's ImageFolder and DataLoader."""
    with tempfile.TemporaryDirectory() as folder:
        _write_photos(Path(folder))
        pipeline = [transforms.Resize(224), transforms.CenterCrop(224), transforms.PILToTensor()]
        loader = DataLoader(
            torchvision.datasets.ImageFolder(folder, transforms.Compose(pipeline)), batch_size=16, num_workers=0
        )
        files = sorted(Path(folder).rglob("*.jpg"))

        def ours() -> None:
            for file in files:
                decode_image(file, 224)

        label = f"decoding {PHOTOS} photos of {PHOTO_SIZE[0]} x {PHOTO_SIZE[1]}, against torchvision"
        return [_compare(label, ours, partial(list, loader), 1.0, pairs=3)]


def _write_photos(folder: Path) -> None:
    """Write smooth random images as JPEG files of two classes."""
    draws = torch.Generator().manual_seed(0)
    for index in range(PHOTOS):
        small = torch.randint(0, 256, (30, 40, 3), generator=draws, dtype=torch.uint8).numpy()
        file = folder / str(index % 2) / f"{index}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(small).resize(PHOTO_SIZE, Image.Resampling.BICUBIC).save(file, quality=90)


def benchmark_start() -> Rows:
    """Measure the CPU seconds of starting the command line, and of importing torch alone."""
    commands = {
        "cps --help": ["-m", "cps", "--help"],
        "import cps": ["-c", "import cps"],
        "import of the learner": ["-c", "import cps; cps.Learner; cps.make_fabric(accelerator='cpu')"],
    }
    torch_alone = _cpu_seconds(["-c", "import torch"])
    with tempfile.TemporaryDirectory() as folder:
        model, image = Path(folder) / "model.cps", Path(folder) / "image.jpg"
        _learn_a_small_model(model)
        Image.new("RGB", (64, 64)).save(image)
        commands["cps predict, one image"] = ["-m", "cps", "predict", "--model", str(model), str(image)]
        measured = {name: _cpu_seconds(command) for name, command in commands.items()}
    return [
        make_row(f"{name}, against importing torch", f"{seconds:.2f} s", f"{torch_alone:.2f} s", seconds / torch_alone)
        for name, seconds in measured.items()
    ]


def _learn_a_small_model(path: Path) -> None:
    training = cps.Training(1, cps.Adam())
    learner = cps.Learner(cps.Architecture("small"), train=training, rounds=0)
    learner.learn(cps.Task(("a", "b"), train=(torch.rand(32, 3, 32, 32), ["a", "b"] * 16)))
    learner.save(path)


def _cpu_seconds(command: list[str]) -> float:
    """Return the least CPU time of three runs of Python with these arguments."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(times)


def _compare(
    label: str, ours: Callable[[], object], baseline: Callable[[], object], limit: float, *, pairs: int = PAIRS
) -> dict[str, Any]:
    """Return a row with the median CPU times and the median ratio of neighbouring measurements."""
    times = []
    for _ in range(pairs + 1):
        pair = []
        for work in (ours, baseline):
            start = time.process_time()
            work()
            pair.append(time.process_time() - start)
        times.append(pair)
    first, second = zip(*times[1:], strict=True)  # the first pair is a warm-up
    ratio = statistics.median(a / b for a, b in times[1:])
    return time_row(label, statistics.median(first), statistics.median(second), ratio, limit)


if __name__ == "__main__":
    main()
