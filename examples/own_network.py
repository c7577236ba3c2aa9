"""Any network: wrap your own, learn named classes in three shipments, save, load, predict."""

import sys

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import cps

QUICK = "--quick" in sys.argv
NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])


def make_backbone() -> nn.Module:
    """Return a network without its classifier: images -> features. A torchvision or timm model does as well."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.Conv2d(128, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


pixels, numbers = load_digits(return_X_y=True)
images, labels = pixels.reshape(-1, 1, 8, 8) / 16, NAMES[numbers]
order = ["three", "eight", "one", "zero", "seven", "five", "nine", "two", "six", "four"]
shipments = cps.split_by_class(
    (images[:1400], labels[:1400]), (images[1400:], labels[1400:]), sizes=[4, 3, 3], order=order
)

learner = cps.Learner(
    make_backbone(),
    pruner=cps.NNrelief(alpha=0.7),
    rounds=2,
    train=cps.Training(2 if QUICK else 20, cps.Adam(3e-3, weight_decay=5e-3), cps.Cosine(), batch_size=32),
    retrain=cps.Training(1 if QUICK else 10, cps.Adam(3e-3, weight_decay=5e-3), cps.Cosine(), batch_size=32),
)
proofs = []
for task in shipments:
    learner.learn(task)
    proofs.append(learner.fingerprint(len(proofs)))
    print(f"learned {list(task.classes)}: {learner.network.density(len(proofs) - 1):.0%} of the weights used")

learner.save("digits.cps")
learner = cps.load("digits.cps", make_backbone())
assert [learner.fingerprint(task) for task in range(3)] == proofs, "something old has changed"
print("nothing old has changed")
for index, task in enumerate(shipments):
    for size in (1, 20):
        found = learner.predict(task.test[0], group_size=size).classes
        print(f"shipment {index + 1}, groups of {size}: {np.mean(np.array(found) == task.test[1]):.0%} right")
