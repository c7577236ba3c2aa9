"""How the tasks share the weights: the figures behind the paper's picture of union and intersection."""

from typing import Any

import torch

from cps.masks import times_used, weights_on
from cps.network import SharedNetwork


def describe_weights(network: SharedNetwork) -> dict[str, Any]:
    """Return, in percent of weights, what each subnetwork uses, and how the tasks share each layer."""
    masks = [subnetwork.masks for subnetwork in network.subnetworks]
    used = {name: times_used(masks, name) for name in network.weights}
    total = sum(weight.numel() for weight in network.weights.values())

    def share(name: str, chosen: torch.Tensor) -> float:
        return 100 * weights_on(chosen, network.weights[name]) / network.weights[name].numel()

    def taken_after(tasks: int) -> float:
        union = {name: times_used(masks[:tasks], name) > 0 for name in network.weights}
        return 100 * sum(weights_on(union[name], w) for name, w in network.weights.items()) / total

    return {
        "weights": total,
        "subnetworks": [
            {"task": task, "density": 100 * network.density(task), "taken": taken_after(task + 1)}
            for task in range(len(masks))
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
            100 * sum(weights_on(used[name] == times, w) for name, w in network.weights.items()) / total
            for times in range(len(masks) + 1)
        ],
    }
