"""`python -m studies.far_domain SEED... --out FILE`: spectrograms of two notes, a domain far from photos.

A class is the interval between the notes, rising or falling; pitch, timing, loudness and timbre are random. What
decides is a relation between distant pixels that is no linear function of where they are. The signals are synthesised
from a seed. The closed form has the space and the classifier with the best accuracy on held-out training images:
random patches, or, if its weights are installed, EfficientNet-Lite0 on enlarged spectrograms. The same images are held
out for cps, where they choose the weights of the fusion.
"""

import argparse
import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cps
from cps.closed_form.sums import Moments, Sums
from cps.data.tasks import split_by_class
from cps.evaluation.evaluator import shuffled_groups
from cps.experiments.aggregate import format_mean
from cps.methods.closed_form import best_classes, select_tasks
from cps.network.architectures import Architecture
from cps.network.pretrained import installed_backbone, load_pretrained
from cps.runtime.devices import full_precision
from cps.runtime.environment import describe_device, versions
from studies.closed_forms import CANDIDATES
from studies.measurement import percent
from studies.published import describe_machine, read_json, write_compact

INTERVALS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)  # in sixths of an octave: the classes
TRAIN, TEST = 200, 100  # images of a class
RATE, SAMPLES, WINDOW = 8000, 4096, 512  # of the signals
SIDE = 32  # pixels of a spectrogram
LOWEST, HIGHEST = 200.0, 3200.0  # Hz
ENLARGED = 128  # pixels of a spectrogram for a network of photos
GROUP_SIZES = (1, 20)
SIZES = 5  # classes of a task


class SpectrogramNet(nn.Sequential):
    """Five convolutions, of which the last ones see the whole spectrogram."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 1
        for width, stride in ((32, 1), (32, 2), (64, 2), (64, 2), (128, 2)):
            layers += [
                nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def main() -> None:
    """Measure the given seeds; those that are already in the file are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="+", type=int, help="of the signals, the class order and the training")
    parser.add_argument("--epochs-scale", type=float, default=1.0, help="factor for the number of epochs")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    for seed in arguments.seeds:
        if str(seed) not in done:
            done[str(seed)] = _measure(seed, arguments.epochs_scale)
            write_compact(arguments.out, done)
            print(seed, done[str(seed)], flush=True)


def draw(number: int, seed: int) -> tuple[Tensor, list[int]]:
    """Return `number` spectrograms (1, 32, 32) of each class, from 0 to 1, and their classes."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(INTERVALS)).repeat(number)
    ratio = 2 ** (torch.tensor(INTERVALS)[labels] / 6)
    count = len(labels)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=draws)

    octaves = math.log2(HIGHEST / 2 / LOWEST) - torch.log2(ratio) - 0.1
    lower = LOWEST * 2 ** (0.1 + octaves * uniform(0, 1))  # Hz; the second harmonics stay below the highest frequency
    is_rising = uniform(0, 1) < 0.5
    first, second = torch.where(is_rising, lower, lower * ratio), torch.where(is_rising, lower * ratio, lower)
    change = uniform(0.4, 0.6) * SAMPLES  # when the second note begins
    seconds = torch.arange(SAMPLES) / RATE
    signal = torch.zeros(count, SAMPLES)
    for pitch, is_on in (
        (first, torch.arange(SAMPLES) < change[:, None]),
        (second, torch.arange(SAMPLES) >= change[:, None]),
    ):
        for harmonic in (1, 2):
            loudness = uniform(0.5, 1.0) / harmonic
            phase = uniform(0, 2 * math.pi)
            wave = torch.sin(2 * math.pi * harmonic * pitch[:, None] * seconds + phase[:, None])
            signal += loudness[:, None] * wave * is_on
    signal += uniform(0.1, 0.5)[:, None] * torch.randn(count, SAMPLES, generator=draws)
    return _spectrograms(signal), labels.tolist()


def _spectrograms(signal: Tensor) -> Tensor:
    """Return the logarithmic spectra (N, 1, 32, 32) by pitch and time."""
    hop = (SAMPLES - WINDOW) // (SIDE - 1)
    window = torch.hann_window(WINDOW)
    spectrum = torch.stft(signal, 1024, hop, WINDOW, window, center=False, return_complex=True).abs()
    frames = F.interpolate(spectrum, SIDE)  # (N, frequencies, time)
    edges = torch.logspace(math.log10(LOWEST), math.log10(HIGHEST), SIDE + 1) * 1024 / RATE
    bins = [frames[:, int(low) : max(int(low) + 1, int(high))].amax(dim=1) for low, high in pairwise(edges)]
    levels = torch.stack(bins, dim=1)[:, None].clamp(min=1e-3).log()
    low, high = levels.amin(dim=(1, 2, 3), keepdim=True), levels.amax(dim=(1, 2, 3), keepdim=True)
    return (levels - low) / (high - low)


def table_row() -> list[str]:
    """Return the row of the table of cps beside a closed form."""
    runs = list(read_json("far-domain").values())
    closed = [max(run["closed forms"].values(), key=lambda each: each["held out"]) for run in runs]
    cells = [
        format_mean([each[key] for each in values])
        for key in ("1", "20", "task known")
        for values in ([run["cps"] for run in runs], closed)
    ]
    return ["spectrograms of two notes, 2 tasks", "30 + 10 epochs", *cells, str(len(runs))]


def spaces_sentence() -> str:
    """Return the sentence about the spaces of the closed form."""
    runs = list(read_json("far-domain").values())
    found = {name: format_mean([run["closed forms"][name]["1"] for run in runs]) for name in runs[0]["closed forms"]}
    listed = " and ".join(f"{value} with `{name}`" for name, value in found.items())
    machine = describe_machine(runs[0]["device"], runs[0]["versions"])
    return f"Single spectrograms by the closed form: {listed} (%; n = {len(runs)}; {machine})."


def _measure(seed: int, epochs_scale: float) -> dict[str, Any]:
    """Learn the tasks and measure cps and the closed form on the test images."""
    train, test = draw(TRAIN, 2 * seed), draw(TEST, 2 * seed + 1)
    tasks = list(split_by_class(train, test, sizes=SIZES, order=seed, validation=0.1, seed=seed))
    fabric = cps.make_fabric(accelerator="cpu")
    training = cps.Training(max(1, round(30 * epochs_scale)), cps.Adam(3e-3), cps.Cosine(), batch_size=32)
    retraining = cps.Training(max(1, round(10 * epochs_scale)), cps.Adam(3e-3), cps.Cosine(), batch_size=32)
    torch.manual_seed(seed)
    learner = cps.Learner(
        SpectrogramNet(), rounds=1, train=training, retrain=retraining, pruner=cps.NNrelief(0.9), seed=seed,
        selectors=(cps.Fusion(), cps.MaxOutput()), fabric=fabric,
    )  # fmt: skip
    start = time.monotonic()
    for task in tasks:
        learner.learn(task)
        print(seed, len(learner.classes), "tasks", flush=True)
    seconds = time.monotonic() - start
    found = cps.evaluate(learner, tasks, group_sizes=GROUP_SIZES)
    return {
        "cps": {
            "task known": found.task_il.ACC,
            **{str(size): metrics.ACC for size, metrics in found.class_il["Fusion"].items()},
        },
        "seconds": seconds,
        "closed forms": {name: _closed_form(module, tasks) for name, module in _spaces().items()},
        "test images": len(test[1]),
        "device": describe_device(fabric),
        "versions": versions(),
    }


def _spaces() -> dict[str, nn.Module]:
    """Return the modules whose features are compared."""
    spaces: dict[str, nn.Module] = {"RandomPatches(250)": cps.RandomPatches(250).make((1, SIDE, SIDE), nn.Identity)}
    name = installed_backbone()
    if name is not None:
        found = load_pretrained(Architecture(name))
        spaces[f"Pretrained, {name}"] = _Enlarged(
            cps.Pretrained().make((3, ENLARGED, ENLARGED), lambda: found.module), found.preprocessing.normalize
        )
    return spaces


class _Enlarged(nn.Module):
    """A network of photos on spectrograms, in three equal colours and larger."""

    def __init__(self, network: nn.Module, normalize: cps.Normalize):
        super().__init__()
        self.network = network.eval()
        self.normalize = normalize

    def forward(self, images: Tensor) -> Tensor:
        large = F.interpolate(images, (ENLARGED, ENLARGED), mode="bicubic").clamp(0, 1).expand(-1, 3, -1, -1)
        return self.network(self.normalize(large))


@torch.no_grad()
def _closed_form(module: nn.Module, tasks: list[cps.Task]) -> dict[str, Any]:
    """Return the accuracy of the classifier with the best accuracy on held-out images, learned from the others."""
    names = [name for task in tasks for name in task.classes]
    parts = {}
    with full_precision():
        for part in ("train", "val", "test"):
            images = torch.cat([getattr(task, part)[0] for task in tasks])
            labels = torch.tensor([names.index(label) for task in tasks for label in getattr(task, part)[1]])
            parts[part] = torch.cat([module(batch) for batch in images.split(100)]), labels
    moments = Moments.of([Sums.of([parts["train"]], len(names))])
    held_out, truth = parts["val"]
    right = {
        name: percent(classifier.fit(moments)(held_out.double()).argmax(dim=1) == truth)
        for name, classifier in CANDIDATES.items()
    }
    chosen = max(right, key=right.__getitem__)
    features, truth = parts["test"]
    scores = CANDIDATES[chosen].fit(moments)(features.double())
    sizes = [len(task.classes) for task in tasks]
    task = truth // SIZES
    found: dict[str, Any] = {"classifier": chosen, "held out": right[chosen]}
    found["task known"] = percent(best_classes(scores, sizes, task) == truth)
    for size in GROUP_SIZES:
        groups = shuffled_groups(task, size, 0)
        selected = select_tasks(scores, sizes, groups)[groups]
        found[str(size)] = percent((selected == task) & (best_classes(scores, sizes, selected) == truth))
    return found


if __name__ == "__main__":
    main()
