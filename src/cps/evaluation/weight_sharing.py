"""How the tasks share the weights: the figures behind the paper's picture of union and intersection."""

from itertools import accumulate
from typing import Any

import torch

from cps.network.masks import share_on, times_used, union, weights_on
from cps.network.shared import SharedNetwork


def describe_weights(network: SharedNetwork) -> dict[str, Any]:
    """Return, in percent of weights, what each subnetwork uses, and how the tasks share each layer."""
    masks = [subnetwork.masks for subnetwork in network.subnetworks]
    used = {name: times_used(masks, name) for name in network.weights}
    taken = [100 * share_on(together, network.weights) for together in accumulate(masks, union)]

    def share(name: str, chosen: torch.Tensor) -> float:
        return 100 * weights_on(chosen, network.weights[name]) / network.weights[name].numel()

    return {
        "weights": sum(weight.numel() for weight in network.weights.values()),
        "subnetworks": [
            {"task": task, "density": 100 * network.density(task), "taken": taken[task]} for task in range(len(masks))
        ],
        "layers": [
            {
                "name": name.removesuffix(".weight"),
                "weights": weight.numel(),
                "union": share(name, used[name] > 0),
                "intersection": share(name, used[name] == len(masks)),
            }
            for name, weight in network.weights.items()
        ],
        "sharing": [
            100 * share_on({name: number == times for name, number in used.items()}, network.weights)
            for times in range(len(masks) + 1)
        ],
    }
