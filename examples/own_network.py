"""Use your own network: learn named classes in three tasks, save, load and predict."""

import sys

import numpy as np
from torch import nn

import cps

QUICK = "--quick" in sys.argv
NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])


def make_backbone() -> nn.Module:
    """Return a network without its classifier: images -> features. A torchvision or timm model works as well."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.Conv2d(128, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


(images, digits), (test_images, test_digits) = cps.read_digits()
order = ["three", "eight", "one", "zero", "seven", "five", "nine", "two", "six", "four"]
tasks = cps.split_by_class((images, NAMES[digits]), (test_images, NAMES[test_digits]), sizes=[4, 3, 3], order=order)

learner = cps.Learner(
    make_backbone(),
    pruner=cps.NNrelief(alpha=0.7),
    rounds=2,
    train=cps.Training(2 if QUICK else 20, cps.Adam(3e-3, weight_decay=5e-3), cps.Cosine(), batch_size=32),
    retrain=cps.Training(1 if QUICK else 10, cps.Adam(3e-3, weight_decay=5e-3), cps.Cosine(), batch_size=32),
)
fingerprints = []
for index, task in enumerate(tasks):
    learner.learn(task)
    fingerprints.append(learner.fingerprint(index))
    print(f"learned {list(task.classes)}: {learner.network.density(index):.0%} of the weights used")

learner.save("digits.cps")
learner = cps.load("digits.cps", make_backbone())
assert [learner.fingerprint(task) for task in range(3)] == fingerprints, "an earlier task has changed"
print("no earlier task has changed")
for index, task in enumerate(tasks):
    for size in (1, 20):
        predicted = learner.predict(task.test[0], group_size=size).classes
        print(f"task {index + 1}, groups of {size}: accuracy {np.mean(np.array(predicted) == task.test[1]):.0%}")
