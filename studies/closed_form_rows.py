"""`python -m studies.closed_form_rows --cifar DIR --cache DIR --out FILE`: closed-form rows of tables of parts of cps.

Those are the tables of streams, unknown images, ways of training, and settings of the cascade. The classifiers are
those that `studies.closed_forms` chose on held-out images; both share the features in `--cache`. Nothing is trained.
Finished parts are not measured again.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cps
from cps.closed_form.calibration import (
    TEMPERATURES,
    best_temperature,
    leave_one_out_scores,
    log_loss_by_temperature,
    spread_indices,
)
from cps.closed_form.classifiers import LDA
from cps.closed_form.relative_distance import RelativeDistance, leave_one_out_distances
from cps.closed_form.sums import Moments, Sums
from cps.data.class_orders import class_order
from cps.data.tasks import split_by_class
from cps.evaluation.metrics import auroc
from cps.methods.closed_form import best_classes
from cps.runtime.environment import describe_device, versions
from cps.selection.rejection import STEPS
from cps.selection.stream import TaskFilter
from studies.closed_forms import CANDIDATES, CIFAR, DIGITS, ORDERS, Features, read_features
from studies.measurement import percent
from studies.published import closed_forms, read_json, write_compact
from studies.streams import DRAWS, RATES, draw_stream
from studies.unknown_images import summarize

LENGTH = 4000  # images of a stream, as in the published ones
CIFAR_KEY, DIGITS_KEY = f"cifar100, {CIFAR.space}", f"digits, {DIGITS.space}"


def main() -> None:
    """Measure all parts; what is already in the file is not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar", type=Path, required=True, help="folder of CIFAR-100")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the features")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    cifar = read_features(CIFAR, arguments.cifar, None, arguments.cache)
    digits = read_features(DIGITS, None, None, arguments.cache)
    parts: dict[str, Callable[[], Any]] = {
        "unknown": lambda: {str(order): _unknown_images(cifar, order) for order in ORDERS},
        "training": lambda: _held_out(cifar, 9999, 10, 0.1, 2, CIFAR_KEY),
        "settings": lambda: {key: _settings(key, cifar, digits) for key in read_json("cascade-settings")},
        "streams": lambda: _streams(cifar),
    }
    for name, measure in parts.items():
        if name not in done:
            done[name] = measure()
            print(name, done[name], flush=True)
        done |= {"device": describe_device(cps.make_fabric(accelerator="cpu")), "versions": versions()}
        write_compact(arguments.out, done)


def _classifier(key: str) -> LDA:
    """Return the classifier that was chosen on held-out images."""
    chosen = CANDIDATES[closed_forms()[key]["chosen"]]
    assert isinstance(chosen, LDA)
    return chosen


def _moments(features: Features, rows: Sequence[np.ndarray], *, flips: bool = True) -> Moments:
    """Return the moments of classes, given as the indices of their training images, with one sum in memory."""
    counts, means, scatter = [], [], None
    for images in rows:
        parts = features.train if flips else features.train[:1]
        values = torch.from_numpy(np.concatenate([part[images] for part in parts]))
        sums = Sums.of([(values, torch.zeros(len(values), dtype=torch.long))], 1)
        counts.append(sums.counts)
        means.append(sums.means)
        scatter = sums.scatter if scatter is None else scatter.add_(sums.scatter)
    assert scatter is not None
    images = float(torch.cat(counts).sum())
    return Moments(torch.cat(counts), torch.cat(means), scatter / images, images)


def _rows(labels: np.ndarray, classes: Sequence[Any]) -> list[np.ndarray]:
    return [np.flatnonzero(labels == name) for name in classes]


def _streams(features: Features) -> dict[str, dict[str, float]]:
    """Return the accuracy on streams of ten tasks by class order and rate of change.

    The temperature of the probabilities comes from leave-one-out scores of training images.
    """
    lda, classes = _classifier(CIFAR_KEY), features.classes
    moments = _moments(features, _rows(features.labels, classes))
    linear = lda.fit(moments)
    some = spread_indices(len(features.labels)).numpy()
    labels = torch.from_numpy(np.searchsorted(classes, features.labels[some]))
    left_out = leave_one_out_scores(torch.from_numpy(features.train[0][some]), labels, moments, lda)
    losses = log_loss_by_temperature(left_out, labels)
    temperature = best_temperature(losses)
    print("temperature", temperature, "of", TEMPERATURES, flush=True)
    test = torch.from_numpy(np.asarray(features.test))
    scores = torch.cat([linear(part.double()) for part in test.split(2000)]) / temperature
    found = {}
    for order in ORDERS:
        names = class_order(classes, order)
        columns = torch.tensor([classes.index(name) for name in names])
        images = [
            np.flatnonzero(np.isin(features.test_labels, names[first : first + 10])) for first in range(0, 100, 10)
        ]
        own = scores[torch.from_numpy(np.concatenate(images))][:, columns]
        truth = torch.tensor([names.index(name) for name in features.test_labels[np.concatenate(images)]])
        task = torch.arange(10).repeat_interleave(torch.tensor([len(part) for part in images]))
        found[str(order)] = {str(rate): _stream_accuracy(own, truth, task, rate) for rate in RATES}
        print(order, found[str(order)], flush=True)
    return found


def _stream_accuracy(scores: Tensor, truth: Tensor, task: Tensor, rate: float) -> float:
    """Return the mean accuracy on streams, from log probabilities of the classes, ten in each task."""
    sizes = [10] * 10
    shares = scores.softmax(dim=1).unflatten(1, (10, 10)).sum(dim=2)
    correct = []
    for seed in range(DRAWS):
        images = draw_stream(task, rate, LENGTH, seed)
        tasks = TaskFilter(10).update(shares[images]).argmax(dim=1)
        correct.append(best_classes(scores[images], sizes, tasks) == truth[images])
    return percent(torch.cat(correct))


def _unknown_images(features: Features, order: int) -> dict[str, Any]:
    """Return how the relative distance rejects images of the last five of ten tasks.

    Thresholds are quantiles of leave-one-out distances of training images. So mirror images, which would stay in the
    sums, are not added.
    """
    lda = _classifier(CIFAR_KEY)
    known = class_order(features.classes, order)[:50]
    rows = _rows(features.labels, known)
    moments = _moments(features, rows, flips=False)
    labels, images = (
        torch.arange(50).repeat_interleave(torch.tensor([len(part) for part in rows])),
        np.concatenate(rows),
    )
    some = spread_indices(len(images))
    values = torch.from_numpy(features.train[0][images[some.numpy()]])
    left_out = leave_one_out_distances(values, labels[some], moments, lda)
    quantiles = torch.quantile(left_out, torch.linspace(0, 1, STEPS + 1, dtype=left_out.dtype))
    distance = RelativeDistance.of(lda.fit(moments), moments.counts, moments.means)
    found = torch.cat([distance(part.double()) for part in torch.from_numpy(np.asarray(features.test)).split(2000)])
    is_known = torch.from_numpy(np.isin(features.test_labels, known))
    ranks = torch.searchsorted(quantiles, found, right=True) - 1.0
    rejected = summarize(ranks[is_known], ranks[~is_known])
    return rejected | {"AUROC": auroc(found[is_known], found[~is_known])}


def _settings(key: str, cifar: Features, digits: Features) -> dict[str, float]:
    """Return the accuracy on the held-out images of a run of `studies.cascade_settings`."""
    found = re.fullmatch(r"(\w+?)(?:-(\d+))?:(\d+)(?:-\d+)?, ([\d.]+) held out, epochs x [\d.]+, tasks (\w+)", key)
    assert found is not None, f"'{key}' is not a run of studies.cascade_settings"
    data, tasks, order, held_out, learned = found.groups()
    size = 2 if data == "digits" else 100 // int(tasks)
    features, closed = (digits, DIGITS_KEY) if data == "digits" else (cifar, CIFAR_KEY)
    return _held_out(features, int(order), size, float(held_out), None if learned == "all" else int(learned), closed)


def _held_out(
    features: Features, order: int, size: int, share: float, learned: int | None, key: str
) -> dict[str, float]:
    """Return the accuracy on held-out training images of the first tasks, and how well a task knows its own images.

    The split is that of the trained runs, which depends on the labels alone.
    """
    names = features.labels.tolist()
    indices = torch.arange(len(names), dtype=torch.float64).reshape(-1, 1, 1, 1)
    tasks = list(split_by_class((indices, names), None, sizes=size, order=order, validation=share))[:learned]
    classes = [name for task in tasks for name in task.classes]
    rows = [_indices(task.train, name) for task in tasks for name in task.classes]
    held_out = [_indices(task.val, name) for task in tasks for name in task.classes]
    linear = _classifier(key).fit(_moments(features, rows))
    scores = linear(torch.from_numpy(features.train[0][np.concatenate(held_out)]).double())
    truth = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(part) for part in held_out]))
    sizes = [len(task.classes) for task in tasks]
    return {
        "images": len(truth),
        "one image": percent(scores.argmax(dim=1) == truth),
        "task known": percent(best_classes(scores, sizes, truth // size) == truth),
    }


def _indices(data: Any, name: Any) -> np.ndarray:
    """Return the indices that stand for the images of a class."""
    images, labels = data
    return images.flatten()[torch.tensor([label == name for label in labels])].long().numpy()


if __name__ == "__main__":
    main()
