"""`python -m studies.default_training SEED... --data FOLDER --out FILE`: which optimizer learns networks of many kinds.

Ten classes of CIFAR-100 with 60 training images each are learned as one task by networks of timm and by our own, from
random weights, with half of the default epochs and one pruning round. 100 other training images of each class are held
out: they choose the default, and no test image is looked at.
"""

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import cps
from cps.config import RETRAIN, TRAIN
from cps.data.datasets import read_cifar100
from cps.data.tasks import class_order
from cps.runtime.environment import describe_device, versions
from cps.training.settings import MakeOptimizer, Schedule, scale_epochs
from studies.published import describe_machine, markdown, read_json, write_compact

CLASSES, TRAIN_IMAGES, HELD_OUT_IMAGES = 10, 60, 100
EPOCHS_SCALE = 0.5
NETWORKS = {  # and the side of their images in pixels
    "timm:test_convnext": 64,
    "timm:test_efficientnet": 64,
    "timm:test_resnet": 64,
    "timm:test_vit": 160,
    "small": 32,
}


class Candidate(NamedTuple):
    """An optimizer with the schedules of dense training and of retraining."""

    optimizer: MakeOptimizer
    train: Schedule = cps.Cosine(warmup=5)
    retrain: Schedule = cps.Cosine(warmup=5)


PAPER = cps.Steps((20, 40, 60), 0.2), cps.Steps((15, 25, 40), 0.2)
CANDIDATES = {
    "Adam(0.01), steps (the paper's)": Candidate(cps.Adam(1e-2), *PAPER),
    "Adam(0.001), steps": Candidate(cps.Adam(1e-3), *PAPER),
    "AdamW(0.001), warm-up and cosine": Candidate(cps.AdamW(1e-3)),
    "AdamW(0.003), warm-up and cosine": Candidate(cps.AdamW(3e-3)),
    "SGD(0.03), warm-up and cosine": Candidate(cps.SGD(0.03)),
}


def main() -> None:
    """Measure the given seeds; what is already in the file is not repeated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="+", type=int, help="of the classes, the images and the training")
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-100")
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # small networks have many private weights
    logging.getLogger("cps").setLevel(logging.ERROR)
    (images, labels), _ = read_cifar100(arguments.data)
    done: dict[str, Any] = (
        json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {"runs": []}
    )
    known = {(run["candidate"], run["network"], run["seed"]) for run in done["runs"]}
    for seed in arguments.seeds:
        for network in arguments.networks:
            for name in arguments.candidates:
                if (name, network, seed) in known:
                    continue
                accuracy = measure(CANDIDATES[name], network, images, labels, seed)
                done["runs"].append({"candidate": name, "network": network, "seed": seed, **accuracy})
                done |= {"device": describe_device(cps.make_fabric(accelerator="cpu")), "versions": versions()}
                write_compact(arguments.out, done)
                print(done["runs"][-1], flush=True)


def measure(candidate: Candidate, network: str, images: torch.Tensor, labels: list[int], seed: int) -> dict[str, Any]:
    """Learn one task; return the accuracy on its training images and on those held out, in percent."""
    names = class_order(range(100), seed)[:CLASSES]
    draws = torch.Generator().manual_seed(seed)
    of_class = {name: [index for index, label in enumerate(labels) if label == name] for name in names}
    order = {name: torch.randperm(len(indices), generator=draws).tolist() for name, indices in of_class.items()}
    side = NETWORKS[network]

    def part(first: int, last: int) -> tuple[torch.Tensor, list[int]]:
        chosen = [of_class[name][index] for name in names for index in order[name][first:last]]
        pixels = F.interpolate(images[chosen].float() / 255, side, mode="bilinear") if side != 32 else images[chosen]
        return pixels, [labels[index] for index in chosen]

    train, held_out = part(0, TRAIN_IMAGES), part(TRAIN_IMAGES, TRAIN_IMAGES + HELD_OUT_IMAGES)
    learner = cps.Learner(
        cps.Architecture(network),
        rounds=1,
        train=scale_epochs(cps.Training(TRAIN.epochs, candidate.optimizer, candidate.train), EPOCHS_SCALE),
        retrain=scale_epochs(cps.Training(RETRAIN.epochs, candidate.optimizer, candidate.retrain), EPOCHS_SCALE),
        selectors=(cps.MaxOutput(),),
        fabric=cps.make_fabric(accelerator="cpu"),
        seed=seed,
    )
    try:
        learner.learn(cps.Task(names, train=train))
    except FloatingPointError as error:
        return {"train": 100 / CLASSES, "held out": 100 / CLASSES, "error": str(error)}
    accuracy = [100 * float((learner.predict(data[0], task=0) == data[1]).mean()) for data in (train, held_out)]
    return {"train": accuracy[0], "held out": accuracy[1], "density": learner.network.density(0)}


def training_table() -> str:
    """Return the table of the accuracy on held-out images by optimizer and network."""
    published = read_json("default-training")
    runs = published["runs"]
    networks = list(dict.fromkeys(run["network"] for run in runs))
    rows = []
    for name in CANDIDATES:
        found = [[r["held out"] for r in runs if (r["candidate"], r["network"]) == (name, each)] for each in networks]
        rows.append([name, *(" / ".join(f"{value:.1f}" for value in values) for values in found)])
    note = (
        f"Accuracy in % on held-out images of one task of {CLASSES} classes of CIFAR-100 with {TRAIN_IMAGES} training "
        f"images each, task known, chance {100 // CLASSES}; a value for each seed; half of the default epochs, one "
        f"pruning round; {describe_machine(published['device'], published['versions'])}. Empty: not measured, since "
        "another network had ruled it out."
    )
    return markdown(["optimizer, schedule", *networks], rows, note)


if __name__ == "__main__":
    main()
