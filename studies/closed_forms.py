"""`python -m studies.closed_forms DATA... --cache DIR --out FILE`: closed forms over fixed features, without training.

DATA are `digits`, `cifar100` (with `--cifar DIR`) and `cub200` (with `--cub DIR --weights FILE`). A tenth of the
training images is held out, or every tenth in turn if there are few; the classifier with the best accuracy on these
images is then measured on the test images. Features are computed once and kept in `--cache`. The command can be
interrupted at any time: running it again resumes.

Sums do not depend on the order of the images. So they are computed once for each class, and every class order and cut
into tasks adds the same sums.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import cps
from cps.closed_form.classifiers import Classifier
from cps.closed_form.spaces import Space
from cps.closed_form.sums import Moments, Sums
from cps.data.class_orders import class_order
from cps.data.examples import Data, as_examples, as_labels, iterate_batches, known_labels
from cps.data.normalize import Prepare
from cps.evaluation.evaluator import GROUP_SIZES
from cps.evaluation.method_evaluation import AccuracyRow
from cps.experiments.aggregate import describe_group_size, format_mean
from cps.experiments.recipes import RECIPES, Recipe
from cps.methods.closed_form_metrics import SELECTOR, ClosedFormMetrics, as_metrics, row_of_scores
from cps.runtime.environment import describe_device, versions
from cps.storage.json_codec import to_json
from studies.published import closed_forms, describe_machine, markdown, write_compact

SHRINKAGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7)
PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
CANDIDATES: dict[str, Classifier] = {
    str(each): each for each in (cps.NearestMean(), *map(cps.LDA, SHRINKAGES), *map(cps.Ridge, PENALTIES))
}
ORDERS = (1993, 1605, 2022)
MANY_CLASS_SUMS = 2500  # features; with more, the sums of a hundred classes do not fit in memory
BATCH = 128


class Study(NamedTuple):
    """Data, a space, and the cuts into tasks: name -> recipe of the published runs and numbers of classes."""

    recipe: str
    space: Space
    cuts: Mapping[str, Sequence[int]]
    orders: Sequence[int | None]
    folds: int  # of the held-out images: 1 for many images
    published: Sequence[str] = ()  # runs that the tables show beside others, so their matrices are kept


CIFAR_CUTS = {f"cifar100-{tasks}": (100 // tasks,) * tasks for tasks in (5, 10, 20, 50)}
CIFAR_CUTS["cifar100-b50"] = (50, 10, 10, 10, 10, 10)
LARGE_CUTS = {name: CIFAR_CUTS[name] for name in ("cifar100-5", "cifar100-10", "cifar100-20")}
CIFAR_PUBLISHED = [f"{name}-{order}" for name in CIFAR_CUTS if name != "cifar100-50" for order in ORDERS]
CUB_CUTS = {"cub200": (50,) * 4, "cub200-10": (20,) * 10, "cub200-100": (2,) * 100}
STUDIES = {
    "digits": [Study("digits", cps.RandomReLU(), {"digits": (2,) * 5}, (None, *range(10)), 10, ["digits-identity"])],
    "cifar100": [
        Study("cifar100-10", cps.RandomPatches(250), CIFAR_CUTS, ORDERS, 1, CIFAR_PUBLISHED),
        Study("cifar100-10", cps.RandomPatches(800), LARGE_CUTS, (1993,), 1),  # over the budget of 16 MiB
    ],
    "cub200": [Study("cub200", cps.Pretrained(), CUB_CUTS, (None, *ORDERS), 10, ["cub200-identity"])],
}
CIFAR, CUB, DIGITS = STUDIES["cifar100"][0], STUDIES["cub200"][0], STUDIES["digits"][0]  # in default spaces
DATA = {"digits": "digits", "cifar100": "CIFAR-100", "cub200": "CUB-200"}  # as in tables
CUT_LABELS = {"digits": "5 tasks", "cub200": "4 tasks", "cub200-10": "10 tasks", "cub200-100": "100 tasks"}
CUT_LABELS |= {f"cifar100-{tasks}": f"{tasks} tasks" for tasks in (5, 10, 20, 50)}
CUT_LABELS["cifar100-b50"] = "50 classes, then 5 tasks"


def main() -> None:
    """Measure; what is already in the file is not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+", choices=STUDIES)
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-100")
    parser.add_argument("--cub", type=Path, help="folder of CUB-200")
    parser.add_argument("--weights", type=Path, help="ImageNet weights of ResNet-18, safetensors")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the features")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--filters", type=int, nargs="+", help="only the random patches with these numbers of filters")
    arguments = parser.parse_args()
    folders = {"digits": None, "cifar100": arguments.cifar, "cub200": arguments.cub}
    done = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    for name in arguments.data:
        for study in STUDIES[name]:
            is_wanted = getattr(study.space, "filters", None) in (*(arguments.filters or []), None)
            if arguments.filters and not is_wanted:
                continue
            key = f"{name}, {study.space}"
            features = read_features(study, folders[name], arguments.weights, arguments.cache)
            entry = done.setdefault(key, {})
            if "chosen" not in entry:
                entry |= _choose(study, features)
                write_compact(arguments.out, done)
            _measure_test_images(study, features, entry, lambda: write_compact(arguments.out, done))


def accuracy_table() -> str:
    """Return the table of accuracy on the test images, by data, cut into tasks and group size."""
    rows = []
    for key, entry in closed_forms().items():
        cuts: dict[str, list[dict[str, Any]]] = {}
        for name, run in entry["runs"].items():
            cuts.setdefault(name.rsplit("-", 1)[0], []).append(run)
        for cut, runs in cuts.items():
            found = [format_mean([run["over images"][str(size)] for run in runs]) for size in GROUP_SIZES]
            known = format_mean([run["task known"] for run in runs])
            rows.append(
                [f"{DATA[key.split(',')[0]]}, {CUT_LABELS[cut]}", entry["space"], *found, known, str(len(runs))]
            )
    head = ["data", "space", *(describe_group_size(size) for size in GROUP_SIZES), "task known", "orders"]
    first = next(iter(closed_forms().values()))
    machine = describe_machine(first["device"], first["versions"])
    note = (
        "In %, over all test images after the last task (task known: the mean over tasks); mean and standard deviation "
    )
    note += (
        "over class orders. The images of CUB-200 are stored as WebP with a short side of 208 pixels, so figures on "
    )
    return markdown(head, rows, f"{note}the original images would differ slightly. {machine}.")


def choice_table() -> str:
    """Return the table of accuracy on held-out images, from which the classifier of each space is chosen."""
    entries = closed_forms()
    rows = []
    for name in CANDIDATES:
        cells = [f"{entry['held out'][name]:.1f}" for entry in entries.values()]
        chosen = [
            f"**{cell}**" if entry["chosen"] == name else cell
            for cell, entry in zip(cells, entries.values(), strict=True)
        ]
        rows.append([f"`{name}`", *chosen])
    for label, unit, values in (
        ("features", "", [f"{entry['features']:,}" for entry in entries.values()]),
        (
            "kept for all classes, float64",
            "MiB",
            [f"{sum(entry['kept'].values()) / 2**20:.1f}" for entry in entries.values()],
        ),
        ("held-out images", "", [f"{entry['held-out images']:,}" for entry in entries.values()]),
    ):
        rows.append([f"{label}{unit and f' ({unit})'}", *values])
    head = ["classifier", *(f"{DATA[key.split(',')[0]]}, `{entry['space']}`" for key, entry in entries.items())]
    first = next(iter(entries.values()))
    machine = describe_machine(first["device"], first["versions"])
    return markdown(head, rows, f"Accuracy on single held-out images of all classes in %; bold: the choice. {machine}.")


@dataclass(frozen=True)
class Features:
    """Features of the training images, perhaps of their mirror images, and of the test images, with their classes."""

    train: Sequence[np.ndarray]  # one array of features, or two
    labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    milliseconds: float  # for the features of one image

    @cached_property
    def classes(self) -> list[Any]:
        """All classes, sorted."""
        return sorted(set(self.labels.tolist()))

    def sums(self, name: Any, left_out: np.ndarray | None = None) -> Sums:
        """Return the sums of a class, perhaps without some images."""
        is_used = self.labels == name if left_out is None else (self.labels == name) & ~left_out
        rows = np.flatnonzero(is_used)
        values = torch.from_numpy(np.concatenate([part[rows] for part in self.train]))
        return Sums.of([(values, torch.zeros(len(values), dtype=torch.long))], 1)

    @cached_property
    def _known(self) -> dict[Any, Sums]:
        return {}

    def sums_once(self, name: Any) -> Sums:
        """Return the sums of a class, kept in memory if those of all classes fit."""
        if self.test.shape[1] > MANY_CLASS_SUMS:
            return self.sums(name)
        if name not in self._known:
            self._known[name] = self.sums(name)
        return self._known[name]


def cached_arrays(study: Study, folder: Path | None, cache: Path) -> list[tuple[np.ndarray, list[Any]]]:
    """Return the cached features of training and test images with their labels; `read_features` writes the cache."""
    prefix = _prefix(study)
    arrays = [np.load(cache / f"{prefix}-{part}.npy") for part in ("train", "test")]
    return [
        (values, _labels_of(data)) for values, data in zip(arrays, RECIPES[study.recipe]().read(folder), strict=True)
    ]


def read_features(study: Study, folder: Path | None, weights: Path | None, cache: Path) -> Features:
    """Return the features of all images, from the cache or computed."""
    recipe = RECIPES[study.recipe]()
    train, test = recipe.read(folder)
    labels, test_labels = (np.array(_labels_of(part)) for part in (train, test))
    module, prepare = _make_module(study, recipe, train, weights), Prepare(recipe.normalize)
    prefix = _prefix(study)
    parts = [cached_features(cache / f"{prefix}-train.npy", module, prepare, train)]
    if recipe.augment is not None:  # all recipes with augmentation flip images
        parts.append(cached_features(cache / f"{prefix}-train-flipped.npy", module, prepare, train, flipped=True))
    tested = cached_features(cache / f"{prefix}-test.npy", module, prepare, test)
    return Features(parts, labels, tested, test_labels, _milliseconds(module, prepare, test))


def _prefix(study: Study) -> str:
    """Return the start of the names of cached files."""
    return f"{study.recipe.split('-')[0]}-{study.space}"


@torch.inference_mode()
def cached_features(
    path: Path, module: nn.Module, prepare: Prepare, data: Data, *, flipped: bool = False
) -> np.ndarray:
    """Return the features of all images from a file, which is written first if there is none."""
    if not path.exists():
        examples = as_examples(data, lambda labels: torch.zeros(len(labels), dtype=torch.long))
        parts = []
        for done, (images, _) in enumerate(iterate_batches(examples, BATCH)):
            parts.append(module(prepare(images.flip(-1) if flipped else images)).float().numpy())
            if done % 20 == 0:
                print(f"{path.name}: {done * BATCH:,} of {len(examples):,}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".partial.npy")
        np.save(temporary, np.concatenate(parts))
        temporary.replace(path)
    features = np.load(path, mmap_mode="r")
    examples = as_examples(data, lambda labels: torch.zeros(len(labels), dtype=torch.long))
    images, _ = next(examples.batches([torch.arange(4)]))
    again = module(prepare(images.flip(-1) if flipped else images)).float()
    if not np.allclose(features[:4], again, atol=1e-4) or len(features) != len(examples):
        raise ValueError(f"'{path}' has other features than the code computes now; delete it")
    return features


def _choose(study: Study, features: Features) -> dict[str, Any]:
    """Measure all candidates on held-out images; return the entry of the file with the best one."""
    hits: dict[str, int] = dict.fromkeys(CANDIDATES, 0)
    images = 0
    for left_out in _folds(features, study.folds):
        moments = _moments(features, left_out)
        truth = torch.from_numpy(np.searchsorted(features.classes, features.labels[left_out]))
        rows = torch.from_numpy(features.train[0][left_out]).double()
        for name, classifier in CANDIDATES.items():
            hits[name] += int((classifier.fit(moments)(rows).argmax(dim=1) == truth).sum())
        images += len(truth)
    accuracy = {name: 100 * number / images for name, number in hits.items()}
    print(study.space, {name: round(value, 2) for name, value in accuracy.items()}, flush=True)
    return {
        "space": str(study.space),
        "features": features.test.shape[1],
        "flips": len(features.train) > 1,
        "kept": _kept(features),
        "training images": len(features.labels),
        "test images": len(features.test_labels),
        "held-out images": images,
        "held out": accuracy,
        "chosen": max(accuracy, key=accuracy.__getitem__),
        "milliseconds for the features of an image": features.milliseconds,
        "device": describe_device(cps.make_fabric(accelerator="cpu")),
        "versions": versions(),
        "runs": {},
    }


def _measure_test_images(study: Study, features: Features, entry: dict[str, Any], save: Any) -> None:
    """Measure the chosen classifier on the test images, for every order and cut into tasks."""
    classifier = CANDIDATES[entry["chosen"]]
    for order in study.orders:
        name = "identity" if order is None else order
        missing = {cut: sizes for cut, sizes in study.cuts.items() if f"{cut}-{name}" not in entry["runs"]}
        if not missing:
            continue
        start = time.monotonic()
        for cut, rows in _rows(features, classifier, order, missing).items():
            key = f"{cut}-{name}"
            seconds = features.milliseconds / 1000 * len(features.labels) * len(features.train)
            images = _images_of_tasks(features, order, study.cuts[cut])
            entry["runs"][key] = _summary(rows, images) | {"seconds": seconds}
            if key in study.published:
                task_il, class_il = as_metrics(rows)
                metrics = ClosedFormMetrics(
                    entry["space"], entry["chosen"], entry["flips"], task_il, class_il, _kept(features), seconds
                )
                entry["runs"][key]["metrics"] = to_json(metrics)
            print(key, {size: round(value, 2) for size, value in entry["runs"][key]["ACC"].items()}, flush=True)
        print(f"{time.monotonic() - start:.0f} s", flush=True)
        save()


def _rows(
    features: Features, classifier: Classifier, order: int | None, cuts: Mapping[str, Sequence[int]]
) -> dict[str, list[AccuracyRow]]:
    """Return for each cut the accuracy after each task; classes are added one by one in their order."""
    classes = features.classes if order is None else class_order(features.classes, order)
    tested = [np.flatnonzero(features.test_labels == name) for name in classes]
    test = torch.from_numpy(np.concatenate([features.test[rows] for rows in tested]))
    ends = {cut: np.cumsum(sizes).tolist() for cut, sizes in cuts.items()}
    found: dict[str, list[AccuracyRow]] = {cut: [] for cut in cuts}
    for count, moments in enumerate(_growing_moments(features, classes), start=1):
        due = [cut for cut in cuts if count in ends[cut]]
        if not due:
            continue
        images = sum(len(rows) for rows in tested[:count])
        linear = classifier.fit(moments)
        scores = torch.cat([linear(part.double()) for part in test[:images].split(2000)])
        for cut in due:
            sizes = cuts[cut][: ends[cut].index(count) + 1]
            places, truth = _by_task(tested, sizes)
            group_sizes = (*GROUP_SIZES, 60) if cut.endswith("b50") else GROUP_SIZES
            found[cut].append(row_of_scores(scores[places], truth, sizes, group_sizes))
    return found


def _by_task(tested: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return an order of images that are sorted by class, and the classes within each task in that order.

    The images of a task get the order that they have in the data, so that groups are those of an evaluation.
    """
    places, truth, done = [], [], 0
    for first, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
        own = tested[first : first + size]
        order = torch.from_numpy(np.concatenate(own)).argsort()
        names = torch.arange(size).repeat_interleave(torch.tensor([len(rows) for rows in own]))
        places.append(done + order)
        truth.append(names[order])
        done += len(order)
    return torch.cat(places), truth


def _growing_moments(features: Features, classes: Sequence[Any]) -> Iterator[Moments]:
    """Yield the moments of the first class, of the first two, and so on."""
    counts, means, scatter = [], [], torch.zeros(0)
    for index, name in enumerate(classes):
        sums = features.sums_once(name)
        counts.append(sums.counts)
        means.append(sums.means)
        scatter = sums.scatter.clone() if index == 0 else scatter.add_(sums.scatter)
        images = float(torch.cat(counts).sum())
        yield Moments(torch.cat(counts), torch.cat(means), scatter / images, images)


def _moments(features: Features, left_out: np.ndarray) -> Moments:
    """Return the moments of all classes without some images, with one covariance in memory."""
    counts, means, scatter = [], [], None
    for name in features.classes:
        sums = features.sums(name, left_out)
        counts.append(sums.counts)
        means.append(sums.means)
        scatter = sums.scatter if scatter is None else scatter.add_(sums.scatter)
    assert scatter is not None
    images = float(torch.cat(counts).sum())
    return Moments(torch.cat(counts), torch.cat(means), scatter / images, images)


def _folds(features: Features, folds: int) -> Iterator[np.ndarray]:
    """Yield which training images are held out: a tenth of each class, or one tenth after the other."""
    tenth = np.empty(len(features.labels), dtype=int)
    draw = np.random.RandomState(0)
    for name in features.classes:
        rows = np.flatnonzero(features.labels == name)
        tenth[draw.permutation(rows)] = np.arange(len(rows)) % 10
    for fold in range(folds):
        yield tenth == fold


def _images_of_tasks(features: Features, order: int | None, sizes: Sequence[int]) -> list[int]:
    """Return the number of test images of each task."""
    classes = features.classes if order is None else class_order(features.classes, order)
    ends = np.cumsum([0, *sizes])
    tasks = [classes[start:end] for start, end in itertools.pairwise(ends)]
    return [int(np.isin(features.test_labels, names).sum()) for names in tasks]


def _summary(rows: Sequence[AccuracyRow], images: Sequence[int]) -> dict[str, Any]:
    """Return the metrics of a run without the matrices: means over tasks, and the accuracy over all test images."""
    task_il, class_il = as_metrics(rows)
    found, selection = rows[-1].found[SELECTOR.name], rows[-1].selection[SELECTOR.name]
    return {
        "tasks": len(rows),
        "task known": task_il.ACC,
        "over images": {str(size): float(np.average(found[size], weights=images)) for size in class_il},
        "ACC": {str(size): metrics.ACC for size, metrics in class_il.items()},
        "AIA": {str(size): metrics.AIA for size, metrics in class_il.items()},
        "task found": {str(size): statistics.fmean(selection[size]) for size in class_il},
    }


def _kept(features: Features) -> dict[str, int]:
    """Return the bytes of a file with the sums of all classes and one covariance."""
    classes, dims = len(features.classes), features.test.shape[1]
    return {"counts": 8 * classes, "means": 8 * classes * dims, "covariances": 4 * dims * (dims + 1)}


def _labels_of(data: Data) -> list[Any]:
    return as_labels(data[1]) if isinstance(data, tuple) else known_labels(data) or []


def _make_module(study: Study, recipe: Recipe, data: Data, weights: Path | None) -> nn.Module:
    images, _ = data[0] if not isinstance(data, tuple) else (data[0][0], None)

    def pretrained() -> nn.Module:
        assert recipe.pretrained is not None
        backbone = recipe.make_backbone(0)
        recipe.pretrained(backbone, weights)
        return backbone

    return study.space.make(tuple(images.shape), pretrained).eval()


@torch.inference_mode()
def _milliseconds(module: nn.Module, prepare: Prepare, data: Data) -> float:
    """Return the time for the features of one image, in batches."""
    examples = as_examples(data, lambda labels: torch.zeros(len(labels), dtype=torch.long))
    images, _ = next(examples.batches([torch.arange(min(BATCH, len(examples)))]))
    module(prepare(images))
    start = time.monotonic()
    module(prepare(images))
    return 1000 * (time.monotonic() - start) / len(images)


if __name__ == "__main__":
    main()
