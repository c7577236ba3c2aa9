"""Predict many images and learn in closed form on many machines, with Ray Data; here with two workers on one machine.

Prediction needs no communication, and the sums of closed forms can be added up, so an existing engine spreads both.
It needs Ray: pip install "ray[data]"
"""

import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray  # pyright: ignore[reportMissingImports]
import ray.data  # pyright: ignore[reportMissingImports]
import torch

import cps

WORKERS, BATCH = 2, 256


class Predictor:
    """A worker of `map_batches`: it loads the model once, and then predicts one batch after another."""

    def __init__(self, model: str):
        torch.set_num_threads(1)  # the workers share the cores
        self.learner = cps.load(model, fabric=cps.make_fabric(accelerator="cpu"))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prediction = self.learner.predict(np.stack(batch["image"]))
        return {"index": batch["index"], "class": np.array(prediction), "confidence": prediction.confidence.numpy()}


def predict(images: Any, model: Path, *, workers: int = WORKERS) -> tuple[list[Any], float]:
    """Return the class of each image, and the images per second since the first batch came back.

    `ray.data.read_images(...)` reads files instead of arrays.
    """
    rows = ray.data.from_items([{"index": index, "image": image} for index, image in enumerate(images)])
    found = rows.map_batches(
        Predictor,
        fn_constructor_args=(str(model),),
        compute=ray.data.ActorPoolStrategy(size=workers),
        batch_size=BATCH,
    )
    classes, times = [None] * len(images), []
    for batch in found.iter_batches(batch_size=BATCH):
        times.append((time.perf_counter(), len(batch["index"])))
        for index, name in zip(batch["index"].tolist(), batch["class"].tolist(), strict=True):
            classes[index] = name
    later = sum(number for _, number in times[1:])
    return classes, later / max(times[-1][0] - times[0][0], 1e-9)


def learn_part(tasks: list[cps.Task]) -> cps.ClosedForm:
    """Return the sums over a part of the images of each task."""
    torch.set_num_threads(1)
    method = cps.ClosedForm()
    for task in tasks:
        method.learn(task)
    return method


def learn(parts: list[list[cps.Task]]) -> cps.ClosedForm:
    """Return the closed form of all parts: workers learn them, and their sums are added up."""
    remote = ray.remote(learn_part)
    first, *others = ray.get([remote.remote(part) for part in parts])
    for other in others:
        first.merge(other)
    return first


def main() -> None:
    """Compare the images per second of one process and of two workers, and learn in two parts."""
    quick = "--quick" in sys.argv
    train, (images, labels) = cps.read_digits()
    few = cps.Training(2 if quick else 10, cps.Adam(3e-3), cps.Cosine(), batch_size=32)
    learner = cps.Learner(cps.Architecture("small", channels=1), rounds=1, train=few, retrain=few)
    for task in cps.split_by_class(train, sizes=2):
        learner.learn(task)
    many = np.tile(images, (2 if quick else 200, 1, 1, 1))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "digits.cps"
        learner.save(model)
        one = Predictor(str(model))
        one({"index": None, "image": many[:BATCH]})
        start = time.perf_counter()
        batches = [one({"index": None, "image": many[at : at + BATCH]}) for at in range(0, len(many), BATCH)]
        rate = len(many) / (time.perf_counter() - start)
        expected = np.concatenate([batch["class"] for batch in batches])
        found, rate_of_workers = predict(many, model)
    assert found == expected.tolist()
    print(f"{np.mean(expected[: len(labels)] == labels):.1%} of single images are right, here and in the workers")
    print(f"images per second: {rate:.0f} in one process, {rate_of_workers:.0f} in {WORKERS} workers")

    halves = [list(cps.split_by_class((train[0][at::2], train[1][at::2]), sizes=2)) for at in range(2)]
    method = learn(halves)
    print(f"closed form in two parts: {np.mean(np.equal(method.predict(images), labels)):.1%} right")


if __name__ == "__main__":
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    main()
    ray.shutdown()
